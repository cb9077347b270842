"""Waiting for the ranks of a call: with a deadline, and for the first failure rather than for the last rank."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from hf_controller.executors.ray.host_process import (
    HostProcess,
    describe_death,
    describe_processes,
    find_maker,
    in_one_line,
)
from hf_controller.executors.ray.inquirer import Inquirer
from hf_controller.executors.ray.store import ValueHandle, describe_unread
from hf_controller.executors.ray.waiting import Waiter
from hf_controller.executors.ray.wire import unpack_answer
from hf_controller.failures import Failure
from hf_protocols import HybridFlowError, WorkerError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.resource_pool import ResourcePool
    from hf_controller.results import Outcome
    from hf_controller.trace import CallReport, Trace
    from hf_controller.transport import ObjectStore

__all__ = ["RayCall", "take_ready"]

_ANSWER_TIMEOUT_S = 5.0
# What a rank raises whose peer left a collective went through torch's collectives, or names the library below them.
_OF_A_COLLECTIVE = re.compile(
    r"distributed_c10d|_functional_collectives|torch\.distributed\.Dist|gloo|nccl", re.IGNORECASE
)


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
        call_id: the call's number.
        pool: the pool of its group.
        role: the role.
        method: its method.
        processes: the process of every called rank.
        handles: where readers find what the collected ranks left, in order.
        answers: reference of every called rank's answer.
        inputs: ids of the objects that Ray brings to the ranks before they begin. A reference would keep them.
        collected: the ranks whose outcomes make the result.
        timeout_s: deadline where none is given.
        waiter: waits.
        connected: the processes of groups that its group is connected with now, whose death makes collectives fail.
        everyone: every process of the executor: one of another group may have died, and its results with it.
        inquirer: asks processes how they are.
        store: has the objects that the call returned.
        trace: watches the answers.
    """

    def __init__(
        self,
        *,
        call_id: int,
        pool: ResourcePool,
        role: str,
        method: str,
        processes: Mapping[int, HostProcess],
        handles: Sequence[Any],
        answers: Mapping[int, Any],
        inputs: Sequence[bytes],
        collected: Sequence[int],
        timeout_s: float,
        waiter: Waiter,
        connected: Sequence[HostProcess],
        everyone: Callable[[], Sequence[HostProcess]],
        inquirer: Inquirer,
        store: ObjectStore,
        trace: Trace,
    ) -> None:
        self.handles = list(handles)
        self.call_id = call_id
        self.pool = pool
        self._what = f"{role}.{method}"
        self._role = role
        self._method = method
        self._processes = dict(processes)
        self._answers = dict(answers)
        self._inputs = inputs
        self._collected = tuple(collected)
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._connected = connected
        self._everyone = everyone
        self._inquirer = inquirer
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
        is_known = self._seen.is_told or any(process.was_ended for process in self._processes.values())
        if is_known or (self._seen.is_late and not self._is_over()):
            return True
        is_late = False
        try:
            failure = self._find_failure(self._timeout_s)
        except WorkerTimeoutError as error:
            failure, is_late = self._fail(error, rank=min(self._answers)), True
        if failure is not None:
            self._trace.explain(self, failure)
        return not is_late

    def _is_over(self) -> bool:
        answers = list(self._answers.values())
        return not ray.wait(answers, num_returns=len(answers), timeout=0)[1]

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
        """Wait for every rank, or for the first that failed: why it did."""
        deadline_s = time.monotonic() + timeout_s
        if not self._seen.reports and self._seen.failure is None:
            self._note_answers(self._answers, self._waiter.get_all(list(self._answers.values()), timeout_s))
        while self._seen.failure is None and len(self._seen.reports) < len(self._answers):
            pending = {handle: rank for rank, handle in self._answers.items() if rank not in self._seen.reports}
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = self._waiter.wait_some(list(pending), left_s)
            if not ready:
                self._seen.is_late = True
                raise self._to_timeout(sorted(pending.values()), timeout_s)
            self._read_answers({pending[handle]: handle for handle in ready})
        return self._seen.failure

    def outcomes(self, timeout_s: float | None) -> list[Outcome]:
        """After waiting, what the collected ranks left beside batches."""
        self.wait(timeout_s)
        if not isinstance(self.handles[0], ValueHandle):
            return [self._seen.outcomes[rank] for rank in self._collected]
        try:
            return self._store.get(self.handles, self._timeout_s if timeout_s is None else timeout_s)
        except WorkerError:
            # An object that cannot be packed is this call's failure, not the loss of another's.
            contents = {rank: handle.contents for rank, handle in zip(self._collected, self.handles, strict=True)}
            lost = next(_lost_reports(contents), None)
            if lost is None:
                raise
            failure = self._describe_loss(*lost)
            self._trace.tell(self.call_id, failure)
            raise failure.to_error() from None

    def _read_answers(self, ready: Mapping[int, Any]) -> None:
        try:
            answers = ray.get(list(ready.values()))
        except RayError:
            rank, error = next(_lost_reports(ready))
            brought_from = find_maker(error) if isinstance(error, RayTaskError) else ""
            suspects = self._find_makers(brought_from) if brought_from else self._find_unanswered()
            self._seen.failure = self._find_death(suspects) or self._describe_loss(rank, error)
            return
        self._note_answers(ready, answers)

    def _note_answers(self, ranks: Iterable[int], packed: Sequence[Any]) -> None:
        if not packed:
            return
        answers = [unpack_answer(answer) for answer in packed]
        for rank, (outcome, report) in zip(ranks, answers, strict=True):
            self._seen.outcomes[rank], self._seen.reports[rank] = outcome, report
            self._trace.note_watched(self._answers[rank], report)
        failed = [report for _, report in answers if report.failure is not None]
        if failed:
            first = failed[0]
            assert first.failure is not None
            self._seen.failure = first.failure if first.upstream else self._find_cause(first.failure)

    def _find_cause(self, failure: Failure) -> Failure:
        """What a rank's failure comes from: itself, the death of who made what it could not read, or that of a peer,
        which makes the others fail in their collective.
        """
        suspects: Sequence[HostProcess] = ()
        if failure.lost_from is not None:
            suspects = self._find_makers(failure.lost_from)
        elif _OF_A_COLLECTIVE.search(failure.remote_traceback):
            suspects = [*self._find_unanswered(), *self._connected]
        death = self._find_death(suspects)
        if death is not None:
            said = f"of rank {failure.rank}, whose process lives:\n{failure.remote_traceback}"
            return replace(death, remote_traceback=said)
        return self._say_who_computes(failure) if _is_our_timeout(failure) else failure

    def _find_makers(self, lost_from: str) -> list[HostProcess]:
        return [process for process in self._everyone() if lost_from in ("", process.origin)]

    def _find_unanswered(self) -> list[HostProcess]:
        """Processes of the call that have not answered it: one that has may have died later, of something else."""
        answers = list(self._answers.values())
        over = set(ray.wait(answers, num_returns=len(answers), timeout=0)[0])
        return [
            process
            for rank, process in self._processes.items()
            if self._answers[rank] not in over or _error_of(self._answers[rank]) is not None
        ]

    def _find_death(self, suspects: Sequence[HostProcess]) -> Failure | None:
        """The death of the first of the suspects that is gone, with all others that are."""
        if not suspects:
            return None
        processes = list(dict.fromkeys([*suspects, *self._everyone()]))
        answers = self._inquirer.ask([process.actor for process in processes], "ping", _ANSWER_TIMEOUT_S)
        dead = {
            process: answer
            for process, answer in zip(processes, answers, strict=True)
            if isinstance(answer, RayError) and not isinstance(answer, GetTimeoutError)
        }
        ranks = {process: rank for rank, process in self._processes.items()}
        # With a machine many die: this call's own ranks come first.
        guilty = [process for process in suspects if process in dead]
        first = min(guilty, key=lambda process: process not in ranks, default=None)
        if first is None:
            return None
        others = [process for process in dead if process is not first and not process.was_ended]
        return self._describe_death(ranks.get(first, min(ranks.values())), dead[first], first, others)

    def _describe_loss(self, rank: int, error: RayError) -> Failure:
        """What a call says whose process lives, and whose answer or inputs cannot be had."""
        if isinstance(error, RayActorError | RayTaskError):
            return self._describe_death(rank, error, self._processes[rank])
        return Failure(
            role=self._role,
            method=self._method,
            rank=rank,
            cause_type=type(error).__name__,
            message=f"an earlier call's result is lost: {in_one_line(error)}",
            remote_traceback="",
            origin=f"call {self.call_id}",
        )

    def _describe_death(
        self, rank: int, error: RayError, process: HostProcess, others: Sequence[HostProcess] = ()
    ) -> Failure:
        death = describe_death(error, process, role=self._role, method=self._method, rank=rank, others=others)
        return death if death.origin else replace(death, origin=f"call {self.call_id}")

    def _to_timeout(self, ranks: Sequence[int], timeout_s: float) -> HybridFlowError:
        head = f"{self._what} is not done after {round(timeout_s, 3):g} s on rank(s) {', '.join(map(str, ranks))}"
        lost = describe_unread([ray.ObjectRef(each) for each in self._inputs])
        lines = [f"{head}: {lost or 'raise call_timeout_s, or look at what they are at'}:"]
        everyone = dict(enumerate(self._everyone()))
        described = describe_processes(everyone, self._inquirer, _ANSWER_TIMEOUT_S)
        late = {self._processes[rank]: rank for rank in ranks}
        lines += [f"rank {late[everyone[i]]}: {text}" for i, text in described.items() if everyone[i] in late]
        # What a late rank waits for is what others are at.
        lines += _list_computing({everyone[i]: text for i, text in described.items() if everyone[i] not in late})
        return WorkerTimeoutError("\n".join(lines))

    def _say_who_computes(self, failure: Failure) -> Failure:
        """A rank that waited in vain does not know for whom."""
        everyone = dict(enumerate(self._everyone()))
        described = describe_processes(everyone, self._inquirer, _ANSWER_TIMEOUT_S)
        computing = _list_computing({everyone[i]: text for i, text in described.items()})
        if not computing:
            return failure
        told = self._fail(WorkerTimeoutError("\n".join([failure.message, *computing])), rank=failure.rank)
        return replace(told, remote_traceback=failure.remote_traceback)

    def _fail(self, error: WorkerTimeoutError, rank: int) -> Failure:
        """A failure of this call that the controller itself found."""
        origin = f"call {self.call_id}"
        found = Failure.of(error, role=self._role, method=self._method, rank=rank, origin=origin)
        return replace(found, remote_traceback="", exception=None)


def _is_our_timeout(failure: Failure) -> bool:
    return bool(failure.pickled) and failure.cause_type == WorkerTimeoutError.__name__


def _list_computing(described: Mapping[HostProcess, str]) -> list[str]:
    computing = {process: text for process, text in described.items() if ": computing for " in text.partition("\n")[0]}
    return [f"{process.label}: {text}" for process, text in computing.items()]


def _lost_reports(handles: Mapping[int, Any]) -> Iterator[tuple[int, RayError]]:
    for rank, handle in handles.items():
        error = _error_of(handle)
        if error is not None:
            yield rank, error


def _error_of(handle: Any) -> RayError | None:
    """What became of a handle that is ready."""
    try:
        ray.get(handle)
    except RayError as error:
        return error
    return None


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
