from __future__ import annotations

from hf_controller import ResourcePool, Span
from hf_controller.failure_log import FailureLog
from hf_controller.failures import Failure
from hf_controller.trace import CallReport

POOL, OTHER_POOL = (ResourcePool([1], device="cpu", name="gpus") for _ in range(2))


class LoggedCall:
    """Call as the log keeps it while it runs elsewhere."""

    def __init__(self, call_id: int = 1, pool: ResourcePool = POOL, failure: Failure | None = None) -> None:
        self.call_id = call_id
        self.pool = pool
        self._failure = failure

    def find_failure(self) -> Failure | None:
        return self._failure

    def finish(self) -> None:
        raise AssertionError("the log waits for nobody")


def span(call_id: int = 1, *, rank: int = 0, failed: bool = False) -> Span:
    return Span(call_id, "gpus", "actor", "actor", "generate", rank, *[0.0] * 5, 0, 0, {}, failed=failed)


def test_a_span_is_taken_once_when_its_report_is_there():
    reports = {f"handle {number}": CallReport(span=span(call_id=number)) for number in range(3)}
    ready = []
    log = FailureLog(lambda handles: {handle: reports[handle] for handle in handles if handle in ready})
    log.watch(reports, LoggedCall())
    assert log.take_spans() == []
    ready += ["handle 0", "handle 1"]
    assert [each.call_id for each in log.take_spans()] == [0, 1]
    ready += ["handle 2"]
    assert [each.call_id for each in log.take_spans()] == [2]
    assert log.take_spans() == []


def test_a_report_that_somebody_read_is_not_asked_for_again():
    asked = []
    log = FailureLog(lambda handles: asked.extend(handles) or {})
    report = CallReport(span=span())
    log.watch(["handle"], LoggedCall())
    log.note_watched("handle", report)
    log.note_watched("handle", report)
    assert log.take_spans() == [report.span]
    log.note_watched("handle", report)  # drained before it was read
    assert log.take_spans() == []
    assert asked == []


def failed(call_id: int, **changes) -> CallReport:
    why = Failure.of(KeyError(call_id), role="actor", method="generate", rank=0, origin=f"call {call_id}")
    return CallReport(span=span(call_id=call_id, failed=True, **changes), failure=why)


def test_a_failure_is_untold_until_a_call_with_it_is_asked_for():
    log, (first, second, third) = FailureLog(), map(failed, (1, 2, 3))
    log.note([third, second, first], POOL)  # as pools come
    log.tell(2, second.failure)
    assert log.find_untold() == first.failure
    log.tell(9, first.failure)
    log.note([first], POOL)  # of another rank, later
    assert log.find_untold() == third.failure
    death = Failure.of(KeyError(), role="actor", method="generate", rank=1, origin="process 7")
    log.explain(LoggedCall(3), death)
    assert log.find_untold() == death
    log.tell(4, death)
    assert log.find_untold() is None
    assert [each.call_id for each in log.take_spans()] == [3, 2, 1, 1]


def test_a_passed_on_failure_is_reported_as_by_its_own_call():
    found = {}
    log = FailureLog(lambda handles: {handle: found[handle] for handle in handles if handle in found})
    death = Failure.of(KeyError("death"), role="actor", method="generate", rank=1, origin="process 7")
    log.watch(["1/0", "1/1"], LoggedCall(1, failure=death))
    log.watch(["2/0"], LoggedCall(2))
    seen = failed(1).failure
    assert log.find_cause(seen) is death  # although a rank has not answered
    found |= {"1/0": failed(1), "1/1": None}
    assert log.find_cause(seen) is death
    log.tell(1, death)
    assert log.find_cause(seen) == death
    unknown = failed(3).failure
    assert log.find_cause(unknown) is unknown
    assert log.find_cause(failed(2).failure).origin == "call 2"


def test_a_reported_failure_keeps_no_exception():
    log, seen = FailureLog(), failed(1).failure
    assert seen.exception is not None
    log.tell(1, seen)
    assert log.find_cause(seen).exception is None


def test_a_call_is_settled_by_success_or_a_reported_failure():
    found = {}
    log = FailureLog(lambda handles: {handle: found[handle] for handle in handles if handle in found})
    calls = {number: LoggedCall(number) for number in range(1, 6)}
    for number, call in calls.items():
        log.watch([f"{number}/0", f"{number}/1"], call)
    found |= {f"1/{rank}": CallReport(span=span(call_id=1, rank=rank)) for rank in range(2)}
    found |= {"2/0": CallReport(span=span(call_id=2)), "2/1": None}  # a dead rank reports nothing
    found |= {"3/0": failed(3), "3/1": CallReport(span=span(call_id=3, rank=1))}
    found |= {"4/0": CallReport(span=span(call_id=4))}
    found |= {"5/0": failed(5)}
    assert [call.call_id for call in log.find_unsettled()] == [2, 3, 4, 5]
    log.tell(3, failed(3).failure)
    log.tell(5, failed(5).failure)
    found |= {"4/1": CallReport(span=span(call_id=4, rank=1)), "5/1": failed(5, rank=1)}
    assert log.find_unsettled() == [calls[2]]
    assert log.find_failed() == [calls[2]]
    log.forget(POOL)
    assert log.find_unsettled() == []
    assert log.find_untold() is None


def test_failures_of_a_pool_that_is_built_again_are_not_reported():
    log = FailureLog()
    log.note([failed(1), failed(3)], POOL)
    log.note([failed(2), failed(4)], OTHER_POOL)  # which has the same name
    log.forget(POOL)
    log.note([failed(3, rank=1)], POOL)
    log.note([failed(5)], POOL)
    for call_id in (2, 4, 5):
        assert log.find_untold() == failed(call_id).failure
        log.tell(call_id, failed(call_id).failure)
    assert log.find_untold() is None
