from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_controller import ResourcePool, Span, SubSpan, Trace
from hf_controller.failure_log import FailureLog
from hf_controller.trace import CallReport
from hf_protocols import ConfigError

POOL = ResourcePool([1], device="cpu", name="gpus")


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


def test_chrome_trace_has_a_row_per_rank_and_the_parts_of_a_call(tmp_path):
    spans = [
        span(sub_spans=(SubSpan("reshard", 102.0, 103.0, "transition"),), kind="generation"),
        span(rank=1),
        span(role="critic", method="update", failed=True),
        span(pool="cpu", host="reward", role="reward", method="score", fetched_s=101.0, end_s=104.0),
    ]
    trace = Trace(lambda: spans)
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
    assert [e["args"]["kind"] for e in calls] == ["generation", "function", "function", "function"]
    assert [e["args"] for e in events if e["name"] == "reshard"] == [{"kind": "transition"}]
    assert inner.count(("fetch", 0)) == 2


def test_clocks_that_disagree_make_no_negative_time():
    assert span(submit_s=101.2).queue_s == 0.0


def test_labels_that_cannot_be_written_are_refused_at_once():
    trace = Trace()
    with (
        pytest.raises(ConfigError, match=r"^labels=\{'step': .*Use texts and finite numbers"),
        trace.label(step=object()),
    ):
        pass
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    for value in (10**5000, float("nan"), nested):
        with pytest.raises(ConfigError, match=r"^labels=.*Use texts and finite numbers"), trace.label(step=value):
            pass
    given = [1]
    with trace.label(step=given):
        given.append(object())
        assert trace.labels == {"step": [1]}


def test_a_streamed_trace_is_the_written_one_and_keeps_no_span(tmp_path):
    log, other = FailureLog(), FailureLog()
    whole, streamed = Trace(log.take_spans), Trace(other.take_spans)
    streamed.stream_chrome(tmp_path / "streamed.json", {"workload": {"epochs": 1}})
    for number in range(3):
        for failures, trace in ((log, whole), (other, streamed)):
            failures.note_place(number, "program.py:1")
            failures.note([CallReport(span=span(call_id=number, role=f"role {number}"))], POOL)
            assert len(trace.drain()) == 1
        assert not (tmp_path / "streamed.json").exists()
    assert not streamed._spans and not other._spans and not other._places
    whole.write_chrome(tmp_path / "whole.json")
    streamed.finish_chrome()
    found = json.loads((tmp_path / "streamed.json").read_text())
    assert found.pop("otherData") == {"workload": {"epochs": 1}}
    assert found == json.loads((tmp_path / "whole.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed.json", "whole.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_trace_and_not_the_program(tmp_path):
    (tmp_path / "trace.json").write_text("an earlier one")
    (tmp_path / ".trace.json.part").symlink_to("/dev/full")
    trace = Trace(lambda: [span()])
    trace.stream_chrome(tmp_path / "trace.json")
    assert len(trace.drain()) == 1
    with pytest.raises(OSError, match="No space left"):
        trace.finish_chrome()
    assert (tmp_path / "trace.json").read_text() == "an earlier one"
