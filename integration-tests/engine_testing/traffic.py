"""Counts what torch.distributed moves to this rank; knows nothing of plans, layouts or executors.

The counter wraps the operators that all of torch.distributed ends in, so it sees every collective and message,
from any caller and function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Traffic", "count_traffic"]

_SILENT = {"barrier", "monitored_barrier_", "check_for_nan", "send"}
_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
_REDUCTIONS = {
    "allreduce_",
    "allreduce_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
}


@dataclass
class Traffic:
    """Data that one rank received while it was counted."""

    recv_bytes: int = 0
    """Bytes from other ranks, checksums and padding included; objects and reductions are counted apart."""
    num_messages: int = 0
    """Messages received: the shares of other ranks in collectives, and point-to-point ones."""
    group_sizes: list[int] = field(default_factory=list)
    """Number of ranks in every all-gather."""
    object_bytes: int = 0
    """Bytes from other ranks in pickled objects: messages between ranks, none of them weights."""
    reduced_bytes: int = 0
    """Bytes of this rank's part in reductions."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls by the operator's name in torch's c10d namespace."""

    @property
    def checksum_bytes(self) -> int:
        """Least bytes of the checksums: 8 end every message."""
        return 8 * self.num_messages

    def matches(self, planned_bytes: int, *, most_object_bytes: int = 0) -> bool:
        """Returns True if a plan's bytes arrived, and the checksums, with less than 8 bytes to align each of them.

        Reductions may carry a verdict each, six numbers of 4 bytes at most, and objects `most_object_bytes` together.
        """
        surplus = self.recv_bytes - self.checksum_bytes - planned_bytes
        verdicts = sum(self.calls[name] for name in _REDUCTIONS)
        is_little_else = self.reduced_bytes <= 24 * verdicts and self.object_bytes <= most_object_bytes
        return is_little_else and 0 <= surplus < 8 * max(1, self.num_messages)


@contextmanager
def count_traffic(observe: Callable[[], None] = lambda: None) -> Iterator[Traffic]:
    """Counts until the block ends; `observe` is called before everything but reductions and barriers.

    Only this thread is counted.

    Raises:
        NotImplementedError: in the block, for an operator of torch.distributed that this counter does not know.
    """
    traffic = Traffic()
    real = {name: getattr(dist, name) for name in _OBJECTS}
    with _Counter(traffic, observe) as counter:
        try:
            for name, function in real.items():
                setattr(dist, name, counter.counting(function))
            yield traffic
        finally:
            for name, function in real.items():
                setattr(dist, name, function)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, traffic: Traffic, observe: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic
        self._observe = observe
        self._is_telling = False

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of objects, whose bytes are counted as such."""

        def count(*args: Any, **options: Any) -> Any:
            self._is_telling = True
            try:
                return function(*args, **options)
            finally:
                self._is_telling = False

        return count

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self._count(name, args)
        elif "c10d" in namespace:
            raise NotImplementedError(f"{func} moves bytes in a way that count_traffic does not know")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        traffic = self._traffic
        traffic.calls[name] += 1
        if name in _REDUCTIONS:
            traffic.reduced_bytes += _bytes(args[0])
            return
        if self._is_telling and name not in _SILENT:
            traffic.object_bytes += _received(name, args)[0]
            return
        if name not in _SILENT:
            received, messages = _received(name, args)
            traffic.recv_bytes += received
            traffic.num_messages += messages
            if "allgather" in name:
                traffic.group_sizes.append(messages + 1)
        if "barrier" not in name:
            self._observe()


def _received(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes and messages that one call brings to this rank from others."""
    first, second = _bytes(args[0]), _bytes(args[1])
    group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    peers = group.size() - 1
    match name:
        case "allgather_" | "_allgather_base_" | "allgather_coalesced_" | "allgather_into_tensor_coalesced_":
            return first - second, peers
        case "gather_":
            return (first - second, peers) if args[3] == group.rank() else (0, 0)
        case "broadcast_":
            return (0, 0) if args[2] == group.rank() else (first, 1)
        case "scatter_":
            return (0, 0) if args[3] == group.rank() else (first, 1)
        case "recv_" | "recv_any_source_":
            return first, 1
        case "alltoall_":
            return first - args[0][group.rank()].nbytes, peers
        case "alltoall_base_":
            rows = args[3] or [1] * group.size()
            return first - first * rows[group.rank()] // max(1, sum(rows)), peers
    raise NotImplementedError(f"c10d::{name} moves bytes in a way that count_traffic does not know")


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
