from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from hf_algorithms import cli
from hf_algorithms.report._health import measure_health
from hf_algorithms.report.live import build_app
from hf_algorithms.report.live._parts import compare_settings
from hf_algorithms.report.live._sample_parts import compute_bins
from hf_protocols import ConfigError

PARTS = ("curves", "health", "samples", "sample?row=0", "compare", "gantt")
HOSTILE = "<script>alert(1)</script> & \"'"


def _metrics(iterations, offset=0.0):
    for i in range(1, iterations + 1):
        yield {
            "iteration": i,
            "reward/mean": offset + 0.01 * i,
            "actor/entropy": 2.0 + 0.001 * (i % 3) if i <= 30 else 0.5,
            "kl/k3": 0.01,
            "actor/policy_loss": -0.1,
            "perf/tokens_per_s": 100.0 + i,
            "time/iteration_s": 2.0,
            "time/generate_s": 1.5,
            "time/train_s": 0.5,
        }


def _sample(group, number, score, **more):
    return {
        "set": "train",
        "row": group,
        "group": group,
        "sample": number,
        "prompt": f"{group}+{group}=",
        "response": f"answer {number}",
        "answer": str(2 * group),
        "finish_reason": "length" if number == 3 else "stop",
        "score": score,
        "rewards": {"exact": score, "format": 0.5},
        "advantage": score - 0.5,
        "token_ids": [7, 8, 9],
        "token_texts": ["answer", " ", str(number)],
        "rollout_logprobs": [-0.1, -2.0, -1.0],
        "old_logprobs": [-0.1, -1.0, -3.0],
        "response_mask": [1, 1, 0],
        **more,
    }


def _span(name, start_us, dur_us, tid=0):
    args = {"iteration": 3, "call": name, "pool": "models"}
    return {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": 1e15 + start_us, "dur": dur_us, "args": args}


def write_run(directory, *, iterations=40, algorithm="grpo", offset=0.0):
    """The files of a run that ended, with two groups of samples at iterations 10 and 20."""
    (directory / "samples").mkdir(parents=True)
    (directory / "config.toml").write_text(f'[run]\nseed = {int(offset)}\n[algorithm]\nname = "{algorithm}"\n')
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _metrics(iterations, offset)))
    summary = {"status": "finished", "metric": "exact", "score_before": 0.25, "score_after": 0.75, "wall_s": 80.0}
    (directory / "summary.json").write_text(json.dumps(summary))
    events = [_span("actor.generate_sequences", 0, 600), _span("actor.update_actor", 600, 400)]
    events.append(_span("reward.compute_reward", 600, 100, tid=1))
    (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
    for iteration in (10, 20):
        rows = [_sample(1, number, 1.0) for number in range(4)]
        rows += [_sample(2, number, 0.25 * number) for number in range(4)]
        rows += [_sample(5, 0, 0.5, set="validation", rewards={}, scores={"exact": 0.5}, tokens=12)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "samples" / f"{iteration}.jsonl").write_text(text)
    return directory


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def _client(*runs):
    return TestClient(build_app(runs), base_url="http://localhost")


def _get(client, address):
    answer = client.get(address if address.startswith("/") else f"/parts/{address}")
    assert answer.status_code == 200, answer.text
    return answer.text


def test_two_runs_are_shown_on_one_scale(run, tmp_path):
    other = write_run(tmp_path / "other", iterations=25, algorithm="ppo", offset=3.0)
    client = _client(run, other)
    states = client.get("/state").json()["runs"]
    assert [(each["name"], each["state"], each["iteration"], each["algorithm"]) for each in states] == [
        ("run", "finished", 40, "grpo"),
        ("other", "finished", 25, "ppo"),
    ]
    curves = _get(client, "curves")
    assert curves.count("<figure") == 2  # reward and loss; the others by their prefix
    assert 'aria-label="Reward: run, 0.01 at iteration 1, 0.4 at iteration 40; other, 3.01' in curves
    assert 'data-low="1" data-high="40"' in curves
    assert 'data-set="filter=perf%2F"' in curves
    assert _get(client, "curves?runs=1&filter=kl").count("<polyline") == 1
    compared = _get(client, "compare")
    assert "algorithm.name" in compared and "&quot;ppo&quot;" in compared
    assert "run.seed" in compared
    assert "0.75" in compared


def test_ratios_that_no_step_computed_are_said(run):
    row = {name: value for name, value in _sample(1, 0, 1.0).items() if name != "old_logprobs"}
    row["sample"] = [0, 7, 1, 0]
    (run / "samples" / "30.jsonl").write_text(json.dumps(row) + "\n")
    client = _client(run)
    groups = _get(client, "samples")
    assert "Ratios are not computed: algorithm.old_logprobs = &#x27;current&#x27;" in groups
    assert "exact 1" in groups
    shown = _get(client, "sample?row=0")
    assert "<td>ratio</td><td>not computed" in shown
    assert "0/7/1/0" in shown
    assert "not computed" not in _get(client, "samples?iteration=20")


def test_axes_count_what_was_spent(run):
    client = _client(run)
    tokens = sum(2.0 * (100 + i) for i in range(1, 41))
    assert f'data-low="202" data-high="{tokens:g}"' in _get(client, "curves?axis=tokens")
    assert 'data-low="2" data-high="80"' in _get(client, "curves?axis=seconds")


def test_health_is_measured_against_the_first_iterations(run):
    columns = {name: [row[name] for row in _metrics(40)] for name in ("actor/entropy", "kl/k3")}
    found = {number.name: number for number in measure_health(columns)}
    assert (found["entropy"].state, found["entropy"].last) == ("below", 0.5)
    first = columns["actor/entropy"][:20]
    mean = sum(first) / 20
    spread = math.sqrt(sum((value - mean) ** 2 for value in first) / 20)
    assert found["entropy"].band == pytest.approx((mean - 3 * spread, mean + 3 * spread))
    assert found["KL to the reference"].state == "within"
    assert measure_health({"kl/k3": [0.1] * 24})[0].state == ""
    assert _get(_client(run), "health").count('class="outside"') == 1


def test_calls_of_an_iteration_have_their_idle_share(run):
    client = _client(run)
    chart = _get(client, "gantt?iteration=3")
    assert "idle 0%" in chart
    assert "idle 90%" in chart
    assert "has no calls of iteration 4" in _get(client, "gantt?iteration=4")
    (run / "trace.json").unlink()
    phases = _get(_client(run), "gantt")
    assert "75% of the iteration" in phases  # of the newest line of metrics.jsonl


def test_bins_choose_samples_and_their_export(run):
    client = _client(run)
    page = _get(client, "samples")
    assert "Iteration 20" in page
    assert "8 responses, to 2 prompts, 50% of them with equal rewards" in page
    assert page.index("2+2=") < page.index("1+1=")  # the wider spread first
    assert "score 1: 4 responses" in page
    rows = [json.loads(line) for line in _get(client, "/samples.jsonl?iteration=10&bin=3").splitlines()]
    assert [(row["group"], row["score"]) for row in rows] == [("2", 0.75)]
    assert _get(client, "samples?bin=3").count('class="card"') == 1
    assert _get(client, "samples?set=validation").count('class="card"') == 1
    assert "Iteration 10" in _get(client, "samples?iteration=19")
    assert "has no line 100" in _get(client, "sample?row=99")


def test_bins_hold_every_value_once():
    values = [0.1 * n for n in range(50)] + [5.0]
    bins = compute_bins(values)
    assert len(bins) == 12
    assert sum(each.num_values for each in bins) == len(values)
    assert all(sum(each.holds(value) for each in bins) == 1 for value in values)
    assert [(each.low, each.num_values) for each in compute_bins([1.0, 0.0, 1.0])] == [(0.0, 1), (1.0, 2)]


def test_tokens_show_log_probs_ratio_and_mask(run):
    client = _client(run)
    page = _get(client, "sample?row=4&colouring=ratio&iteration=20")
    ratio = math.exp(-1.0 + 2.0)
    assert f"token 1, &#x27; &#x27;, id 8, sampler -2, trainer -1, ratio {ratio:.4g}, trained" in page
    assert f"ratio {math.exp(-2.0):.4g}, not trained" in page
    assert '<span class="tok up4"' in page
    assert '<span class="tok off down4"' in page
    assert '<span class="tok" title="token 0' in page
    improbable = _get(client, "sample?row=4&colouring=sampler&iteration=20")
    assert f'<span class="tok p{int(8 * (1 - math.exp(-2.0)))}" title="token 1' in improbable


def test_a_running_run_is_followed(run):
    (run / "summary.json").unlink()
    client = _client(run)
    before = client.get("/state").json()["runs"][0]
    assert before["state"] == "running"
    assert "or killed: the last line is" in before["detail"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 41, "reward/mean": 9.0}\n{"iteration": 42')
    after = client.get("/state").json()["runs"][0]
    assert (after["iteration"], after["notes"]) == (41, [])
    assert after["version"] != before["version"]
    assert "9 at iteration 41" in _get(client, "curves")
    (run / "samples" / "41.jsonl").write_text(json.dumps(_sample(3, 0, 0.0)) + "\n")
    assert "Iteration 41" in _get(client, "samples")


def test_a_run_that_is_deleted_stays_on_the_page(run):
    client = _client(run)
    for part in PARTS:
        _get(client, part)
    shutil.rmtree(run)
    state = client.get("/state").json()["runs"][0]
    assert state["state"] == "gone"
    assert "deleted or moved" in state["detail"]
    pages = {part: _get(client, part) for part in PARTS}
    assert "<polyline" in pages["curves"]
    assert "samples/20.jsonl was deleted" in pages["samples"]
    assert "generate_sequences" in pages["gantt"]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json", "trace.json", "samples/20.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00{", b"[" * 5000, b"3\n"])
def test_a_damaged_file_is_a_note(run, name, content):
    (run / name).write_bytes(content)
    client = _client(run)
    texts = [_get(client, part) for part in PARTS]
    texts += client.get("/state").json()["runs"][0]["notes"] + [client.get("/state").json()["runs"][0]["detail"]]
    words = ("empty", "is not a JSON object", "damaged", "No iteration", "absent", "no line 1")
    assert any(word in text for word in words for text in texts)


def test_a_long_run_is_sent_in_few_bytes(tmp_path):
    run = write_run(tmp_path / "run", iterations=1)
    rows = 30_000
    with (run / "metrics.jsonl").open("w") as file:
        for i in range(1, rows + 1):
            row = {"iteration": i, "reward/mean": 77.0 if i == 12_345 else 0.5, "actor/policy_loss": i % 7}
            row |= {f"other/{n}": 0.123456789 for n in range(5)}
            file.write(json.dumps(row) + "\n")
    app = build_app([run])
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/state").json()["runs"][0]["iteration"] == rows
    first = [client.get(f"/parts/{part}").content for part in PARTS]
    assert b"<polyline" in first[0]
    assert sum(map(len, first)) < 60_000
    while any("is long" in note for note in client.get("/state").json()["runs"][0]["notes"]):
        pass
    exact = _get(client, "curves?filter=reward")
    assert ">50<" in exact  # the axis reaches the one value of 30,000 that is above 0.5
    assert len(exact) < 20_000


def test_texts_of_a_run_are_escaped(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, f"{HOSTILE}loss": 1.0}) + "\n")
    (run / "config.toml").write_text(f"[algorithm]\nname = '''{HOSTILE}'''\n")
    row = _sample(1, 0, 1.0, prompt=HOSTILE, response=HOSTILE, answer=HOSTILE, rewards={HOSTILE: 1.0, "b": 2.0})
    row |= {"token_texts": [HOSTILE, "b", "c"], "extra": {HOSTILE: HOSTILE}, "set": HOSTILE, "finish_reason": HOSTILE}
    (run / "samples" / "20.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(_sample(1, 1, 0.5)) + "\n")
    client = _client(run)
    for part in (*PARTS, "curves?filter=%3Cscript%3Ealert"):
        text = _get(client, part)
        assert "<script" not in text
        assert "alert(1)" in text or part in ("health", "gantt")


def test_requests_that_mean_nothing_are_one_line(run):
    client = _client(run)
    for address in ("curves?axis=days", "curves?runs=x", "samples?run=1", "samples?iteration=-1", "sample?row=1.5"):
        answer = client.get(f"/parts/{address}")
        assert answer.status_code == 400
        assert "\n" not in answer.text
    assert client.get("/absent").status_code == 404
    assert client.post("/state").status_code == 405


def test_foreign_names_are_refused_and_nothing_is_loaded(run):
    client = _client(run)
    assert client.get("/state", headers={"host": "attacker.example"}).status_code == 400
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text + _get(client, "/page.css") + _get(client, "/page.js")
    assert build_app([run], hosts=["*"]) is not None


def test_configurations_are_compared_key_by_key():
    texts = ['[a]\nx = 1\ny = [1, 2]\n[[e]]\nname = "v"\n', '[a]\nx = 2\ny = [1, 2]\n[[e]]\nname = "w"\n', "broken ["]
    assert compare_settings(texts[:2]) == {"a.x": ["1", "2"], "e[0].name": ['"v"', '"w"']}
    assert compare_settings(texts)["a.y"] == ["[1, 2]", "[1, 2]", None]


def _command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["hybridflow", "serve", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    return ended.value.code, errors


def test_the_command_refuses_in_one_line(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            (run, "--port", port): f"--port {port}: another program listens on it",
            (run, "--port", 70000): "--port 70000: it is not between 0 and 65535",
            (run, "--host", "192.0.2.1"): "--host 192.0.2.1: it is not an address of this machine",
            (tmp_path / "absent",): "it is not a directory",
            (tmp_path / "empty",): "it holds none of config.toml",
            (run, run): "it is named twice",
        }
        for words, message in cases.items():
            code, errors = _command(monkeypatch, capsys, *words)
            assert code == 2
            assert message in errors


def test_without_the_extra_the_line_that_installs_it(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    code, errors = _command(monkeypatch, capsys, run)
    assert code == 2
    assert "pip install 'hf-algorithms[serve]'" in errors
    with pytest.raises(ConfigError, match="starlette is not installed"):
        build_app([run])


def test_the_pages_load_no_heavy_library():
    code = "import hf_algorithms.report.live, sys; print(sorted({'torch', 'ray', 'starlette'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "[]"
