"""Ray's object store behind the transport's interface."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from hf_protocols import WorkerError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.transport import Shard, SliceRequest

__all__ = ["Origin", "RayStore", "Sealed"]


class Sealed:
    """A reference that stays packed until it is opened.

    A reader is told of every shard of a batch and reads a few of them. Unpacking a reference costs messages to its
    owner; Ray counts the reference as long as the object or the call that contains the packed one exists.

    Args:
        reference: the reference.
    """

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._packed = b""

    def __reduce__(self) -> tuple[Callable[[bytes], Sealed], tuple[bytes]]:
        # Packed anew inside the object that will contain it, so that Ray sees it there.
        return _reseal, (cloudpickle.dumps(self.open()),)  # type: ignore[no-untyped-call]

    def open(self) -> Any:
        """The reference."""
        if self._reference is None:
            self._reference = pickle.loads(self._packed)
        return self._reference


def _reseal(packed: bytes) -> Sealed:
    sealed = Sealed(None)
    sealed._packed = packed
    return sealed


@dataclass(frozen=True)
class Origin:
    """Where objects lie: a machine, and the actor there that cuts slices of them, if there is one."""

    node: str
    slicer: str | None


class RayStore:
    """Objects in shared memory; a handle is an ObjectRef, and dropping every copy of it frees the object.

    Args:
        slicer: name of the actor that cuts slices of what this process puts.
    """

    def __init__(self, slicer: str | None = None) -> None:
        self._slicer = slicer
        self._actors: dict[str, Any] = {}

    @cached_property
    def origin(self) -> Origin:
        """This process's machine and slicer."""
        return Origin(ray.get_runtime_context().get_node_id(), self._slicer)

    def put(self, value: Any) -> Any:
        """Store a list of arrays; they are copied into shared memory once."""
        return Sealed(ray.put(value))

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values; arrays are views of shared memory.

        Raises:
            WorkerTimeoutError: if one is not there in time.
            WorkerError: if the process that made one is gone.
        """
        references = [handle.open() if isinstance(handle, Sealed) else handle for handle in handles]
        try:
            return list(ray.get(references, timeout=timeout_s))
        except GetTimeoutError as error:
            raise WorkerTimeoutError(
                f"{len(handles)} objects of earlier calls were not there after {timeout_s:g} s: "
                "an earlier call hangs, or call_timeout_s is too small"
            ) from error
        except RayError as error:
            raise WorkerError(f"an earlier call's result is lost: {_first_line(error)}") from error

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Wait until the values exist, or the process that would make them is gone.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        pending = ray.wait(list(handles), num_returns=len(handles), timeout=timeout_s, fetch_local=False)[1]
        if pending:
            raise WorkerTimeoutError(
                f"the pool's earlier call was not done after {timeout_s:g} s on {len(pending)} rank(s)"
            )

    def is_far(self, origin: Origin) -> bool:
        """Whether objects of ``origin`` are on another machine, and somebody there cuts slices."""
        return origin.slicer is not None and origin.node != self.origin.node

    def request(self, shard: Shard, request: SliceRequest) -> Any:
        """Ask a far shard's slicer for a slice.

        Raises:
            WorkerError: if the slicer is gone.
        """
        name = shard.origin.slicer
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name)
        except ValueError as error:
            raise WorkerError(f"an earlier call's result is lost: the process {name} that holds it is gone") from error
        # In a list, so that the object itself stays where it is.
        return self._actors[name].cut.remote([shard.arrays.open()], request)


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
