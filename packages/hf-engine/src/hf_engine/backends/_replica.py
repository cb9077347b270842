"""Ranks that feed an engine together: all see the same results and the same errors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar
from zlib import crc32

import torch.distributed as dist

from hf_engine.backends._all_or_none import what_came_first
from hf_engine.process_groups import build_groups, build_own_group, default_timeout, local_device
from hf_engine.resharding.agreement import HIGHEST, extremes, refusals_of, relayed
from hf_protocols.arguments import show
from hf_protocols.errors import BackendError, HybridFlowError
from hf_protocols.topology import GenerationSpec, Topology

__all__ = ["Replica", "build_replica", "replica_of_all", "require_process_group", "require_ranks"]

T = TypeVar("T")


class Replica:
    """The ranks that feed one engine, or some, seen from one of them.

    What an action of one rank raises, all ranks raise: as it is where it is one of ours, else as a `BackendError`. A
    rank that died is torch.distributed's error, which the backend's method translates: `lost_peers_are_errors`.

    A rank that failed by itself skips what the others are in, so they name the method where they meet: it goes on to
    `settle`, and ranks that it finds elsewhere get an error there.

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
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the engine."""
        return dist.get_rank() == self.ranks[0]

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on the first rank; every rank gets its result, or raises its error. All must be here: see
        `together`.
        """
        outcome: list[Any] = [None]
        problem: HybridFlowError | None = None
        if self.is_first:
            try:
                outcome = [(True, action())]
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
                problem = _typed(error)
                outcome = [(False, problem)]
        if self._group is not None:
            with what_came_first(problem):
                dist.broadcast_object_list(outcome, src=self.ranks[0], group=self._group)
        succeeded, value = outcome[0]
        if not succeeded:
            raise _as_told_by(self.ranks[0], value)
        result: T = value
        return result

    def on_all(self, method: str, action: Callable[[], T]) -> T:
        """Runs the action on every rank; one rank's error is raised on all, so that none waits in vain."""
        with self.together(method):
            result = action()
        return result

    @contextmanager
    def together(self, method: str) -> Iterator[list[int]]:
        """A block of a method that every rank gets through, or none. Collective at its end.

        What the block adds to the list that it gets, such as a digest of its arguments, is to be alike on all ranks.

        Raises:
            HybridFlowError: on every rank, what the block raised on the first of those where it failed.
            BackendError: on every rank, if some are in another method, or were given something else.
        """
        problem: HybridFlowError | None = None
        given: list[int] = []
        try:
            yield given
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
            problem = _typed(error)
        if elsewhere := self._meet(method, problem, given):
            problem = BackendError(
                f"rank {dist.get_rank()} is in {method}, and of its replica {_places(elsewhere)}: a rank that failed "
                "says why itself; else call every method on all ranks of a replica alike"
            )
            raise relayed(problem, {}) if "settle" in elsewhere.values() else problem

    def settle(self) -> None:
        """Waits for the other ranks to come here, and tells those that are in a method instead. Collective.

        Raises:
            BackendError: if some did not come within the default group's deadline, but called one method after another.
        """
        stop = time.monotonic() + default_timeout().total_seconds()
        while elsewhere := self._meet("settle", None):
            if time.monotonic() > stop:
                raise BackendError(
                    f"rank {dist.get_rank()} waits for its replica, of which {_places(elsewhere)}: leave a block after "
                    "an error"
                )

    def _meet(self, method: str, problem: HybridFlowError | None, given: Sequence[int] = ()) -> dict[int, str]:
        """The other methods that ranks came with, none as a rule; raises what any came with where the methods agree."""
        if self._group is None:
            if problem is not None:
                raise problem
            return {}
        number = HIGHEST if problem is not None else crc32(f"{method} {given}".encode()) % HIGHEST
        with what_came_first(problem):
            lowest, highest = extremes(number, number, self._group, local_device())
            if lowest == highest < HIGHEST:
                return {}
            told = self.gather((method, problem, given))
        elsewhere = {rank: other for rank, (other, _, _) in zip(self.ranks, told, strict=True) if other != method}
        if problem is not None and elsewhere:
            raise problem
        failed = {rank: found for rank, (_, found, _) in zip(self.ranks, told, strict=True) if found is not None}
        if failed and not elsewhere:
            lead = next(iter(failed))
            # Only this rank's own has a traceback and a cause.
            raised = problem if problem is not None and lead == dist.get_rank() else failed[lead]
            reasons = [refusals_of(found, rank, str(found)).items() for rank, found in failed.items()]
            raise relayed(raised, dict(chain.from_iterable(reasons)))
        if not elsewhere:
            first = told[0][2]
            others = [rank for rank, (_, _, other) in zip(self.ranks, told, strict=True) if other != first]
            text = (
                f"{method}: of the replica {self.ranks} the ranks {others} were given something else than rank "
                f"{self.ranks[0]}: they share an engine, so give all of them the same rows and the same sampling"
            )
            raise relayed(BackendError(text), {others[0]: text})
        return elsewhere

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in tensor-parallel order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def require_one_machine(self) -> None:
        """The engine's processes read the ranks' memory.

        Raises:
            BackendError: naming the ranks on other machines.
        """
        places = self.gather((socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino))
        if len(set(places)) > 1:
            raise BackendError(
                f"an SGLang engine runs on one machine, the replica of the ranks {self.ranks} lies on "
                f"{[host for host, _ in places]}: choose a gen_tp_size that divides the ranks of a machine"
            )


def require_process_group(backend: str) -> None:
    """Refuses to build a backend before its ranks can agree on anything.

    Raises:
        BackendError: naming the call that makes the default process group.
    """
    if not dist.is_initialized():
        raise BackendError(
            f"backend {show(backend)} runs in the ranks of the default process group, and there is none: call "
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
    if ranks == tuple(range(dist.get_world_size())):
        return replica_of_all()
    return Replica(ranks, build_groups(topology, "gen_tp") if len(ranks) > 1 else None)


def replica_of_all() -> Replica:
    """All ranks of the default process group. Collective."""
    size = dist.get_world_size()
    return Replica(range(size), build_own_group() if size > 1 else None)


def _places(elsewhere: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} in {method}" for rank, method in elsewhere.items())


def _as_told_by(rank: int, found: HybridFlowError) -> HybridFlowError:
    """Another rank's error, or this one's own, which names that rank where it is told again."""
    return relayed(found, refusals_of(found, rank, str(found)))


def _typed(error: Exception) -> HybridFlowError:
    """The error itself where it is one of ours; else one that every rank can read, in a line."""
    if isinstance(error, HybridFlowError):
        return error
    line = str(error).partition("\n")[0]
    reason = f"{type(error).__name__}: {line}"
    typed = relayed(BackendError(f"rank {dist.get_rank()} failed: {reason}"), {dist.get_rank(): reason})
    typed.__cause__ = error
    return typed
