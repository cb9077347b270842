"""A pool in use: its slots, and the processes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from hf_controller.executors.ray.host_set import HostSet
from hf_controller.executors.ray.placement import PlacedPool

__all__ = ["OccupiedPool"]

_CLOSE_TIMEOUT_S = 5.0


@dataclass
class OccupiedPool:
    """A pool in use: its slots and its processes."""

    placed: PlacedPool
    host_sets: list[HostSet] = field(default_factory=list)

    def find_unfinished(self, but_for: HostSet | None = None) -> list[Any]:
        """Answers that are there once every call on the pool is over, or every one of other processes."""
        host_sets = [host_set for host_set in self.host_sets if host_set is not but_for]
        last = [process.last_answer for host_set in host_sets for process in host_set.processes]
        answers = [answer for answer in last if answer is not None]
        return ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)[1] if answers else []

    def end(self, host_sets: Sequence[HostSet], *, orderly: bool) -> None:
        """End the processes of some groups; where all calls are over, orderly, their workers close first."""
        # Ranks that are still at a call may never answer.
        if orderly and not self.find_unfinished():
            for host_set in host_sets:
                if host_set.failure is None:
                    host_set.close(_CLOSE_TIMEOUT_S)
        for host_set in host_sets:
            host_set.release()
