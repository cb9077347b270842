"""Ray's object store behind the transport's interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hf_controller.executors.ray.actor_ref import find_maker, own_origin
from hf_controller.executors.ray.handles import Fetched, LocalBatchHandle, Sealed, SplitBatchHandle, ValueHandle, attach
from hf_controller.executors.ray.wire import unpack_answer
from hf_controller.failures import CLOSED, LostResultError
from hf_protocols import PoolError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.data.transport import Shard, SliceRequest

__all__ = [
    "Origin",
    "RankStore",
    "RayStore",
    "describe_unread",
]

_LOOK_UP_TIMEOUT_MS = 5000
_WHY_LATE = "an earlier call hangs, or call_timeout_s is too small"


@dataclass(frozen=True)
class _Arrays:
    """The arrays in the contents of a `SplitBatchHandle`, for a reader that has the metadata."""

    contents: Any


@dataclass(frozen=True)
class Origin:
    """Location of objects: their machine, the actor there that serves slices of them, if any, and their maker."""

    node: str
    slicer: str | None
    maker: str = ""


class RayStore:
    """Objects in shared memory; a handle is an ObjectRef, and dropping every copy of it frees the object.

    Args:
        slicer: name of the actor that cuts slices of what this process puts.
        announce: called with the bytes of each list of arrays before it is stored.
    """

    def __init__(self, slicer: str | None = None, *, announce: Callable[[int], None] | None = None) -> None:
        self._slicer = slicer
        self._announce = announce
        self._actors: dict[str, Any] = {}
        self._closed = False

    def close(self) -> None:
        """Refuses everything from now on: Ray would start a cluster, or join one that runs here, to serve it."""
        self._closed = True

    @cached_property
    def origin(self) -> Origin:
        """This process's machine and slicer, and the name of its death in a `Failure`."""
        return Origin(ray.get_runtime_context().get_node_id(), self._slicer, own_origin())

    def put(self, value: Any) -> Any:
        """Stores a list of arrays; they are copied into shared memory once."""
        self._check_open()
        if self._announce is not None:
            self._announce(sum(array.nbytes for array in value))
        return Sealed(ray.put(value))

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError(CLOSED)

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values; arrays are views of shared memory.

        Raises:
            WorkerTimeoutError: if one is not there in time.
            LostResultError: if the process that made one is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        first = self._get([_first_reference(handle) for handle in handles], timeout_s)
        values = [_open(handle, value) for handle, value in zip(handles, first, strict=True)]
        near = {
            index: handle.contents
            for index, (handle, value) in enumerate(zip(handles, values, strict=True))
            if isinstance(handle, SplitBatchHandle) and not self.is_far(getattr(value, "origin", self.origin))
        }
        contents = self._get(list(near.values()), max(0.0, deadline_s - time.monotonic()))
        for index, value in zip(near, contents, strict=True):
            values[index] = attach(value)
        return values

    def _get(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        asked = [reference for reference in references if not isinstance(reference, Fetched)]
        self._check_open()
        try:
            found = iter(ray.get(asked, timeout=timeout_s) if asked else [])
        except GetTimeoutError as error:
            why = describe_unread(asked) or _WHY_LATE
            raise WorkerTimeoutError(
                f"{len(asked)} objects of earlier calls were not there after {timeout_s:g} s: {why}"
            ) from error
        except RayError as error:
            raise LostResultError(f"an earlier call's result {_describe_loss(error)}", find_maker(error)) from error
        return [each.arrays if isinstance(each, Fetched) else next(found) for each in references]

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Waits until the values exist, or the process that would make them is gone.

        Raises:
            WorkerTimeoutError: if neither happens in time.
        """
        self._check_open()
        if late := ray.wait(list(handles), num_returns=len(handles), timeout=timeout_s, fetch_local=False)[1]:
            raise WorkerTimeoutError(
                f"{len(late)} earlier calls of the pool were not done after {timeout_s:g} s: {_WHY_LATE}"
            )

    def is_far(self, origin: Origin) -> bool:
        """Returns True if objects of `origin` are on another machine where an actor serves slices."""
        return origin.slicer is not None and origin.node != self.origin.node

    def request(self, shard: Shard, request: SliceRequest) -> Any:
        """Asks a far shard's slicer for a slice.

        Raises:
            LostResultError: if the slicer is gone.
        """
        self._check_open()
        name = shard.origin.slicer
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name)
        except ValueError as error:
            raise LostResultError(
                f"an earlier call's result is lost: the process {name} that holds it is gone", shard.origin.maker
            ) from error
        # In a list, so that the object itself stays where it is.
        return self._actors[name].cut.remote([_first_reference(shard.arrays)], request)


class RankStore(RayStore):
    """The store of a rank's process: what a call returns travels with its answer, see `CallServer.run_apart`."""

    def put(self, value: Any) -> Any:
        """Keeps the arrays until the call answers."""
        return Fetched(value)


def describe_unread(references: Sequence[Any]) -> str:
    """Describes objects that were spilled to disk, requested, and are not in memory; empty if there are none.

    Ray tries for ever to read a file that is gone.
    """
    asked = list(dict.fromkeys(references))
    if not asked:
        return ""
    made = ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)[0]
    here = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0])
    try:
        places = ray.experimental.get_object_locations(asked, timeout_ms=_LOOK_UP_TIMEOUT_MS)
    except RayError:
        return ""
    unread = [each for each in made if each not in here and places.get(each, {}).get("did_spill")]
    if not unread:
        return ""
    return (
        f"an earlier call's result is lost, or its disk is slow: {len(unread)} object(s) were spilled to disk and "
        "could not be read back. Rebuild the pool that waits, make the batch again, and raise object_store_bytes"
    )


def _first_reference(handle: Any) -> Any:
    if isinstance(handle, SplitBatchHandle):
        return handle.metadata
    if isinstance(handle, LocalBatchHandle | ValueHandle | _Arrays):
        return handle.contents
    return handle.open() if isinstance(handle, Sealed) else handle


def _open(handle: Any, value: Any) -> Any:
    """Returns a handle's contents for a reader: an object, a shard with available arrays, or a failure."""
    if isinstance(handle, SplitBatchHandle):
        outcome: Any = unpack_answer(value)[0]
        if getattr(outcome, "arrays", handle) is None:
            return replace(outcome, arrays=_Arrays(handle.contents))
        return outcome
    if isinstance(handle, _Arrays):
        return value[1]
    return attach(value) if isinstance(handle, LocalBatchHandle) else value


def _describe_loss(error: RayError) -> str:
    """Describes why an object is not there: the first line of Ray's error, or the reason why it was never packed."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    if cause is not None and not isinstance(cause, RayError):
        return f"cannot travel to another process ({type(cause).__name__}: {cause})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"is lost: {lines[0] if lines else type(error).__name__}"
