"""A default process group that knows its rank and refuses every collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from hf_controller.default_group import plain_tracebacks
from hf_protocols import ProtocolError

__all__ = ["no_collectives"]

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


@contextmanager
def no_collectives(rank: int, world_size: int) -> Iterator[None]:
    """Within it, ``torch.distributed`` says that this is ``rank`` of ``world_size``, and every collective raises.

    Raises:
        ProtocolError: if the process already has a default group.
    """
    if distributed.is_initialized():
        raise ProtocolError(
            f"rank {rank} of {world_size} cannot run beside a default process group in one process, such as groups of "
            "one rank make: set needs_process_group = False in their worker classes if they call no collective, close "
            "their executor first, or use RayExecutor"
        )
    if _BACKEND.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    with plain_tracebacks():
        distributed.init_process_group(
            _BACKEND,
            store=distributed.HashStore(),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
        )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _create(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    group = _NoCollectives(rank, world_size)
    group._set_group_name(f"{_BACKEND}_{rank}")
    return group


def _refuse(name: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ProtocolError(
            f"a collective ({name}) was called on rank {self.rank()} of {self.size()}, but an in-process group of "
            "several ranks runs them one after another: use RayExecutor, or a topology of one rank"
        )

    return refuse


_NoCollectives: Any = type(
    "_NoCollectives",
    (distributed.ProcessGroup,),
    {"getBackendName": lambda self: _BACKEND, **{name: _refuse(name) for name in _COLLECTIVES}},
)
