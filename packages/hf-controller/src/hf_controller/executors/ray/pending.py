"""Waiting for the ranks of a call: with a deadline, and for the first failure rather than for the last rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from hf_controller.executors.ray.waiting import Waiter
from hf_controller.executors.ray.wire import unpack_report
from hf_controller.failures import Failure
from hf_protocols import HybridFlowError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.results import Outcome
    from hf_controller.trace import CallReport

__all__ = ["RayCall", "describe_ranks", "take_ready"]

_ANSWER_TIMEOUT_S = 5.0


class RayCall:
    """A call on the ranks of a group.

    Args:
        role: the role.
        method: its method.
        actors: the actor of every called rank.
        outcomes: handle of every called rank's outcome.
        reports: handle of every called rank's report.
        collected: the ranks whose outcomes make the result.
        timeout_s: deadline where none is given.
        waiter: waits.
        everyone: every process of the executor by its label, such as ``"actor+critic/0"``: a call can fail because a
            process of another group died, and its results with it.
    """

    def __init__(
        self,
        *,
        role: str,
        method: str,
        actors: Mapping[int, Any],
        outcomes: Mapping[int, Any],
        reports: Mapping[int, Any],
        collected: Sequence[int],
        timeout_s: float,
        waiter: Waiter,
        everyone: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.handles = [outcomes[rank] for rank in collected]
        self._what = f"{role}.{method}"
        self._role = role
        self._method = method
        self._actors = dict(actors)
        self._reports = dict(reports)
        self._collected = tuple(collected)
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._everyone = everyone
        self._done: dict[int, CallReport] = {}
        self._failure: Failure | None = None

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for every rank; the rows that each collected rank returned.

        Raises:
            HybridFlowError: the first rank's failure.
            WorkerTimeoutError: if a rank is not done in time, with each missing rank's last call and stack.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        while self._failure is None and len(self._done) < len(self._reports):
            pending = {handle: rank for rank, handle in self._reports.items() if rank not in self._done}
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = self._waiter.wait_some(list(pending), left_s)
            if not ready:
                raise self._to_timeout(sorted(pending.values()), timeout_s)
            self._read_reports({pending[handle]: handle for handle in ready})
        if self._failure is not None:
            raise self._failure.to_error()
        return [self._done[rank].num_rows for rank in self._collected]

    def outcomes(self, timeout_s: float | None) -> list[Outcome]:
        """After waiting, what the collected ranks left."""
        self.wait(timeout_s)
        return list(ray.get(self.handles, timeout=self._timeout_s))

    def _read_reports(self, ready: Mapping[int, Any]) -> None:
        try:
            reports = [unpack_report(packed) for packed in ray.get(list(ready.values()))]
        except RayError:
            self._failure = self._find_death() or next(
                self._describe_death(rank, error) for rank, error in _lost_reports(ready)
            )
            return
        self._done.update(zip(ready, reports, strict=True))
        failed = [report for report in reports if report.failure is not None]
        if failed:
            # A dead peer makes the others fail in their collective: then the death is the cause to report.
            death = None if failed[0].upstream else self._find_death()
            self._failure = death or failed[0].failure

    def _find_death(self) -> Failure | None:
        pings = {actor.ping.remote(): label for label, actor in self._everyone().items()}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_ANSWER_TIMEOUT_S)
        ranks = {actor: rank for rank, actor in self._actors.items()}
        for ping in answered:
            try:
                ray.get(ping)
            except RayError as error:
                label = pings[ping]
                return self._describe_death(ranks.get(self._everyone()[label], min(ranks.values())), error, label)
        return None

    def _describe_death(self, rank: int, error: RayError, label: str = "its process") -> Failure:
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
        reason = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        return Failure(
            role=self._role,
            method=self._method,
            rank=rank,
            cause_type=type(cause or error).__name__,
            message=f"{label} is gone: {reason}" if cause is None else str(cause),
            remote_traceback="" if cause is None else str(error),
        )

    def _to_timeout(self, ranks: Sequence[int], timeout_s: float) -> HybridFlowError:
        head = f"{self._what} is not done after {timeout_s:g} s on rank(s) {', '.join(map(str, ranks))}"
        lines = [f"{head}: raise call_timeout_s, or look at what they are at:"]
        described = describe_ranks({rank: self._actors[rank] for rank in ranks}, _ANSWER_TIMEOUT_S)
        return WorkerTimeoutError("\n".join([*lines, *(f"rank {rank}: {text}" for rank, text in described.items())]))


def _lost_reports(handles: Mapping[int, Any]) -> Iterator[tuple[int, RayError]]:
    for rank, handle in handles.items():
        try:
            ray.get(handle)
        except RayError as error:
            yield rank, error


def describe_ranks(actors: Mapping[int, Any], timeout_s: float) -> dict[int, str]:
    """What each rank is at, and its stack; whoever is not there or does not answer in time is described as such."""
    asked = {rank: actor.describe.remote() for rank, actor in actors.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    return {rank: _answer(handle) for rank, handle in asked.items()}


def _answer(handle: Any) -> str:
    try:
        stage, stack = ray.get(handle, timeout=0)
    except RayError as error:
        return f"no answer ({type(error).__name__})"
    return f"{stage}\n{stack.rstrip()}"


def take_ready(handles: list[Any]) -> tuple[list[CallReport], list[Any]]:
    """The reports that are there, and the handles of the rest. Reports of dead ranks are left out."""
    if not handles:
        return [], []
    ready, pending = ray.wait(handles, num_returns=len(handles), timeout=0)
    reports = []
    for handle in ready:
        try:
            reports.append(unpack_report(ray.get(handle)))
        except RayError:
            continue
    return reports, pending
