"""The breakdown of a trace, against one worked by hand."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from hf_algorithms import cli
from hf_algorithms.report import load_breakdown, render_breakdown
from hf_protocols.errors import DataError


def _call(number, name, pid, tid, start_s, queue_s, fetch_s, compute_s, store_s, pool, **changes):
    times = {"queue_ms": queue_s, "fetch_ms": fetch_s, "compute_ms": compute_s, "store_ms": store_s}
    args = {"call": number, "pool": pool, "bytes_read": 100, "remote_bytes": 0, "failed": False}
    args |= {name: value * 1e3 for name, value in times.items()} | changes
    length_us = (fetch_s + compute_s + store_s) * 1e6
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 1e15 + start_s * 1e6, "dur": length_us, "args": args}


def _inner(name, pid, tid, start_s, length_s):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 1e15 + start_s * 1e6, "dur": length_s * 1e6}


# Two pools over 20 s. Pool "models" has two slots; actor and critic have processes of their own there (pid 1, 2).
#   slot 0: actor 0..6, critic 6..10, and a critic call 4..8 that overlaps both   -> 10 s busy
#   slot 1: actor 0..4, critic 12..16                                             ->  8 s busy
# So models are busy 18 of 40 slot seconds: idle 0.55. Pool "cpu": reward 18..20, 2 of 20: idle 0.9.
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "models: actor"}},
    _call(1, "actor.generate", 1, 0, 0, 0.5, 1, 4, 1, "models", remote_bytes=40),
    _inner("fetch", 1, 0, 0, 1),
    _inner("reshard", 1, 0, 1, 2),
    _call(1, "actor.generate", 1, 1, 0, 1.5, 0, 4, 0, "models", iteration=1),
    _call(2, "critic.update", 2, 0, 6, 3, 0, 4, 0, "models"),
    _call(2, "critic.update", 2, 1, 12, 3, 1, 3, 0, "models", failed=True),
    _call(3, "critic.values", 2, 0, 4, 0, 0, 4, 0, "models", bytes_read=7),
    _call(4, "reward.score", 3, 0, 18, 2, 0.5, 1.5, 0, "cpu"),
    {"ph": "X", "name": "someone else's", "pid": 9, "tid": 0, "ts": 0, "dur": 1},
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    return tmp_path


def test_times_are_those_worked_by_hand(run):
    found = load_breakdown(run)
    assert found.wall_s == 20.0
    assert [usage.role for usage in found.roles] == ["critic", "actor", "reward"]
    critic, actor, reward = found.roles
    assert (actor.num_calls, actor.queue_s, actor.fetch_s, actor.compute_s, actor.store_s) == (1, 2.0, 1.0, 8.0, 1.0)
    assert (actor.bytes_read, actor.remote_bytes, actor.num_failed) == (200, 40, 0)
    assert actor.wall_share == 6 / 20
    # 4..8 and 6..10 are 6 s together, 12..16 another 4
    assert (critic.num_calls, critic.num_failed, critic.wall_share, critic.bytes_read) == (2, 1, 10 / 20, 207)
    assert (reward.wall_share, reward.fetch_s, reward.compute_s) == (2 / 20, 0.5, 1.5)
    assert [(usage.role, usage.method, usage.num_calls, usage.wall_share) for usage in found.methods] == [
        ("actor", "generate", 1, 0.3),
        ("critic", "values", 1, 0.2),
        ("critic", "update", 1, 0.4),
        ("reward", "score", 1, 0.1),
    ]


def test_a_slot_is_busy_once_however_many_roles_overlap_on_it(run):
    pools = load_breakdown(run).pools
    assert [(pool.pool, pool.num_slots, pool.busy_s) for pool in pools] == [("cpu", 1, 2.0), ("models", 2, 18.0)]
    assert [pool.idle_share for pool in pools] == pytest.approx([0.9, 0.55])


def test_the_tables_fit_a_terminal_of_eighty_columns(run):
    text = io.StringIO()
    render_breakdown(load_breakdown(run), Console(file=text, width=80))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["actor", "1", "8.00", "1.00", "2.00", "200", "B", "40", "B", "30%"] in lines
    assert ["update", "1", "7.00", "1.00", "6.00", "200", "B", "0", "B", "40%"] in lines
    assert ["models", "2", "18.00", "55.0%"] in lines


def _hybridflow(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["hybridflow", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_the_command_prints_tables_or_json(run, monkeypatch, capsys):
    code, output, _ = _hybridflow(monkeypatch, capsys, "trace", run)
    assert code in (None, 0)
    assert "generate" in output
    code, output, _ = _hybridflow(monkeypatch, capsys, "trace", run, "--json")
    assert code in (None, 0)
    body = json.loads(output)
    assert [pool["pool"] for pool in body["pools"]] == ["cpu", "models"]
    assert body["methods"][0] | {"wall_share": 0.3} == body["methods"][0]


LACKING = dict(EVENTS[1], args={name: value for name, value in EVENTS[1]["args"].items() if name != "queue_ms"})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "holds no trace.json, which a run writes when it ends. Name the run.output_dir of a run"),
        ("", "trace.json is not JSON"),
        ('{"traceEvents": [{"ph": "X", "na', "trace.json is not JSON"),
        ("[1]", "trace.json is not a JSON object"),
        ("{}", "no list 'traceEvents'"),
        ('{"traceEvents": []}', "no call of a worker"),
        (json.dumps({"traceEvents": [LACKING]}), "actor.generate (call 1) has queue_ms=None"),
        (json.dumps({"traceEvents": [_call(1, "a.b", 1, 0, 0, 0, 0, 1, 0, None)]}), "a.b (call 1) has pool=None"),
        (json.dumps({"traceEvents": [_call(1, "a.b", 1, 0, 0, 0, 0, 1, 0, "p", bytes_read="x")]}), "bytes_read='x'"),
    ],
)
def test_an_unusable_trace_is_one_error_with_exit_code_2(tmp_path, monkeypatch, capsys, text, part):
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    with pytest.raises(DataError, match=r"trace\.json"):
        load_breakdown(tmp_path)
    code, output, errors = _hybridflow(monkeypatch, capsys, "trace", tmp_path)
    assert (code, output) == (2, "")
    assert [line.startswith("Error: ") for line in errors.splitlines()] == [True]
    assert part in errors
    assert str(tmp_path) in errors


def test_no_such_run(tmp_path, monkeypatch, capsys):
    code, output, errors = _hybridflow(monkeypatch, capsys, "trace", tmp_path / "absent")
    assert (code, output) == (2, "")
    assert "absent' does not exist" in errors


def test_a_call_without_length_does_not_divide_by_zero(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [_call(1, "a.b", 1, 0, 0, 0, 0, 0, 0, "p")]}))
    found = load_breakdown(tmp_path)
    assert (found.wall_s, found.pools[0].busy_s, found.pools[0].idle_share) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("width", [None, 80, 60, 40])
def test_the_tables_of_a_pipe_and_a_narrow_terminal(run, monkeypatch, capsys, width):
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    _, output, _ = _hybridflow(monkeypatch, capsys, "trace", run)
    lines = [line.split() for line in output.splitlines()]
    assert next(line[:2] for line in lines if line[:1] == ["role,"]) == ["role,", "method"]
    assert ("left out at this width" in output) is (width in (60, 40))
    assert any(line[:2] == ["generate", "1"] or line[:1] == ["generate"] for line in lines)
    assert width is None or max(map(len, output.splitlines())) <= width
