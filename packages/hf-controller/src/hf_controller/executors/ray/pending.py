"""Waiting for the ranks of a call: with a deadline, and for the first failure rather than for the last rank."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.causes import Causes, SentCall, choose_telling, find_lost
from hf_controller.executors.ray.store import ValueHandle, describe_unread
from hf_controller.executors.ray.waiting import Waiter
from hf_controller.executors.ray.wire import unpack_answer
from hf_controller.failures import Failure, LostResultError
from hf_protocols import HybridFlowError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.resource_pool import ResourcePool
    from hf_controller.results import Outcome
    from hf_controller.trace import CallReport, Trace
    from hf_controller.transport import ObjectStore

__all__ = ["RayCall", "take_ready"]


@dataclass
class _Seen:
    """What the controller knows of a call, and whether it told the program why it failed, or that it is late."""

    reports: dict[int, CallReport] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failure: Failure | None = None
    is_told: bool = False
    is_late: bool = False


class RayCall:
    """A call on the ranks of a group.

    Args:
        sent: the call as the ranks got it.
        pool: the pool of its group.
        handles: where readers find what the collected ranks left, in order.
        inputs: ids of the objects that Ray brings to the ranks before they begin. A reference would keep them.
        collected: the ranks whose outcomes make the result.
        timeout_s: deadline where none is given.
        waiter: waits.
        causes: finds why it failed.
        store: has the objects that the call returned.
        trace: watches the answers.
    """

    def __init__(
        self,
        *,
        sent: SentCall,
        pool: ResourcePool,
        handles: Sequence[Any],
        inputs: Sequence[bytes],
        collected: Sequence[int],
        timeout_s: float,
        waiter: Waiter,
        causes: Causes,
        store: ObjectStore,
        trace: Trace,
    ) -> None:
        self.handles = list(handles)
        self.call_id = sent.call_id
        self.pool = pool
        self._sent = sent
        self._inputs = inputs
        self._collected = tuple(collected)
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._causes = causes
        self._store = store
        self._trace = trace
        self._seen = _Seen()

    def without_results(self) -> RayCall:
        """The same call for who waits for its end, and keeps none of its results."""
        call = copy.copy(self)
        call.handles = []
        return call

    def finish(self) -> bool:
        """Wait for every rank and have the trace know why the call failed, or that it is late; whether it was in time.

        The program knows of one that it was told of, and of the end of a group. One that it was told is late is not
        waited for any more.
        """
        if self._seen.is_told or any(process.was_ended for process in self._sent.processes.values()):
            return True
        was_told_late = self._seen.is_late
        late = self._await_failure(0.0 if was_told_late else self._timeout_s)
        if late and was_told_late:
            return True
        failure = self._seen.failure
        if late:
            self._seen.is_late = True
            error = self._to_timeout(late, self._timeout_s)
            failure = self._causes.of_lateness(error, rank=min(self._sent.answers))
        if failure is not None:
            self._trace.explain(self, failure)
        return not late

    def find_failure(self) -> Failure | None:
        """Wait for every rank, or for the first that failed: why it did.

        Raises:
            WorkerTimeoutError: as :meth:`wait`.
        """
        return self._find_failure(self._timeout_s)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for every rank; the rows that each collected rank returned.

        Raises:
            HybridFlowError: the first rank's failure.
            WorkerTimeoutError: if a rank is not done in time, with each missing rank's last call and stack.
        """
        failure = self._find_failure(self._timeout_s if timeout_s is None else timeout_s)
        if failure is not None:
            self._seen.is_told = True
            self._trace.tell(self.call_id, failure)
            raise failure.to_error()
        return [self._seen.reports[rank].num_rows for rank in self._collected]

    def _find_failure(self, timeout_s: float) -> Failure | None:
        late = self._await_failure(timeout_s)
        if late:
            self._seen.is_late = True
            raise self._to_timeout(late, timeout_s)
        return self._seen.failure

    def _await_failure(self, timeout_s: float) -> list[int]:
        """Wait for every rank, or for the first that failed; the ranks that are late, if neither is in time."""
        answers = self._sent.answers
        deadline_s = time.monotonic() + timeout_s
        if not self._seen.reports and self._seen.failure is None:
            self._note_answers(answers, self._waiter.get_all(list(answers.values()), timeout_s))
        while self._seen.failure is None and len(self._seen.reports) < len(answers):
            pending = {handle: rank for rank, handle in answers.items() if rank not in self._seen.reports}
            ready = self._waiter.wait_some(list(pending), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return sorted(pending.values())
            self._read_answers({pending[handle]: handle for handle in ready})
        return []

    def outcomes(self, timeout_s: float | None) -> list[Outcome]:
        """After waiting, what the collected ranks left beside batches."""
        self.wait(timeout_s)
        if not isinstance(self.handles[0], ValueHandle):
            return [self._seen.outcomes[rank] for rank in self._collected]
        try:
            return self._store.get(self.handles, self._timeout_s if timeout_s is None else timeout_s)
        except LostResultError as error:
            explained = self.explain_loss(error)
            if explained is not None:
                raise explained from None
            # An object that cannot be packed is this call's failure, not the loss of another's.
            contents = {rank: handle.contents for rank, handle in zip(self._collected, self.handles, strict=True)}
            lost = find_lost(contents)
            if not lost:
                raise
            failure = self._causes.of_lost_object(*next(iter(lost.items())))
            self._trace.tell(self.call_id, failure)
            raise failure.to_error() from None

    def explain_loss(self, error: LostResultError) -> HybridFlowError | None:
        """The end of the process that made what cannot be read; None where it is another call's, or lives."""
        death = self._causes.of_loss(error)
        if death is None:
            return None
        self._trace.tell(self.call_id, death)
        return death.to_error()

    def _read_answers(self, ready: Mapping[int, Any]) -> None:
        try:
            answers = ray.get(list(ready.values()))
        except RayError:
            lost = find_lost(ready)
            here = {rank: handle for rank, handle in ready.items() if rank not in lost}
            self._note_answers(here, ray.get(list(here.values())))
            if self._seen.failure is None:
                self._seen.failure = self._causes.of_lost_answer(*next(iter(lost.items())))
            return
        self._note_answers(ready, answers)

    def _note_answers(self, ranks: Iterable[int], packed: Sequence[Any]) -> None:
        if not packed:
            return
        reports = []
        for rank, answer in zip(ranks, packed, strict=True):
            self._seen.outcomes[rank], self._seen.reports[rank] = unpack_answer(answer)
            reports.append(self._seen.reports[rank])
            self._trace.note_watched(self._sent.answers[rank], reports[-1])
        seen = choose_telling(reports)
        if seen is not None:
            failure, is_passed_on = seen
            self._seen.failure = failure  # for who asks again after an interrupt
            self._seen.failure = (self._trace.find_cause if is_passed_on else self._causes.of_failure)(failure)

    def _to_timeout(self, ranks: Sequence[int], timeout_s: float) -> WorkerTimeoutError:
        what = f"{self._sent.role}.{self._sent.method}"
        head = f"{what} is not done after {round(timeout_s, 3):g} s on rank(s) {', '.join(map(str, ranks))}"
        lost = describe_unread([ray.ObjectRef(each) for each in self._inputs])
        knob = "call_timeout_s" if timeout_s == self._timeout_s else "the timeout_s of result()"
        advice = lost or f"raise {knob}, or look at what they are at"
        return WorkerTimeoutError("\n".join([f"{head}: {advice}:", *self._causes.describe_late(ranks)]))


def take_ready(handles: list[Any]) -> dict[Any, CallReport | None]:
    """The reports that are there by their handles; None for one that is lost, with its rank or its inputs."""
    if not handles or not ray.is_initialized():  # Ray would start a cluster to look
        return {}
    ready = ray.wait(handles, num_returns=len(handles), timeout=0)[0]
    reports: dict[Any, CallReport | None] = {}
    for handle in ready:
        try:
            reports[handle] = unpack_answer(ray.get(handle))[1]
        except RayError:
            reports[handle] = None
    return reports
