"""Ranks that feed an engine together: all see the same results and the same errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hf_protocols.errors import BackendError

__all__ = ["Replica"]

T = TypeVar("T")


class Replica:
    """The ranks that feed one engine, or some, seen from one of them.

    Args:
        ranks: in tensor-parallel order.
        group: of these ranks; None for a single one.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self._group = group

    def close(self) -> None:
        """Gives the group back, unless it is that of all ranks."""
        if self._group not in (None, dist.group.WORLD):
            dist.destroy_process_group(self._group)
        self._group = None

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the engine."""
        return dist.get_rank() == self.ranks[0]

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on the first rank; every rank gets its result, or raises its `BackendError`."""
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [(True, action())]
            except BackendError as error:
                outcome = [(False, error)]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=self.ranks[0], group=self._group)
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        result: T = value
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank; one rank's `BackendError` is raised on all, so that none waits in vain."""
        problem, results = None, []
        try:
            results = [action()]
        except BackendError as error:
            problem = error
        self.agree(problem)
        return results[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in tensor-parallel order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, problem: BackendError | None) -> None:
        """Raises the first rank's problem that has one, on every rank."""
        for found in self.gather(problem):
            if found is not None:
                raise found

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
