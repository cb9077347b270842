"""Ranks that feed an engine together: one of them sends requests to it, and all get the result."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from hf_engine.agreement import Agreement, together
from hf_engine.process_groups import build_groups, is_alive
from hf_protocols.errors import BackendError, HybridFlowError
from hf_protocols.topology import GenerationSpec, Topology
from hf_protocols.validation import show

__all__ = ["Replica", "build_replica", "require_process_group", "require_ranks"]

T = TypeVar("T")


class Replica:
    """The ranks that feed one engine, seen from one of them. Every method is collective over them.

    Args:
        ranks: in tensor-parallel order.
        group: of these ranks and nobody else's; None for a single rank.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self._group = group

    def close(self) -> None:
        """Gives the group back, unless torch.distributed was shut down with all its groups before."""
        group, self._group = self._group, None
        if group is not None and group is not dist.group.WORLD and is_alive(group):
            dist.destroy_process_group(group)

    @property
    def is_first(self) -> bool:
        """True if this rank runs the engine."""
        return dist.get_rank() == self.ranks[0]

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on the first rank; every rank gets its result, or raises its error where that is ours."""
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [(True, action())]
            except HybridFlowError as error:
                outcome = [(False, error)]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=self.ranks[0], group=self._group)
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        result: T = value
        return result

    @contextmanager
    def together(self, method: str) -> Iterator[Agreement]:
        """Checks of a method that either all ranks pass or none; see `hf_engine.agreement.together`.

        Raises:
            BackendError: on every rank, if the ranks got different arguments: the numbers of their agreements differ.
        """
        if self._group is None:
            yield Agreement()
            return
        with together(f"{method} was not done", self._group) as agreement:
            yield agreement
        if not agreement.is_alike:
            numbers = self.gather(agreement.number)
            others = [rank for rank, number in zip(self.ranks, numbers, strict=True) if number != numbers[0]]
            raise BackendError(
                f"{method}: of the replica {self.ranks} the ranks {others} were given something else than rank "
                f"{self.ranks[0]}, and share its engine. Pass the same to all of them"
            )

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in tensor-parallel order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def require_one_machine(self) -> None:
        """Refuses ranks on several machines, because the engine's processes read the ranks' memory.

        Raises:
            BackendError: naming the ranks on other machines.
        """
        places = self.gather((socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino))
        if len(set(places)) > 1:
            raise BackendError(
                f"an SGLang engine runs on one machine, the replica of the ranks {self.ranks} lies on "
                f"{[host for host, _ in places]}. Choose a gen_tp_size that divides the ranks of a machine"
            )


def require_process_group(backend: str) -> None:
    """Refuses to build a backend before its ranks can agree on anything.

    Raises:
        BackendError: naming the call that makes the default process group.
    """
    if not dist.is_initialized():
        raise BackendError(
            f"backend {show(backend)} runs in the ranks of the default process group, and there is none. Call "
            "torch.distributed.init_process_group first"
        )


def require_ranks(backend: str, topology: Topology) -> Topology:
    """The topology with generation sizes, if its ranks are those of the default process group.

    Raises:
        BackendError: with both numbers.
    """
    if dist.get_world_size() != topology.world_size:
        raise BackendError(
            f"backend {show(backend)} runs in the ranks of the default process group: it has {dist.get_world_size()} "
            f"ranks, the topology {topology.world_size}"
        )
    return replace(topology, generation=topology.generation or GenerationSpec())


def build_replica(topology: Topology) -> Replica:
    """The ranks of the generation replica that this one is in. Collective over all ranks."""
    ranks = next(group for group in topology.groups("gen_tp") if dist.get_rank() in group)
    return Replica(ranks, build_groups(topology, "gen_tp") if len(ranks) > 1 else None)
