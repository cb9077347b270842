"""Counts what torch.distributed moves to this rank; knows nothing of plans, layouts or executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Traffic", "count_traffic"]

_OTHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@dataclass
class Traffic:
    """What one rank received while it was counted."""

    recv_bytes: int = 0
    """Bytes of all-gathers and point-to-point messages, seals and padding included."""
    num_messages: int = 0
    """Messages received: the shares of other ranks in all-gathers, and point-to-point ones."""
    group_sizes: list[int] = field(default_factory=list)
    """Number of ranks in every all-gather."""
    num_exchanges: int = 0
    """Batches of point-to-point messages."""
    others: Counter[str] = field(default_factory=Counter)
    """Calls of any other collective, by its name."""

    @property
    def seal_bytes(self) -> int:
        """Least bytes of the seals: 16 end every message."""
        return 16 * self.num_messages

    def matches(self, planned_bytes: int) -> bool:
        """Whether what arrived is a plan's bytes, the seals, and less than 8 bytes to align each of them."""
        return 0 <= self.recv_bytes - self.seal_bytes - planned_bytes < 8 * max(1, self.num_messages)


@contextmanager
def count_traffic(observe: Callable[[], None] = lambda: None) -> Iterator[Traffic]:
    """Wraps torch.distributed until the block ends; `observe` is called before every collective that moves weights."""
    traffic = Traffic()
    real = {name: getattr(dist, name) for name in ("all_gather_single", "batch_isend_irecv", *_OTHERS)}

    def gather(incoming: torch.Tensor, outgoing: torch.Tensor, *args: Any, **options: Any) -> Any:
        traffic.recv_bytes += incoming.nbytes - outgoing.nbytes
        traffic.num_messages += incoming.nbytes // outgoing.nbytes - 1
        traffic.group_sizes.append(incoming.nbytes // outgoing.nbytes)
        observe()
        return real["all_gather_single"](incoming, outgoing, *args, **options)

    def exchange(operations: list[dist.P2POp]) -> Any:
        received = [operation.tensor.nbytes for operation in operations if operation.op is dist.irecv]
        traffic.recv_bytes += sum(received)
        traffic.num_messages += len(received)
        traffic.num_exchanges += 1
        observe()
        return real["batch_isend_irecv"](operations)

    def other(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            traffic.others[name] += 1
            return real[name](*args, **options)

        return call

    wrappers = {"all_gather_single": gather, "batch_isend_irecv": exchange, **{name: other(name) for name in _OTHERS}}
    try:
        for name, wrapper in wrappers.items():
            setattr(dist, name, wrapper)
        yield traffic
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
