"""The reward worker: weights, metrics, and what has no score, on batches as a run makes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.data import PromptDataset, Row, build_character_tokenizer
from hf_algorithms.rewards import FunctionSpec, TrainerState, combine_scores
from hf_algorithms.workers import CostWorker, RewardWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerGroup, WorkerSpec
from hf_protocols import BatchError, ConfigError, ParallelSpec, RewardError, Topology

SOURCE = '''
import os

CALLS = []

def length(responses):
    return [{"score": float(len(response)), "twos": response.count("2")} for response in responses]

def only_even(responses, truncated):
    """Does not apply to responses of odd length."""
    return [None if len(response) % 2 else 10.0 + cut for response, cut in zip(responses, truncated)]

def hangs(solution_str):
    while solution_str == "333":
        pass
    return 1.0

def counts(responses):
    CALLS.append(len(responses))
    return [float(sum(CALLS))] * len(responses)

def broken(responses):
    return ["good"] * len(responses)

def unsure(responses):
    return [None] * len(responses)

def logs(prompts, completions, trainer_state, log_extra, log_metric, **columns):
    """As TRL's functions log: numbers of a call or of a response, and columns."""
    log_metric("share", trainer_state.global_step / trainer_state.max_steps)
    for completion in completions:
        log_metric("length", len(completion))
    log_metric("mean", 7)
    log_extra("first", [completion[0] for completion in completions])
    log_extra("half", [len(completion) / 2 for completion in completions])
    if "333" in completions and trainer_state.iteration == 3:
        os._exit(3)
    return [float(len(completion)) for completion in completions]

async def logs_async(completions, log_metric, log_extra):
    log_metric("longest", max(map(len, completions)))
    log_extra("first", ["async"] * len(completions))
    return [0.0] * len(completions)

def logs_too_few(completions, log_extra):
    log_extra("rest", completions[1:])
    return [0.0] * len(completions)

def logs_text(completions, log_metric):
    log_metric("size", "large")

def guesses(solution_str, extra_info):
    """As verl's functions return what they read of a response."""
    return {"score": 1.0, "pred": solution_str, "is_even": len(solution_str) % 2 == 0, "half": "\\ud83d", "why": None}

def guesses_of_group(queries, prompts, labels):
    """As OpenRLHF's functions return lists of it."""
    return {"rewards": [1.0] * len(queries), "extra_logs": {"pred": list(queries), "size": [1.0] * len(queries)}}

def asks(completions, trainer_state):
    return trainer_state.log_history
'''
ROWS = [Row("1+1=", "2"), Row("1+2=", "3")]
RESPONSES = ["2", "22", "333", "4444"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker")
    (path / "worker_rewards.py").write_text(SOURCE)
    build_character_tokenizer("0123456789+=", path / "tokenizer")
    return path


def batch_of(folder: Path, rows: list[Row] = ROWS) -> TensorDict:
    """Two responses to each of two prompts; the last one is cut."""
    from hf_algorithms.data import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    batch = PromptDataset(rows, tokenizer).prompts([0, 0, 1, 1])
    batch["group_id"] = torch.tensor([0, 0, 1, 1])
    ids = [torch.tensor(each) for each in tokenizer(RESPONSES, add_special_tokens=False)["input_ids"]]
    batch["response_ids"] = torch.nested.nested_tensor(ids, layout=torch.jagged)
    batch["finish_reason"] = torch.tensor([0, 0, 0, 1])
    batch["sample_id"] = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]])
    return batch


@contextmanager
def worker(
    folder: Path,
    *functions: FunctionSpec,
    kind: type = RewardWorker,
    metric: str = "",
    wait_s: float = 0.5,
    **options: Any,
) -> Iterator[WorkerGroup]:
    given = {"metric": FunctionSpec(name="metric", function=metric, deadline_s=wait_s)} if metric else {}
    spec = WorkerSpec(
        worker=kind,
        topology=Topology(ParallelSpec()),
        kwargs={
            "tokenizer": str(folder / "tokenizer"),
            "functions": functions,
            "search_path": [str(folder)],
            "num_processes": 1,
            **given,
            **options,
        },
    )
    with InProcessExecutor() as executor:
        yield executor.build_groups(ResourcePool([1], device="cpu"), {"reward": spec})["reward"]


def spec(name: str, **options: Any) -> FunctionSpec:
    return FunctionSpec(name=name, function=f"worker_rewards:{name}", **options)


def test_weighted_functions_make_one_score_and_a_curve_each(folder: Path) -> None:
    functions = (spec("length"), spec("only_even", weight=0.5), spec("hangs", weight=2.0, deadline_s=0.3))
    with worker(folder, *functions) as group:
        scores = group.compute_reward(batch_of(folder)).result()["scores"]
        named = group.compute_named_reward(batch_of(folder), "only_even").result()["named_scores"]
        metrics = group.drain_metrics().result()
        empty = group.drain_metrics().sums()
        recalled = group.recall_scores(batch_of(folder)[[1, 2]]).result()
    nan = math.nan
    assert recalled == [{"length": 2.0, "only_even": 10.0, "hangs": 1.0}, {"length": 3.0}]
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([1 + 2, 2 + 5 + 2, nan, 4 + 5.5 + 2], nan_ok=True)
    assert named.tolist() == pytest.approx([nan, 10.0, nan, 11.0], nan_ok=True)
    assert metrics == {
        "reward/length/mean": 2.5,
        "reward/length/twos": 0.75,
        "reward/length/unscorable": 0.0,
        "reward/length/failed": 0.0,
        "reward/only_even/mean": 10.5,
        "reward/only_even/unscorable": 2.0,
        "reward/only_even/failed": 0.0,
        "reward/hangs/mean": 1.0,
        "reward/hangs/unscorable": 1.0,
        "reward/hangs/failed": 1.0,
    }
    assert empty == {}


def test_a_models_scores_are_added_and_counted(folder: Path) -> None:
    """Next to a function that does not apply to all responses, and alone: then evaluations average them as well."""
    batch = batch_of(folder)
    batch["model_scores"] = torch.tensor([1.0, 2.0, math.nan, 4.0])
    with worker(folder, spec("only_even", weight=0.5), model_weight=2.0) as group:
        group.compute_reward(batch, is_counted=False).result()
        scores = group.compute_reward(batch).result()["scores"]
        metrics = group.drain_metrics().result()
    assert scores.tolist() == pytest.approx([2.0, 5 + 4, math.nan, 5.5 + 8], nan_ok=True)
    assert metrics["reward/model/mean"] == pytest.approx(7 / 3)
    with worker(folder, model_weight=-1.0) as group:
        scores, measured = (
            call(batch[[0, 1, 3]]).result()[name]
            for call, name in ((group.compute_reward, "scores"), (group.compute_metric, "metric_scores"))
        )
        rows = group.collect_samples(batch[[0, 1, 3]]).result()
        metrics = group.drain_metrics().result()
        with pytest.raises(ConfigError, match=r"no reward is named 'model'\. Use one of none"):
            group.compute_named_reward(batch, "model").result()
    assert (scores.tolist(), measured.tolist()) == ([-1.0, -2.0, -4.0], [1.0, 2.0, 4.0])
    assert [row["score"] for row in rows] == [1.0, 2.0, 4.0]
    assert metrics == {"reward/model/mean": pytest.approx(7 / 3)}


def test_trl_functions_log_and_read_the_state(folder: Path) -> None:
    """Numbers are means over what was logged in the whole batch, by any call; calls that failed count nothing."""
    batch, functions = batch_of(folder), (spec("logs"), spec("logs_async"))
    lengths = [len(response) for response in RESPONSES]
    with worker(folder, *functions) as group:
        group.note_progress(TrainerState(global_step=3, max_steps=12, iteration=1)).result()
        group.compute_reward(batch, is_counted=False).result()
        assert group.drain_metrics().result() == {}
        scores = group.compute_reward(batch).result()["scores"]
        metrics = group.drain_metrics().result()
        group.note_progress(TrainerState(global_step=9, max_steps=12, iteration=3)).result()
        group.compute_reward(batch).result()
        later = group.drain_metrics().result()
    assert scores.tolist() == lengths
    wanted = {"mean": np.mean(lengths), "length": np.mean(lengths), "share": 0.25, "logged_mean": 7.0}
    wanted |= {"unscorable": 0.0, "failed": 0.0}
    found = {name: value for name, value in metrics.items() if name.startswith("reward/logs/")}
    assert found == {f"reward/logs/{name}": value for name, value in wanted.items()}
    assert metrics["reward/logs_async/longest"] == np.mean([2, 4])  # of two calls
    # the second group's call ended its process
    assert (later["reward/logs/length"], later["reward/logs/share"]) == (np.mean(lengths[:2]), 0.75)


@pytest.mark.parametrize("processes", [0, 1])
def test_logged_columns_are_in_the_samples(folder: Path, processes: int) -> None:
    functions, metric = (spec("logs_async"), spec("length")), "worker_rewards:logs"
    with worker(folder, *functions, metric=metric, num_processes=processes) as group:
        group.note_progress(TrainerState(max_steps=1)).result()
        rows = group.collect_samples(batch_of(folder)).result()
        assert group.drain_metrics().result() == {}
    assert [row["extra"] for row in rows] == [
        {"first": text[0], "half": len(text) / 2, "logs_async/first": "async"} for text in RESPONSES
    ]
    assert json.loads(json.dumps(rows)) == rows


def test_texts_next_to_scores_are_in_the_samples(folder: Path) -> None:
    found = []
    for name in ("guesses", "guesses_of_group"):
        with worker(folder, spec(name), metric=f"worker_rewards:{name}") as group:
            group.compute_reward(batch_of(folder)).result()
            rows = group.collect_samples(batch_of(folder)).result()
            metrics = group.drain_metrics().result()
        found.append([row["extra"] for row in rows])
        assert json.loads(json.dumps(rows, ensure_ascii=False).encode()) == rows
        assert {key for key in metrics if "pred" in key or "why" in key or "half" in key} == set()
    assert found[0] == [{"pred": text, "half": "\\ud83d"} for text in RESPONSES]
    assert [row["pred"].partition("=")[2] for row in found[1]] == list(RESPONSES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("logs_too_few", r"logged 1 values in the column 'rest' for 2 responses\. Log one for each response"),
        ("logs_text", r"TypeError: log_metric\('size', \.\.\.\): the value 'large' is not a number"),
        ("asks", "trainer_state has no attribute 'log_history': it has global_step, max_steps, epoch"),
    ],
)
def test_what_trl_cannot_log_is_an_error(folder: Path, name: str, says: str) -> None:
    with worker(folder, spec(name)) as group, pytest.raises(RewardError, match=says):
        group.compute_reward(batch_of(folder)).result()


def test_a_named_reward_is_not_called_again(folder: Path) -> None:
    with worker(folder, spec("counts")) as group:
        batch = batch_of(folder)
        scores = group.compute_reward(batch).result()["scores"].tolist()
        assert group.compute_named_reward(batch, "counts").result()["named_scores"].tolist() == scores == [2, 2, 4, 4]
        other = batch[:2]
        assert group.compute_named_reward(other, "counts").result()["named_scores"].tolist() == [6, 6]
        with pytest.raises(ConfigError, match=r"no reward is named 'size'\. Use one of counts"):
            group.compute_named_reward(batch, "size").result()


def test_a_metric_counts_a_failed_call_as_zero_and_refuses_none(folder: Path) -> None:
    with worker(folder, spec("length"), metric="worker_rewards:hangs") as group:
        assert group.compute_metric(batch_of(folder)).result()["metric_scores"].tolist() == [1.0, 1.0, 0.0, 1.0]
        samples = group.collect_samples(batch_of(folder)).result()
    assert samples[1] == {"prompt": "1+1=", "response": "22", "answer": "2", "score": 1.0}
    with (
        worker(folder, spec("length"), metric="worker_rewards:unsure") as group,
        pytest.raises(RewardError, match=r"worker_rewards:unsure returned None or NaN for response 0 to row 0"),
    ):
        group.compute_metric(batch_of(folder)).result()


def test_rows_without_an_answer_have_no_score_and_are_counted(folder: Path) -> None:
    batch = batch_of(folder, [Row("1+1=", None), Row("1+2=", "333")])
    right = FunctionSpec(name="right", function="hf_algorithms.rewards:exact_match", deadline_s=60)
    with worker(folder, right, metric="hf_algorithms.rewards:exact_match", wait_s=60) as group:
        scores = group.compute_reward(batch).result()["scores"].tolist()
        measured = group.compute_metric(batch).result()["metric_scores"].tolist()
        samples = group.collect_samples(batch).result()
        metrics = group.drain_metrics().result()
    for found in (scores, measured):
        assert found == pytest.approx([math.nan, math.nan, 1.0, 0.0], nan_ok=True)
    assert [each["score"] for each in samples] == [None, None, 1.0, 0.0]
    assert metrics["reward/right/unscorable"] == 2.0 and metrics["reward/right/mean"] == 0.5


def test_a_wrong_score_names_the_sample(folder: Path) -> None:
    with worker(folder, spec("broken")) as group:
        says = r"broken returned 'good' \(str\), which is not a number, for response 0 to row 0 \(epoch 0\): prompt"
        with pytest.raises(RewardError, match=says):
            group.compute_reward(batch_of(folder)).result()


def test_costs_are_scored_alike(folder: Path) -> None:
    with worker(folder, spec("length"), kind=CostWorker) as group:
        costs = group.compute_cost(batch_of(folder))
        assert group.list_costs(costs).result() == [1.0, 2.0, 3.0, 4.0]
        assert group.drain_metrics().result()["cost/length/mean"] == 2.5


def test_parts_that_do_not_apply_are_left_out() -> None:
    nan = math.nan
    parts = {
        "one": (1.0, torch.tensor([1.0, nan, nan, 2.0])),
        "two": (-0.5, torch.tensor([2.0, 2.0, nan, nan])),
        "shown": (0.0, torch.tensor([nan, nan, 5.0, 5.0])),
    }
    assert combine_scores(parts).tolist() == pytest.approx([0.0, -1.0, nan, 2.0], nan_ok=True)
    needed = combine_scores(parts, required=("one",))
    assert needed.tolist() == pytest.approx([0.0, nan, nan, 2.0], nan_ok=True)
    assert needed.dtype == torch.float64
    with pytest.raises(BatchError, match="the same number of each"):
        combine_scores({"one": (1.0, torch.ones(2)), "two": (1.0, torch.ones(3))})
