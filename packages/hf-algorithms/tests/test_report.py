from __future__ import annotations

import json
import math
import random
import re
import shutil
from html.parser import HTMLParser

import pytest

from hf_algorithms.report import leave_report, write_report
from hf_algorithms.report._timeline import choose_iteration, read_timeline
from hf_protocols.drawing import format_bytes, format_duration, format_number, round_ticks
from hf_protocols.errors import DataError

VOID = {"meta", "line", "rect", "circle", "polyline", "wbr", "br", "i"}
HOSTILE = "<script>alert(1)</script> & \"'"


class Page(HTMLParser):
    """Tags with their attributes and all text; complains about tags that do not close."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self._open = [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "wbr"}:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag, **attrs):
        return sum(name == tag and all(found.get(k) == v for k, v in attrs.items()) for name, found in self.tags)


def _span(name, tid, start_ms, length_ms, pid=1, **args):
    origin = 1.7e15
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": origin + start_ms * 1e3,
        "dur": length_ms * 1e3,
        "args": args,
    }


def _name(kind, pid, tid, name):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


PLAN = [
    ("actor.generate_sequences", (0, 1), 150, [("transition", 12), ("generate", 130)]),
    ("actor.compute_logprobs", (0, 1), 35, [("fetch", 2)]),
    ("critic.compute_values", (0, 1), 33, []),
    ("reference.compute_ref_logprobs", (0, 1), 34, []),
    ("reward.compute_reward", (9,), 4, []),
    ("advantage.compute_advantages", (8,), 3, []),
    ("critic.update_critic", (0, 1), 90, [("forward", 30), ("backward", 45)]),
    ("actor.update_actor", (0, 1), 95, [("forward", 32), ("backward", 47)]),
]


def _events(iterations):
    events = [
        _name("process_name", 1, 0, "models: node-0"),
        _name("thread_name", 1, 0, "rank 0"),
        _name("thread_name", 1, 1, "rank 1"),
        _name("process_name", 2, 0, "advantage: node-0"),
        _name("thread_name", 2, 0, "rank 0"),
        _name("process_name", 10, 0, "reward: node-0"),
        _name("thread_name", 10, 0, "rank 0"),
    ]
    now, call = 0.0, 0
    for iteration in range(1, iterations + 1):
        for name, ranks, length, parts in PLAN:
            length *= 1 + 0.01 * (iteration % 5)
            call += 1
            for rank in ranks:
                pid, tid = {9: (10, 0), 8: (2, 0)}.get(rank, (1, rank))
                arguments = {"iteration": iteration, "call": call, "bytes_read": 4096}
                events.append(_span(name, tid, now, length, pid, **arguments))
                at = now + 1
                for part, part_length in parts:
                    events.append(_span(part, tid, at, part_length, pid))
                    at += part_length
            now += length + 1
        # An evaluation belongs to no iteration.
        events.append(_span("actor.generate_sequences", 0, now, 40, 1, call=10_000 + iteration))
        now += 45
    return events


def write_run(directory, *, iterations=120, long=False):
    """A run as run/loop.py leaves it, with numbers that look like one."""
    draw = random.Random(0)
    lines = []
    for i in range(1, iterations + 1):
        rise = 0.34 * (1 - math.exp(-i / 45))
        row = {
            "iteration": i,
            "reward/mean": 0.36 + rise + draw.gauss(0, 0.03),
            "kl_sequence/k3": 0.9 * rise + abs(draw.gauss(0, 0.03)),
            "actor/policy_loss": -0.02 + draw.gauss(0, 0.01),
            "critic/value_loss": 0.11 * math.exp(-i / 30) + 0.02 + abs(draw.gauss(0, 0.004)),
            "actor/grad_norm": 0.8 + draw.gauss(0, 0.1),
            "perf/tokens_per_s": 980 + draw.gauss(0, 40),
            "time/iteration_s": 0.45,
        }
        if i % 10 == 0:
            row["eval/validation/exact_match"] = 0.37 + rise + draw.gauss(0, 0.01)
        lines.append(json.dumps(row))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {
        "metric": "exact_match",
        "score_before": 0.362,
        "score_after": 0.688,
        "kl_to_reference": {"estimator": "k3", "unit": "nats per response", "value": 0.412},
        "iterations": iterations,
        "wall_s": 131.4,
        "samples_per_s": 244.1,
        "tokens_per_s": 981.2,
        "peak_rss_bytes": 3_214_000_000,
        "warm_start_steps": 140,
        "checkpoint_share": 0.0234,
        "last_commit": iterations,
        "versions": {"hf-algorithms": "0.1.0", "torch": "2.13.0"},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "trace.json").write_text(json.dumps({"traceEvents": _events(iterations)}))
    (directory / "config.toml").write_text('[run]\nseed = 0\n\n[algorithm]\nname = "ppo"\nclip_low = 0.2\n')
    (directory / "samples").mkdir(exist_ok=True)
    for iteration, samples in zip((0, iterations), _samples(long), strict=True):
        _write_samples(directory / "samples" / f"{iteration}.jsonl", samples)
    return directory


def _write_samples(path, samples):
    path.write_text("".join(json.dumps({"set": "test", **sample}) + "\n" for sample in samples))


def _samples(long):
    problems = [("37+85=", "122", "123", "122"), ("4+9=", "13", "13", "13"), ("99+99=", "198", "1988", "188")] * 4
    if long:
        text = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all? " * 3
        problems = [(text, "48/2 = 24\n#### 72", "clips " * 60, "She sold 24.\n#### 71"), *problems[:2]]
    before, after = [], []
    for prompt, answer, first, second in problems:
        for moment, response in ((before, first), (after, second)):
            score = float(response == answer)
            moment.append({"prompt": prompt, "response": response, "answer": answer, "score": score})
    return before, after


def test_a_whole_run_is_one_page_that_loads_nothing(tmp_path):
    path = write_report(write_run(tmp_path))
    assert path == tmp_path / "report.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    text = " ".join("".join(page.texts).split())
    assert "36.2% \u2192 68.8%" in text
    assert "+32.6 points on rows of the evaluation" in text
    assert "0.412" in text
    assert "3.0 GiB" in text
    assert "2:11 min" in text
    assert "Checkpoints2.3%of the time, the last one after iteration 120" in text
    for title in ("exact_match, validation", "Reward", "KL to the reference", "Actor policy loss", "Critic value loss"):
        assert title in text
    assert "3 more metrics" in text
    assert 'name = "ppo"' in text
    assert "2.13.0" in text
    # Nothing that a browser would fetch or run.
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any(name in {"src", "href"} or name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "url(" not in html
    assert "@import" not in html
    assert not re.search(r"https?://", html)
    assert page.count("meta", name="viewport") == 1
    assert html.isascii()


def test_the_gantt_chart_has_a_row_per_rank_and_a_bar_per_call(tmp_path):
    page = Page(write_report(write_run(tmp_path)).read_text(encoding="utf-8"))
    bars = [attrs for tag, attrs in page.tags if tag == "g" and attrs.get("class", "").startswith("bar")]
    assert len(bars) == 6 * 2 + 2
    assert page.count("rect", **{"class": "part"}) == 2 * (2 + 1 + 2 + 2)
    lanes = [
        attrs["aria-label"]
        for tag, attrs in page.tags
        if tag == "svg" and attrs.get("class") == "lane" and "role" in attrs
    ]
    assert [lane.partition(": actor")[0].partition(": reward.")[0].partition(": advantage.")[0] for lane in lanes] == [
        "models: node-0 rank 0",
        "models: node-0 rank 1",
        "advantage: node-0 rank 0",
        "reward: node-0 rank 0",
    ]
    text = "".join(page.texts)
    assert "1 generate_sequences" in text
    assert "transition 12.0 ms, generate 130.0 ms" in text
    assert "8.0 KiB" in text  # both ranks' 4,096 bytes
    for _, attrs in page.tags:
        for value in (attrs.get("x", ""), attrs.get("width", "")):
            if value.endswith("%"):
                assert -0.001 <= float(value[:-1]) <= 100.1


def test_a_timeline_holds_what_the_trace_says():
    timelines = read_timeline(_events(4))
    assert sorted(timelines) == [1, 2, 3, 4]
    chosen = choose_iteration(timelines)
    assert chosen.iteration == 3  # of 2, 3 and 4 the middle one
    assert len(chosen.calls) == 14
    generate = chosen.calls[0]
    assert (generate.role, generate.method) == ("actor", "generate_sequences")
    assert [part.name for part in generate.parts] == ["transition", "generate"]
    assert generate.parts[0].end_us - generate.parts[0].start_us == pytest.approx(12e3)
    assert choose_iteration({}) is None
    assert choose_iteration(read_timeline(_events(1))).iteration == 1


def test_everything_from_a_file_is_escaped(tmp_path):
    run = tmp_path / "<b>run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, HOSTILE: 1.0, f"{HOSTILE}loss": 2}) + "\n")
    error = {"type": "E", "message": HOSTILE}
    (run / "summary.json").write_text(json.dumps({"error": error, "versions": {HOSTILE: HOSTILE}}))
    (run / "config.toml").write_text(f'[algorithm]\nname = """{HOSTILE} """\n')
    sample = {"prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE, "score": HOSTILE, "extra": {HOSTILE: HOSTILE}}
    (run / "samples").mkdir()
    _write_samples(run / "samples" / "0.jsonl", [sample])
    events = [_span(f"{HOSTILE}.{HOSTILE}", 0, 0, 5, iteration=1), _span(HOSTILE, 0, 1, 2)]
    events += [_name("process_name", 1, 0, HOSTILE), _name("thread_name", 1, 0, HOSTILE)]
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.tags}
    assert "".join(page.texts).count("alert(1)") >= 12


@pytest.mark.parametrize("kept", ["config.toml", "metrics.jsonl", "summary.json", "trace.json", "samples"])
def test_any_one_file_makes_a_page(tmp_path, kept):
    whole = len(write_report(write_run(tmp_path)).read_text(encoding="utf-8"))
    for path in tmp_path.iterdir():
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = write_report(tmp_path).read_text(encoding="utf-8")
    Page(html)
    assert len(html) < whole


def test_damaged_files_are_named_on_the_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "reward/mean": NaN, "kl_sequence/k3": 0.1}\n{"iteration": 2, "rew'
    )
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "trace.json").write_text("{")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0.jsonl").write_bytes(b"\xff")
    (tmp_path / "samples" / "7.jsonl").write_text('{"set": "test", "prompt": "whole"}\n{"set": "te')
    events = "".join(Page(write_report(tmp_path).read_text(encoding="utf-8")).texts)
    assert "metrics.jsonl, line 2, is not a JSON object" in events
    assert "summary.json is not a JSON object" in events
    assert "trace.json is not JSON" in events
    assert "samples/0.jsonl, line 1, is not a JSON object" in events
    assert "samples/7.jsonl, line 2, is not a JSON object" in events
    assert "whole" in events
    assert "KL to the reference" in events
    assert "reward/mean" not in events


def test_half_characters_and_huge_numbers_are_shown(tmp_path):
    """JSON can hold what no file and no float can; a page shows the rest."""
    half = "\ud800"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, f"{half}loss": 1.0, "a/loss": 10**400}) + "\n")
    summary = {"status": half, "error": {"type": half, "message": half}, "wall_s": 10**400, "iterations": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "samples").mkdir()
    _write_samples(tmp_path / "samples" / "0.jsonl", [{"set": "test", "prompt": f"whole{half}", "score": 10**400}])
    span = _span("actor.generate_sequences", 0, 1, 5, iteration=1) | {"dur": 10**400}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [span]}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "whole\ufffd" in page
    assert "\ufffdloss" in page


@pytest.mark.parametrize(
    "event",
    [{}, {"ph": "X"}, {"ph": "X", "ts": "a", "dur": 1}, {"ph": "X", "ts": 1, "dur": 1, "args": {"iteration": "one"}}],
)
def test_foreign_events_are_left_out(event):
    assert read_timeline([event]) == {}


def test_a_report_that_cannot_be_written_is_a_note(tmp_path):
    run, notes = write_run(tmp_path), []
    leave_report(run, notes.append)
    assert notes == [] and (run / "report.html").stat().st_size
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    leave_report(run, notes.append)
    (note,) = notes
    assert re.search(
        r"report\.html cannot be written: Is a directory\. Write it later: hybridflow report \S+$", note
    ), note


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no run: .*, samples/\. Name the run.output_dir of a run$"):
        write_report(tmp_path)
    with pytest.raises(DataError, match=r"holds no run: .*, samples/\. Name the run.output_dir of a run$"):
        write_report(tmp_path / "absent")


def test_numbers_read_well():
    numbers = [0.3621, 41.34, 3214.2, 1.234e-5, -0.02, 120, 0, 2.5e7, float("nan")]
    assert [format_number(value) for value in numbers] == [
        "0.362",
        "41.3",
        "3,214",
        "1.2e-05",
        "-0.02",
        "120",
        "0",
        "2.5e+07",
        "nan",
    ]
    assert [format_duration(value) for value in (0.52, 41.2, 151, 3751)] == ["0.52 s", "41 s", "2:31 min", "1:02:31 h"]
    assert [format_bytes(value) for value in (812, 3500, 3.1e9)] == ["812 B", "3.4 KiB", "2.9 GiB"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.36, 0.72), (-3e-5, 4e-5), (1, 120), (0, 513_000), (7, 7)])
def test_ticks_are_round_and_inside(low, high):
    ticks = round_ticks(low, high, 5)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)
    if len(ticks) > 1:
        mantissa = f"{ticks[1] - ticks[0]:.6e}"[0]
        assert mantissa in "125"
