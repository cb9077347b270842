"""A default process group that knows which rank acts and refuses every collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

from torch import distributed

from hf_controller.groups.default_group import is_only_group, name_group, plain_tracebacks
from hf_protocols import ProtocolError

__all__ = ["RanksInTurn"]

_BACKEND = "hf_no_collectives"

# What torch.distributed calls on a process group, by its C++ name.
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class RanksInTurn:
    """The ranks of a group, one after another in one process: a context manager around all of them.

    They share one default process group: making one for each rank would each time take time in proportion to the number
    of ranks.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._group: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    @contextmanager
    def acting(self, rank: int) -> Iterator[None]:
        """Within the block, `torch.distributed` reports this process as `rank`, and every collective raises.

        Raises:
            ProtocolError: if the process already has a default group.
        """
        if self._group is None:
            self._group = _join(rank, self._world_size)
        self._group.acting_rank = rank
        try:
            yield
        finally:
            if not is_only_group(self._group):
                self._leave()  # the next rank finds nothing of what this one made or left

    def _leave(self) -> None:
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._group = None


def _join(rank: int, world_size: int) -> Any:
    if distributed.is_initialized():
        raise ProtocolError(
            f"rank {rank} of {world_size} cannot run in a process that has a default process group, such as groups of "
            "one rank make. Set needs_process_group = False in their worker classes if they call no collective, close "
            "their executor first, or use RayExecutor"
        )
    if not distributed.is_backend_available(_BACKEND):
        distributed.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    with plain_tracebacks():
        distributed.init_process_group(
            _BACKEND,
            store=distributed.HashStore(),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
        )
    return distributed.group.WORLD


def _create(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    group = _NoCollectives(rank, world_size)
    group.acting_rank = rank
    name_group(group, _BACKEND)
    return group


def _refuse(name: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ProtocolError(
            f"a collective ({name}) was called on rank {self.rank()} of {self.size()}, but an in-process group of "
            "several ranks runs them one after another. Use RayExecutor, or a topology of one rank"
        )

    return refuse


_NoCollectives: Any = type(
    "_NoCollectives",
    (distributed.ProcessGroup,),
    {
        "getBackendName": lambda self: _BACKEND,
        "rank": lambda self: self.acting_rank,
        **{name: _refuse(name) for name in _COLLECTIVES},
    },
)
