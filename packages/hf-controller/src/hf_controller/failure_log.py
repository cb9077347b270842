"""Failures of calls: which were reported to the program, and which nobody asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from hf_controller.failures import Failure
    from hf_controller.groups.resource_pool import ResourcePool
    from hf_controller.trace import CallReport, Span

__all__ = ["FailureLog", "Watched"]


class Watched(Protocol):
    """A call whose reports come later, one for every rank."""

    call_id: int
    pool: ResourcePool

    def finish(self) -> bool:
        """Waits for the call's end, and records why it failed or that it is late. Returns True if it was in time."""

    def find_failure(self) -> Failure | None:
        """Returns the reason why the call failed, after waiting for its end or for its first rank that failed."""


class _Untold(NamedTuple):
    """A failure that was not reported to the program, and the call that failed."""

    call_id: int
    pool: ResourcePool
    failure: Failure


def _call_id(untold: _Untold) -> int:
    return untold.call_id


class FailureLog:
    """Failures of an executor's calls, and those that were reported to the program. Takes the reports of all ranks.

    Args:
        take_ready: takes, without waiting, the watched handles whose reports are available, each with its report, or
            with None if the report is lost.
    """

    def __init__(self, take_ready: Callable[[list[Any]], dict[Any, CallReport | None]] | None = None) -> None:
        self._take_ready = take_ready
        self._watched: dict[Any, Watched] = {}
        self._failed: dict[int, Watched] = {}
        self._spans: list[Span] = []
        self._places: dict[int, str] = {}
        self._untold: dict[str, _Untold] = {}
        self._told: dict[str, Failure] = {}
        self._last_call_id = 0
        self._forgotten: dict[ResourcePool, int] = {}

    def note_place(self, call_id: int, place: str) -> None:
        """Remembers the line of the program that made a call."""
        self._places[call_id] = place

    def watch(self, handles: Iterable[Any], call: Watched) -> None:
        """Remembers where the reports of a call will be."""
        self._last_call_id = max(self._last_call_id, call.call_id)
        self._watched.update(dict.fromkeys(handles, call))

    def note(self, reports: Iterable[CallReport], pool: ResourcePool) -> None:
        """Takes the reports of a call on `pool` that is not watched."""
        for report in reports:
            self._last_call_id = max(self._last_call_id, report.span.call_id)
            self._spans.append(report.span)
            if report.failure is not None and not report.upstream:
                self._note_failure(report.span.call_id, report.failure, pool)

    def tell(self, call_id: int, failure: Failure) -> None:
        """Marks a call's failure as reported. It is a failure of the call itself, shared by its other ranks, or the
        failure of an earlier call or a process that the call depends on.
        """
        self._failed.pop(call_id, None)
        self._settle(f"call {call_id}", failure)
        self._settle(failure.origin, failure)

    def explain(self, call: Watched, failure: Failure) -> None:
        """Records why a call failed whose result was never requested, for all reports of its ranks."""
        own = f"call {call.call_id}"
        if failure.origin == own:
            self._untold.pop(own, None)  # what a rank said of it
        else:
            self._settle(own, failure)
        self._note_failure(call.call_id, failure, call.pool)

    def forget(self, pool: ResourcePool) -> None:
        """Forgets the failures of earlier calls on `pool`, whose groups the program builds again."""
        self._forgotten[pool] = self._last_call_id
        self._untold = {origin: each for origin, each in self._untold.items() if each.pool is not pool}
        self._failed = {call_id: call for call_id, call in self._failed.items() if call.pool is not pool}

    def find_cause(self, failure: Failure) -> Failure:
        """Returns the failure to report for a call that was passed on a rank's failure: its own call's, if known."""
        if failure.origin in self._told:
            return self._told[failure.origin]
        found = next((call for call in self.find_unsettled() if f"call {call.call_id}" == failure.origin), None)
        return failure if found is None else found.find_failure() or failure

    def find_unsettled(self) -> list[Watched]:
        """Returns the watched calls, in their order, that are not over, or whose failure was not reported."""
        self._collect()
        return _in_order([*self._failed.values(), *self._watched.values()])

    def find_failed(self) -> list[Watched]:
        """Returns the watched calls, in their order, that failed on a rank, and whose failure was not reported."""
        self._collect()
        return _in_order(self._failed.values())

    def find_untold(self) -> Failure | None:
        """Returns the failure of the first failed call, except failures that were reported to the program."""
        self._collect()
        return min(self._untold.values(), key=_call_id).failure if self._untold else None

    def describe_untold(self) -> str:
        """Describes where the call of `find_untold` was made, and how many other calls failed."""
        first = min(self._untold.values(), key=_call_id)
        place = self._places.get(first.call_id, "a line that is not known")
        others = len(self._untold) - 1
        more = f". {others} other call{'s' if others > 1 else ''} failed, too" if others else ""
        return f"the call was made at {place}, and nothing asked for its result{more}"

    def _note_failure(self, call_id: int, failure: Failure, pool: ResourcePool) -> None:
        if failure.origin not in self._told and call_id > self._forgotten.get(pool, 0):
            self._untold.setdefault(failure.origin, _Untold(call_id, pool, failure))

    def _settle(self, origin: str, failure: Failure) -> None:
        # Without the exception, whose frames would keep what the method held.
        self._told.setdefault(origin, replace(failure, exception=None))
        self._untold.pop(origin, None)

    def note_watched(self, handle: Any, report: CallReport) -> None:
        """Takes the report behind a watched handle from somebody who read it, and lets go of the handle."""
        if handle in self._watched:
            self._take(self._watched.pop(handle), report)

    def take_spans(self) -> list[Span]:
        """The spans of reports that came since it was last called."""
        self._collect()
        spans, self._spans = self._spans, []
        self._forget_places()
        return spans

    def _forget_places(self) -> None:
        """Keeps the places of calls that a message may still name."""
        named = {call.call_id for call in self._watched.values()} | self._failed.keys()
        named |= {each.call_id for each in self._untold.values()}
        self._places = {call_id: place for call_id, place in self._places.items() if call_id in named}

    def _collect(self) -> None:
        """Takes the reports that are there."""
        if self._take_ready is not None:
            for handle, report in self._take_ready(list(self._watched)).items():
                self._take(self._watched.pop(handle), report)

    def _take(self, call: Watched, report: CallReport | None) -> None:
        if report is not None:
            self.note([report], call.pool)
        is_over = f"call {call.call_id}" in self._told or call.call_id <= self._forgotten.get(call.pool, 0)
        if (report is None or report.failure is not None) and not is_over:
            self._failed[call.call_id] = call


def _in_order(calls: Iterable[Watched]) -> list[Watched]:
    by_number = {call.call_id: call for call in calls}
    return [by_number[call_id] for call_id in sorted(by_number)]
