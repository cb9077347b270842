from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_controller import ResourcePool, Span, SubSpan, Trace
from hf_controller.failures import Failure
from hf_controller.trace import CallReport
from hf_protocols import ConfigError

POOL, OTHER_POOL = (ResourcePool([1], device="cpu", name="gpus") for _ in range(2))


class Call:
    """Call as a trace keeps it while it runs elsewhere."""

    def __init__(self, call_id: int = 1, pool: ResourcePool = POOL, failure: Failure | None = None) -> None:
        self.call_id = call_id
        self.pool = pool
        self._failure = failure

    def find_failure(self) -> Failure | None:
        return self._failure

    def finish(self) -> None:
        raise AssertionError("a trace waits for nobody")


def span(**changes) -> Span:
    fields = {
        "call_id": 1,
        "pool": "gpus",
        "host": "actor+critic",
        "role": "actor",
        "method": "generate",
        "rank": 0,
        "submit_s": 100.0,
        "ready_s": 101.0,
        "fetched_s": 101.5,
        "computed_s": 104.0,
        "end_s": 104.25,
        "bytes_read": 10,
        "bytes_written": 20,
        "labels": {},
    }
    return Span(**fields | changes)


def test_times_are_kept_apart():
    assert (span().queue_s, span().fetch_s, span().compute_s, span().store_s) == (1.0, 0.5, 2.5, 0.25)


def test_drain_returns_each_span_once_and_leaves_unready_ones():
    reports = {f"handle {number}": CallReport(span=span(call_id=number)) for number in range(3)}
    ready = []
    trace = Trace(lambda handles: {handle: reports[handle] for handle in handles if handle in ready})
    trace.watch(reports, Call())
    assert trace.drain() == []
    ready += ["handle 0", "handle 1"]
    assert [each.call_id for each in trace.drain()] == [0, 1]
    ready += ["handle 2"]
    assert [each.call_id for each in trace.drain()] == [2]
    assert trace.drain() == []


def test_a_report_that_somebody_read_is_not_asked_for_again():
    asked = []
    trace = Trace(lambda handles: asked.extend(handles) or {})
    report = CallReport(span=span())
    trace.watch(["handle"], Call())
    trace.note_watched("handle", report)
    trace.note_watched("handle", report)
    assert trace.drain() == [report.span]
    trace.note_watched("handle", report)  # drained before it was read
    assert trace.drain() == []
    assert asked == []


def test_chrome_trace_has_a_row_per_rank_and_the_parts_of_a_call(tmp_path):
    spans = [
        span(sub_spans=(SubSpan("reshard", 102.0, 103.0),)),
        span(rank=1),
        span(role="critic", method="update", failed=True),
        span(pool="cpu", host="reward", role="reward", method="score", fetched_s=101.0, end_s=104.0),
    ]
    trace = Trace()
    trace.note([CallReport(span=each) for each in spans], POOL)
    trace.write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names) == 3
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"gpus: actor+critic", "cpu: reward"}
    calls = [e for e in events if e["ph"] == "X" and "queue_ms" in e["args"]]
    assert [e["name"] for e in calls] == ["actor.generate", "actor.generate", "critic.update", "reward.score"]
    assert (calls[0]["ts"], calls[0]["dur"]) == (101.0e6, 3.25e6)
    assert calls[0]["args"]["queue_ms"] == 1000.0
    assert calls[0]["args"]["fetch_ms"] == 500.0
    assert calls[0]["args"]["compute_ms"] == 2500.0
    assert calls[0]["args"]["bytes_read"] == 10
    assert calls[2]["args"]["failed"] is True
    inner = [(e["name"], e["tid"]) for e in events if e["ph"] == "X" and "queue_ms" not in e["args"]]
    assert inner.count(("reshard", 0)) == 1
    assert inner.count(("fetch", 0)) == 2


def test_clocks_that_disagree_make_no_negative_time():
    assert span(submit_s=101.2).queue_s == 0.0


def failed(call_id: int, **changes) -> CallReport:
    why = Failure.of(KeyError(call_id), role="actor", method="generate", rank=0, origin=f"call {call_id}")
    return CallReport(span=span(call_id=call_id, failed=True, **changes), failure=why)


def test_a_failure_is_untold_until_a_call_with_it_is_asked_for():
    trace, (first, second, third) = Trace(), map(failed, (1, 2, 3))
    trace.note([third, second, first], POOL)  # as pools come
    trace.tell(2, second.failure)
    assert trace.find_untold() == first.failure
    trace.tell(9, first.failure)
    trace.note([first], POOL)  # of another rank, later
    assert trace.find_untold() == third.failure
    death = Failure.of(KeyError(), role="actor", method="generate", rank=1, origin="process 7")
    trace.explain(Call(3), death)
    assert trace.find_untold() == death
    trace.tell(4, death)
    assert trace.find_untold() is None
    assert [each.call_id for each in trace.drain()] == [3, 2, 1, 1]


def test_a_passed_on_failure_is_reported_as_by_its_own_call():
    found = {}
    trace = Trace(lambda handles: {handle: found[handle] for handle in handles if handle in found})
    death = Failure.of(KeyError("death"), role="actor", method="generate", rank=1, origin="process 7")
    trace.watch(["1/0", "1/1"], Call(1, failure=death))
    trace.watch(["2/0"], Call(2))
    seen = failed(1).failure
    assert trace.find_cause(seen) is death  # although a rank has not answered
    found |= {"1/0": failed(1), "1/1": None}
    assert trace.find_cause(seen) is death
    trace.tell(1, death)
    assert trace.find_cause(seen) == death
    unknown = failed(3).failure
    assert trace.find_cause(unknown) is unknown
    assert trace.find_cause(failed(2).failure).origin == "call 2"


def test_what_was_told_keeps_no_exception():
    trace, seen = Trace(), failed(1).failure
    assert seen.exception is not None
    trace.tell(1, seen)
    assert trace.find_cause(seen).exception is None


def test_a_call_is_settled_by_success_or_a_reported_failure():
    found = {}
    trace = Trace(lambda handles: {handle: found[handle] for handle in handles if handle in found})
    calls = {number: Call(number) for number in range(1, 6)}
    for number, call in calls.items():
        trace.watch([f"{number}/0", f"{number}/1"], call)
    found |= {f"1/{rank}": CallReport(span=span(call_id=1, rank=rank)) for rank in range(2)}
    found |= {"2/0": CallReport(span=span(call_id=2)), "2/1": None}  # a dead rank reports nothing
    found |= {"3/0": failed(3), "3/1": CallReport(span=span(call_id=3, rank=1))}
    found |= {"4/0": CallReport(span=span(call_id=4))}
    found |= {"5/0": failed(5)}
    assert [call.call_id for call in trace.find_unsettled()] == [2, 3, 4, 5]
    trace.tell(3, failed(3).failure)
    trace.tell(5, failed(5).failure)
    found |= {"4/1": CallReport(span=span(call_id=4, rank=1)), "5/1": failed(5, rank=1)}
    assert trace.find_unsettled() == [calls[2]]
    assert trace.find_failed() == [calls[2]]
    trace.forget(POOL)
    assert trace.find_unsettled() == []
    assert trace.find_untold() is None


def test_failures_of_a_pool_that_is_built_again_are_no_news():
    trace = Trace()
    trace.note([failed(1), failed(3)], POOL)
    trace.note([failed(2), failed(4)], OTHER_POOL)  # which has the same name
    trace.forget(POOL)
    trace.note([failed(3, rank=1)], POOL)
    trace.note([failed(5)], POOL)
    for call_id in (2, 4, 5):
        assert trace.find_untold() == failed(call_id).failure
        trace.tell(call_id, failed(call_id).failure)
    assert trace.find_untold() is None


def test_labels_that_cannot_be_written_are_refused_at_once():
    trace = Trace()
    with (
        pytest.raises(ConfigError, match=r"^labels=\{'step': .*give texts and finite numbers"),
        trace.label(step=object()),
    ):
        pass
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    for value in (10**5000, float("nan"), nested):
        with pytest.raises(ConfigError, match=r"^labels=.*give texts and finite numbers"), trace.label(step=value):
            pass
    given = [1]
    with trace.label(step=given):
        given.append(object())
        assert trace.labels == {"step": [1]}


def test_a_streamed_trace_is_the_written_one_and_keeps_no_span(tmp_path):
    whole, streamed = Trace(), Trace()
    streamed.stream_chrome(tmp_path / "streamed.json")
    for number in range(3):
        for trace in (whole, streamed):
            trace.note_place(number, "program.py:1")
            trace.note([CallReport(span=span(call_id=number, role=f"role {number}"))], POOL)
            assert len(trace.drain()) == 1
        assert not (tmp_path / "streamed.json").exists()
    assert not streamed._spans and not streamed._places
    whole.write_chrome(tmp_path / "whole.json")
    streamed.finish_chrome()
    assert json.loads((tmp_path / "streamed.json").read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed.json", "whole.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_trace_and_not_the_program(tmp_path):
    (tmp_path / "trace.json").write_text("an earlier one")
    (tmp_path / ".trace.json.part").symlink_to("/dev/full")
    trace = Trace()
    trace.stream_chrome(tmp_path / "trace.json")
    trace.note([CallReport(span=span())], POOL)
    assert len(trace.drain()) == 1
    with pytest.raises(OSError, match="No space left"):
        trace.finish_chrome()
    assert (tmp_path / "trace.json").read_text() == "an earlier one"
