"""Progress of a call on its ranks, as the controller knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.actor_group import ActorGroup
from hf_controller.executors.ray.store import describe_unread
from hf_controller.executors.ray.wire import unpack_answer
from hf_controller.failures import Deadline, Failure

if TYPE_CHECKING:
    from hf_controller.data.results import Outcome
    from hf_controller.failure_log import FailureLog
    from hf_controller.groups.resource_pool import ResourcePool
    from hf_controller.trace import CallReport

__all__ = ["CallState"]


@dataclass(eq=False, kw_only=True)
class CallState:
    """A call as the ranks of a group got it, and what they answered.

    Attributes:
        call_id: its number.
        role: the role.
        method: its method.
        pool: the pool of its group.
        actor_group: the processes of its group.
        answers: reference of every called rank's answer.
        inputs: numbers of the calls that made its inputs.
        references: ids of the objects that Ray brings to the ranks before they begin. A reference would keep them.
        deadline: how long the call may take once the calls that it waits for are over.
        failure_log: watches the answers.
        reports: what each rank reported.
        outcomes: what each rank left.
        failures: of the ranks that failed.
        passed_on: the ranks that failed because an input's own call did.
        lost: by rank, why its answer cannot be read.
        failure: why the call failed.
        is_told: True if the failure was reported to the program.
        is_late: whether the program got a timeout for this call.
        left: ids of the objects that it leaves.
        elapsed_s: time that its ranks have had so far.
        grace_s: how long ago the first of them failed.
    """

    call_id: int
    role: str
    method: str
    pool: ResourcePool
    actor_group: ActorGroup
    answers: Mapping[int, Any]
    inputs: frozenset[int]
    references: Sequence[bytes]
    deadline: Deadline
    failure_log: FailureLog
    reports: dict[int, CallReport] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    passed_on: set[int] = field(default_factory=set)
    lost: dict[int, RayError] = field(default_factory=dict)
    failure: Failure | None = None
    is_told: bool = False
    is_late: bool = False
    left: list[bytes] = field(default_factory=list)
    elapsed_s: float = 0.0
    grace_s: float = 0.0

    @property
    def origin(self) -> str:
        """The call's name as a `Failure`'s origin."""
        return f"call {self.call_id}"

    @property
    def is_over(self) -> bool:
        """True if the call failed, or every rank answered."""
        return self.failure is not None or not (self.has_failed or self.has_unread)

    @property
    def has_unread(self) -> bool:
        """True if a rank's answer was not read, and is not lost."""
        return len(self.reports) + len(self.lost) < len(self.answers)

    @property
    def has_failed(self) -> bool:
        """True if a rank failed."""
        return bool(self.failures or self.lost)

    @property
    def can_hang(self) -> bool:
        """True if the ranks may wait for each other: all ranks of a group that has a process group."""
        return self.actor_group.meets_peers and len(self.answers) == len(self.actor_group.processes)

    @property
    def first_failure_s(self) -> float:
        """When its first rank failed, in wall-clock seconds."""
        return min((self.reports[rank].span.end_s for rank in self.failures), default=float("inf"))

    def find_unread(self) -> dict[int, Any]:
        """The references of answers that were not read."""
        return {
            rank: handle for rank, handle in self.answers.items() if rank not in self.reports and rank not in self.lost
        }

    def read(self, rank: int) -> None:
        """Reads a rank's answer, which is there."""
        try:
            self.note_answer(rank, ray.get(self.answers[rank]))
        except RayError as error:
            self.lost[rank] = error

    def note_answer(self, rank: int, packed: Any) -> None:
        """Takes a rank's answer from somebody who read it."""
        self.outcomes[rank], report = unpack_answer(packed)
        self.reports[rank] = report
        if report.failure is not None:
            self.failures[rank] = report.failure
            if report.upstream:
                self.passed_on.add(rank)
        self.failure_log.note_watched(self.answers[rank], report)

    def choose(self, failures: Mapping[int, Failure]) -> Failure:
        """Returns the first of the ranks' failures by their clocks, or its cause if the call of an input failed."""
        rank = min(failures, key=lambda each: self.reports[each].span.end_s if each in self.reports else float("inf"))
        return self.failure_log.find_cause(failures[rank]) if rank in self.passed_on else failures[rank]

    def describe(self, error: Exception, rank: int) -> Failure:
        """A failure of this call that the controller itself found."""
        return Failure.of(error, role=self.role, method=self.method, rank=rank, origin=self.origin)

    def describe_unread(self) -> str:
        """Describes inputs that were spilled to disk and are not in memory; empty if Ray does not know.

        Ray knows nothing of an input whose future the program dropped.
        """
        try:
            return describe_unread([ray.ObjectRef(each) for each in self.references])
        except ValueError:
            return ""
