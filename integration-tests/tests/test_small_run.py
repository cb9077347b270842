"""A whole run in this process: warm start, two PPO iterations, every file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from hf_algorithms.report import describe_metric
from hf_algorithms.report.live import build_app
from hf_protocols import MappingPlan
from small_runs import Outcome, read_metrics, without_times

SPANS = {
    "actor.generate_sequences",
    "reshard",
    "actor.compute_logprobs",
    "critic.compute_values",
    "reference.compute_ref_logprobs",
    "reward.compute_reward",
    "advantage.compute_advantages",
    "critic.update_critic",
    "actor.update_actor",
}


@pytest.fixture
def run(small_config: Path, hybridflow: Callable[..., Outcome]) -> Path:
    outcome = hybridflow("train", small_config)
    assert outcome.exit_code == 0, outcome.errors
    return small_config.parent / "run"


def test_a_run_leaves_every_file(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert {
        "score_before",
        "score_after",
        "iterations",
        "wall_s",
        "samples_per_s",
        "tokens_per_s",
        "peak_rss_bytes",
        "versions",
        "kl_to_reference",
    } <= summary.keys()
    phases = ["checks", "starting workers", "warm start", "evaluating the starting point"]
    assert list(summary["start_s"]) == phases
    assert 0 < sum(summary["start_s"].values()) < summary["wall_s"]
    assert [row["iteration"] for row in read_metrics(run)] == [1, 2]
    names = {name for row in read_metrics(run) for name in row}
    assert [name for name in names if not describe_metric(name)] == ["iteration"]
    assert MappingPlan.from_json((run / "plan.json").read_text()).models["actor"].backend == "fsdp"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    trace = json.loads((run / "trace.json").read_text())
    assert trace["otherData"]["start_s"] == summary["start_s"]
    events = trace["traceEvents"]
    for iteration in (1, 2):
        calls = [event for event in events if event.get("args", {}).get("iteration") == iteration]
        assert SPANS - {"reshard"} <= {event["name"] for event in calls}
        generate = next(event for event in calls if event["name"] == "actor.generate_sequences")
        inside = [event["name"] for event in events if _lies_in(event, generate)]
        assert "reshard" in inside
    _check_samples(run)


def _check_samples(run: Path) -> None:
    """Rows of the last iteration hold what training knew of their tokens, and `serve` shows it."""
    rows = [json.loads(line) for line in (run / "samples" / "2.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["set"] == "train"]
    assert len(trained) == 8  # the batch of this run
    for row in trained:
        assert len(row["token_ids"]) == len(row["response_mask"]) == row["tokens"]
        # one engine samples and trains, so both find the same log-probs
        assert row["rollout_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-3)
        assert max(row["rollout_logprobs"]) <= 0
        assert row["response"] == "".join(text for text in row["token_texts"] if len(text) == 1)
        assert row["score"] == pytest.approx(len(row["response"]) / 5)  # what the reward of this run counts
        assert list(row["rewards"].values()) == pytest.approx([row["score"]])
        assert (row["iteration"], len(row["sample"])) == (2, 4)
    assert len({tuple(row["sample"]) for row in trained}) == len(trained)
    client = TestClient(build_app([run]), base_url="http://localhost")
    assert client.get("/state").json()["runs"][0]["state"] == "finished"
    longest = max(trained, key=lambda row: row["tokens"])
    page = client.get(f"/parts/sample?iteration=2&row={rows.index(longest)}&colouring=ratio").text
    assert page.count('<span class="tok') == longest["tokens"]
    assert page.count(", ratio ") == longest["tokens"]
    for part in ("curves", "health", "samples", "compare", "gantt"):
        assert 'class="note"' not in client.get(f"/parts/{part}").text


def test_the_trace_of_a_run_is_summed_up(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    outcome = hybridflow("trace", run, "--json")
    assert outcome.exit_code == 0, outcome.errors
    body = json.loads(outcome.output)
    found = {f"{usage['role']}.{usage['method']}": usage for usage in body["methods"]}
    assert SPANS - {"reshard"} <= found.keys()
    assert {usage["role"] for usage in body["roles"]} == {name.partition(".")[0] for name in found}
    assert found["critic.update_critic"]["num_calls"] == 2
    assert found["critic.update_critic"]["bytes_read"] > 0
    # One process ran everything, one call after another: the pools' busy shares add up to at most one.
    assert 0 < sum(1 - pool["idle_share"] for pool in body["pools"]) <= 1 + 1e-6


def _lies_in(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    same_row = event["ph"] == "X" and (event["pid"], event["tid"]) == (outer["pid"], outer["tid"])
    return same_row and outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]


def test_the_model_loads_and_is_not_the_one_it_started_from(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    warm = AutoModelForCausalLM.from_pretrained(run / "warm_model")
    tokens = tokenizer("37+85=", return_tensors="pt")["input_ids"]
    assert model(tokens).logits.shape == (1, 6, len(tokenizer))
    assert not torch.equal(model.lm_head.weight, warm.lm_head.weight)


def test_a_second_run_with_the_seed_gives_the_same_metrics(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    again = run.with_name("again")
    assert hybridflow("train", run.parent / "config.toml", "--set", f"run.output_dir={again}").exit_code == 0
    assert without_times(read_metrics(again)) == without_times(read_metrics(run))
    other = run.with_name("other")
    arguments = ("--set", f"run.output_dir={other}", "--set", "run.seed=1")
    assert hybridflow("train", run.parent / "config.toml", *arguments).exit_code == 0
    assert without_times(read_metrics(other)) != without_times(read_metrics(run))


def test_a_run_follows_the_plan_it_is_given(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    planned = hybridflow("plan", small_config, "--json")
    assert planned.exit_code == 0, planned.errors
    file = small_config.with_name("my-plan.json")
    file.write_text(planned.output.replace('"micro_batch_tokens": 8192', '"micro_batch_tokens": 64'))
    assert hybridflow("train", small_config, "--plan", file).exit_code == 0
    used = MappingPlan.from_json((small_config.parent / "run" / "plan.json").read_text())
    assert used.models["actor"].micro_batch_tokens == 64


def test_a_breakpoint_in_a_worker_method_stops_there(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_in: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped_in.append(sys._getframe(1).f_code.co_name))
    (small_config.parent / "my_reward.py").write_text(
        "def constant(prompts, responses, answers):\n    breakpoint()\n    return [1.0] * len(prompts)\n"
    )
    settings = ("--set", "reward.function=my_reward:constant", "--set", "reward.processes=0")
    assert hybridflow("train", small_config, *settings).exit_code == 0
    assert stopped_in == ["constant"] * len(stopped_in)
    assert len(stopped_in) >= 2


def test_the_samplers_log_probs_train_like_recomputed_ones(
    small_config: Path, hybridflow: Callable[..., Outcome]
) -> None:
    """In float32 both engines agree, so nothing but a forward pass is saved."""
    outcomes = []
    for source in ("recomputed", "sampled"):
        output = small_config.parent / source
        settings = [f"run.output_dir={output}", f"algorithm.old_logprobs={source}"]
        outcome = hybridflow("train", small_config, *(part for each in settings for part in ("--set", each)))
        assert outcome.exit_code == 0, outcome.errors
        outcomes.append(read_metrics(output))
    recomputed, sampled = outcomes
    assert recomputed[0]["rollout/logprob_gap_max"] < 1e-4
    for before, after in zip(recomputed, sampled, strict=True):
        for name in ("actor/policy_loss", "actor/update_kl", "critic/value_loss", "reward/mean"):
            assert after[name] == pytest.approx(before[name], abs=1e-4), name
        assert after["actor/truncated_fraction"] == 0.0
        assert "rollout/logprob_gap" not in after
        assert 0 <= after["actor/sampler_gap_share"] <= 1
        assert 0 <= after["actor/sampler_gap"] <= after["actor/sampler_gap_max"] < 1e-2
    counts = [_count(small_config.parent / source, "actor.compute_logprobs") for source in ("recomputed", "sampled")]
    assert counts[0] - counts[1] == len(recomputed)


def _count(run: Path, name: str) -> int:
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    return sum(event["name"] == name for event in events)


def test_texts_are_learned_in_blocks_next_to_the_policy(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    texts = "".join(json.dumps({"text": "1+1=2" * number}) + "\n" for number in (1, 9, 2))
    small_config.with_name("texts.jsonl").write_text(texts)
    small_config.with_name("costs.py").write_text("def cost(responses):\n    return [1.0] * len(responses)\n")
    changes = ("algorithm.name=safe_rlhf", "algorithm.ptx_coefficient=0.5", "cost.function=costs:cost",
               "optimizer.actor_learning_rate=1e-2",
               f"data.pretraining={small_config.with_name('texts.jsonl')}", "data.block_tokens=8")  # fmt: skip
    outcome = hybridflow("train", small_config, *(word for each in changes for word in ("--set", each)))
    assert outcome.exit_code == 0, outcome.errors
    assert "texts.jsonl': 63 tokens in 9 blocks of at most 8 (data.block_tokens)" in outcome.output
    losses = [row["actor/ptx_loss"] for row in read_metrics(small_config.parent / "run")]
    assert len(losses) == 2 and losses[1] < losses[0]
