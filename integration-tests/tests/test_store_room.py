"""Bytes of a run's batches, as estimated before it starts, against those that its workers and its program stored."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms import train
from hf_algorithms.config import load_config, parse_config
from hf_algorithms.evaluation.responses import list_draws
from hf_algorithms.preflight import store_room
from hf_algorithms.preflight.checks import check_run
from hf_algorithms.preflight.store_room import describe_store, estimate_batch_bytes, estimate_supervised_bytes
from hf_algorithms.run import loop, supervised
from hf_algorithms.run.any_run import run_recipe
from hf_algorithms.run.evaluations import RunEvaluations
from hf_algorithms.run.supervised import check_supervised
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.wiring import build_roles
from hf_controller import Executor, TracingExecutor
from hf_engine import SamplingParams
from hf_protocols import ConfigError
from small_runs import Outcome

REWARD = """
import hashlib

def some_number(responses):
    return [hashlib.sha256(response.encode()).digest()[0] / 255 for response in responses]
"""
FULL_LENGTH = {"rollout.max_new_tokens": 8, "rollout.min_new_tokens": 8, "warm_start.max_steps": 0}
LONG = (
    "run.executor=ray", "model.max_positions=131072", "rollout.max_new_tokens=100000",
    "training.micro_batch_tokens=131072", "rollout.batch_size=64", "algorithm.name=grpo",
    "rollout.samples_per_prompt=2", "cluster.object_store_bytes=104857600",
)  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm.name": "ppo"},
        {"algorithm.name": "grpo", "rollout.samples_per_prompt": 4},
        {"algorithm.name": "safe_rlhf", "algorithm.ptx_coefficient": 0.1},
        pytest.param(
            {"algorithm.name": "distillation", "algorithm.signal": "top_k", "algorithm.top_k": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda keys: keys["algorithm.name"],
)
def test_the_batches_of_an_iteration_are_below_their_bound(
    small_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = f"{tmp_path / 'rewards.py'}:some_number"
    keys = {**FULL_LENGTH, "run.iterations": 1, "reward.function": reward, **keys}
    if keys["algorithm.name"] == "safe_rlhf":
        keys["cost.function"] = reward
        (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "1+1=2 " * 500}) + "\n")
        keys |= {"data.pretraining": str(tmp_path / "texts.jsonl"), "data.block_tokens": 64, "model.max_positions": 64}
    if keys["algorithm.name"] == "distillation":
        train(config=small_config, set={**FULL_LENGTH, "run.iterations": 1, "run.output_dir": str(tmp_path / "first")})
        keys["roles.teacher.path"] = str(tmp_path / "first" / "initial_model")
    put_bytes: list[int] = []
    put = Executor.put

    def count(self: Executor, batch: Any) -> Any:
        columns = [each.values() if each.is_nested else each for _, each in batch.items()]
        put_bytes.append(sum(each.numel() * each.element_size() for each in columns))
        return put(self, batch)

    monkeypatch.setattr(Executor, "put", count)
    train(config=small_config, set=keys)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    spans = [event["args"] for event in events if event.get("args", {}).get("iteration") == 1]
    # Those of validation and test are put before the first iteration.
    stored = sum(span.get("bytes_written", 0) for span in spans) + sum(put_bytes[2:])
    config = load_config(small_config, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    inputs, plan = check_run(config, tmp_path / "model")
    bound = estimate_batch_bytes(config, plan, inputs)["iterations"]
    assert bound / 2 < stored <= bound


def test_a_batch_above_the_store_is_said_before_anything_starts(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for key in LONG for word in ("--set", key)]
    planned = hybridflow("plan", small_config, *words)
    (line,) = (line for line in planned.output.splitlines() if "cluster.object_store_bytes" in line)
    assert re.fullmatch(
        "rollout.batch_size = 64, rollout.samples_per_prompt = 2, rollout.max_new_tokens = 100000: the batches take up "
        r"to 256.\d MiB, more than 80 % of the object store's 100.0 MiB. Ray moves what exceeds that to files, which "
        r"is slow. Raise cluster.object_store_bytes to at least \d+, or lower rollout.batch_size",
        line,
    )
    least = int(line.partition("to at least ")[2].partition(",")[0])
    # Of each response token: response_ids, response_mask, rollout_logprobs, ref_logprobs, advantages.
    token_bytes = 64 * 2 * 100_000 * (8 + 1 + 4 + 4 + 4)
    assert token_bytes < 0.8 * least < 1.0001 * token_bytes
    monkeypatch.setattr(loop, "build_executor", refuse)
    started = hybridflow("train", small_config, *words)
    assert line in started.output and "nothing starts" in started.errors
    for given, is_said in ((least - 1, True), (least, False)):
        enough = hybridflow("plan", small_config, *words, "--set", f"cluster.object_store_bytes={given}")
        assert enough.exit_code == 0 and ("object store" in enough.output) == is_said


def test_the_store_of_this_machine_is_the_one_of_the_run(
    small_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(small_config, LONG[:-1])
    inputs, plan = check_run(config, tmp_path / "model")
    assert describe_store(config, plan, inputs, is_here=False) == []
    for store_bytes, is_said in ((100 << 20, True), (1 << 30, False)):
        monkeypatch.setattr(store_room, "choose_store_bytes", lambda given, key, size=store_bytes: size)
        assert bool(describe_store(config, plan, inputs, is_here=True)) == is_said
    elsewhere = load_config(small_config, [*LONG[:-1], "cluster.address=10.0.0.1:6379"])
    in_process = load_config(small_config, [*LONG[:-1], "run.executor=in_process"])
    monkeypatch.setattr(store_room, "choose_store_bytes", lambda given, key: 1)
    for other in (elsewhere, in_process):
        assert describe_store(other, plan, inputs, is_here=True) == []


def test_an_evaluation_set_above_the_store_is_named(
    small_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = (("first", 1, 2), ("sums", 64, 10))
    text = small_config.read_text()
    for name, samples, tokens in sets:
        text += (
            f'\n[[evaluation]]\nname = "{name}"\ndata = "{tmp_path}/sums.jsonl"\nsamples = {samples}\nrows = 40\n'
            f"max_new_tokens = {tokens}\ntemperature = 1.0\n"
        )
    path = tmp_path / "with_sets.toml"
    path.write_text(text)
    config = load_config(path, ["run.executor=ray", "warm_start.max_steps=0"])
    inputs, plan = check_run(config, tmp_path / "model")
    found = estimate_batch_bytes(config, plan, inputs)
    # Two calls of 8 rows with 64 samples: response_ids, response_mask and rollout_logprobs of each token.
    token_bytes = 2 * 8 * 64 * 10 * (8 + 1 + 4)
    assert token_bytes < found["evaluation[1]"] < 1.5 * token_bytes
    assert found["evaluation[0]"] < found["evaluation[1]"]
    monkeypatch.setattr(store_room, "choose_store_bytes", lambda given, key: 1)
    monkeypatch.setattr(store_room, "estimate_batch_bytes", lambda *given: {**found, "evaluation[1]": 1 << 40})
    (line,) = describe_store(config, plan, inputs, is_here=True)
    assert line.startswith("evaluation[1].max_new_tokens = 10: the batches take up to")
    assert line.endswith("or lower evaluation[1].max_new_tokens")


def write_rows(folder: Path, command: str, *, length: int, num_rows: int) -> dict[str, Any]:
    """Writes rows up to a length, half of them held out; returns the keys of a run that learns from them."""
    answers = ["7" * max(1, length - number % 4) for number in range(num_rows)]
    for name, numbers in (("train", range(num_rows // 2)), ("test", range(num_rows // 2, num_rows))):
        rows = [
            {"prompt": "1+1=", "answer": answers[n]}
            if command == "sft"
            else {"prompt": "1+1=", "chosen": answers[n], "rejected": answers[n][1:] + "8"}
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.train": str(folder / "train.jsonl"), "data.test": str(folder / "test.jsonl")}


SUM_SET = {"name": "sums", "samples": 8, "rows": 4, "max_new_tokens": 10, "temperature": 1.0}
OF_SUPERVISED = {
    "sft": {"evaluation": [SUM_SET]},
    "dpo": {},
    "dpo-lora": {"model": {"lora": {"rank": 4}}},
    "reward-model": {},
}


@pytest.mark.parametrize("case", OF_SUPERVISED)
def test_the_rows_of_a_supervised_run_are_below_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    command = case.removesuffix("-lora")
    keys = write_rows(tmp_path, command, length=20, num_rows=16)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    sections = OF_SUPERVISED[case]
    if "evaluation" in sections:
        sections = {"evaluation": [{**SUM_SET, "data": str(tmp_path / "sums.jsonl")}]}
    body = {
        "run": {"output_dir": str(tmp_path / "run"), "iterations": 1, "executor": "in_process"},
        "data": {key.removeprefix("data."): value for key, value in keys.items()},
        "algorithm": {"batch_size": 4},
        "cluster": {"gpus_per_machine": 1},
        **sections,
        "model": {"tokenizer": "characters", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
                  "num_heads": 1, "max_positions": 40, **sections.get("model", {})},
    }  # fmt: skip
    config = parse_config(body, command=command)
    inputs, plan = check_supervised(config, tmp_path / "model")
    exact, loose = (
        estimate_supervised_bytes(
            config, plan, inputs, train=inputs.train, held_out=(inputs.validation, inputs.test), exactly=exactly
        )
        for exactly in (True, False)
    )
    put_bytes: list[int] = []
    put = Executor.put

    def count(self: Executor, batch: Any) -> Any:
        columns = [each.values() if each.is_nested else each for _, each in batch.items()]
        num_jagged = sum(each.is_nested for _, each in batch.items())
        put_bytes.append(sum(each.numel() * each.element_size() for each in columns) + 4 * num_jagged * len(batch))
        return put(self, batch)

    monkeypatch.setattr(Executor, "put", count)
    run_recipe(config, RunDirectory(tmp_path / "run"))
    spans = [
        event["args"] | {"name": event["name"]}
        for event in json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
        if event.get("args", {}).get("bytes_written")
    ]
    held_bytes, is_set = sum(put_bytes[:2]), "evaluation[0]" in exact
    assert len(put_bytes) == 4 if is_set else 3
    of_step, elsewhere = (
        [span["bytes_written"] for span in spans if (span.get("iteration") == 1) == in_step]
        for in_step in (True, False)
    )
    if is_set:
        (generated,) = (size for size in of_step + elsewhere if size > 8 * 4 * 10 * 4)
        of_step, elsewhere = ([size for size in sizes if size != generated] for sizes in (of_step, elsewhere))
        assert 0.7 * exact["evaluation[0]"] < held_bytes + put_bytes[3] + generated <= exact["evaluation[0]"]
    stored = held_bytes + put_bytes[2] + sum(of_step)
    assert 0.7 * exact["iterations"] < stored <= exact["iterations"]
    # The test rows before and after the iteration, and the validation rows: one set at a time, each of 8 rows.
    largest = max(elsewhere) * (1 + (command == "dpo"))
    assert held_bytes + largest == exact["evaluation"]
    assert all(exact[phase] <= loose[phase] < 1.2 * exact[phase] for phase in exact)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_batch_is_free_before_sets_are_evaluated(
    small_config: Path,
    tmp_path: Path,
    hybridflow: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    put, evaluate_due = Executor.put, RunEvaluations.evaluate_due
    refs: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    def remember(self: Executor, batch: Any) -> Any:
        future = put(self, batch)
        refs.append(weakref.ref(future))
        return future

    def look(self: RunEvaluations, *given: Any, **more: Any) -> Any:
        alive.append([ref() is not None for ref in refs])
        return evaluate_due(self, *given, **more)

    monkeypatch.setattr(Executor, "put", remember)
    monkeypatch.setattr(RunEvaluations, "evaluate_due", look)
    if command == "train":
        ended = hybridflow("train", small_config, "--set", "run.iterations=2", "--set", "warm_start.max_steps=0")
    else:
        keys = write_rows(tmp_path, command, length=20, num_rows=16) | {
            "model.tokenizer": "characters", "model.max_positions": 32, "run.executor": "in_process",
            "run.output_dir": str(tmp_path / "run"), "run.iterations": 2, "algorithm.batch_size": 4,
        }  # fmt: skip
        path = tmp_path / "config.toml"
        path.write_text("")
        ended = hybridflow(
            command, path, *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))
        )
    assert ended.exit_code == 0, ended.errors
    # The rows of validation and test stay.
    assert alive == [[True, True, False], [True, True, False, False]]


def test_rows_of_any_columns_have_a_bound() -> None:
    class Images:
        source = "data.train = images.jsonl"
        max_prompt_tokens, max_response_tokens = 3, 5

        def batch(self, indices: Iterable[int]) -> TensorDict:
            rows = list(indices)
            prompts = torch.nested.nested_tensor([torch.zeros(3, dtype=torch.int64)] * len(rows), layout=torch.jagged)
            labels, pixels = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), 3, 8, 8)
            columns = {"prompt_ids": prompts, "label_ids": labels, "pixel_values": pixels}
            return TensorDict(columns, batch_size=[len(rows)])

    data: Any = Images()
    row_bytes = 3 * 8 + 4 + 8 + 3 * 8 * 8 * 4
    assert store_room._measure(data.batch(range(7))) == (7, 7 * row_bytes, 0)
    assert store_room._bound(data, data.batch([0]), 7) == (7, 7 * row_bytes, 0)


def test_held_out_rows_above_the_store_are_said_at_once(
    tmp_path: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 1000
    keys = write_rows(tmp_path, "sft", length=length, num_rows=64)
    keys |= {
        "model.tokenizer": "characters", "model.max_positions": 2048, "training.micro_batch_tokens": 2048,
        "algorithm.batch_size": 2, "run.executor": "ray", "cluster.gpus_per_machine": 2, "data.max_eval_rows": 32,
        "run.output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    path = tmp_path / "config.toml"
    path.write_text('[algorithm]\nname = "sft"\n')
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    # Validation has rows of the training set's file: token ids and mask of both sets, and log-probs of one.
    token_bytes = length * 32 * (2 * (8 + 1) + 4)
    monkeypatch.setattr(supervised, "build_executor", refuse)
    for store_bytes, is_said in ((token_bytes, True), (2 * token_bytes, False)):
        monkeypatch.setattr(store_room, "choose_store_bytes", lambda given, key, size=store_bytes: size)
        started = hybridflow("sft", path, *words)
        assert "nothing starts" in started.errors
        lines = [line for line in started.output.splitlines() if "object store" in line]
        assert bool(lines) == is_said
        if lines:
            assert lines[0].startswith("data.max_eval_rows = 32: the batches take up to 0.7 MiB, more than 80 %")
            assert lines[0].endswith("or lower data.max_eval_rows")
            least = int(lines[0].partition("to at least ")[2].partition(",")[0])
            assert token_bytes < 0.8 * least < 1.1 * token_bytes
            # Without a size in the configuration `plan` does not know the store of the machine that will run it.
            assert "object store" not in hybridflow("plan", path, *words).output
            monkeypatch.setattr(store_room, "_find_store", lambda config, is_here, size=store_bytes: size)
            assert lines[0] in hybridflow("plan", path, *words).output.splitlines()
            monkeypatch.undo()
            monkeypatch.setattr(supervised, "build_executor", refuse)


def test_the_larger_part_of_an_iteration_is_named_first(
    tmp_path: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "build_executor", refuse)
    monkeypatch.setattr(store_room, "choose_store_bytes", lambda given, key: 1)
    path = tmp_path / "config.toml"
    path.write_text('[algorithm]\nname = "dpo"\n')
    keys = write_rows(tmp_path, "dpo", length=20, num_rows=16) | {
        "model.tokenizer": "characters", "model.max_positions": 32, "run.executor": "ray",
        "cluster.gpus_per_machine": 1, "run.output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    for batch_size, first in ((8, "data.max_eval_rows"), (800, "algorithm.batch_size")):
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        started = hybridflow("dpo", path, *words, "--set", f"algorithm.batch_size={batch_size}")
        (line,) = (line for line in started.output.splitlines() if "object store" in line)
        assert line.startswith(f"{first} = ") and line.endswith(f"or lower {first}"), line


@pytest.mark.parametrize("samples", [1, 3, 600])
@pytest.mark.parametrize("num_rows", [1, 5, 513])
def test_the_calls_of_a_set_have_every_row_once(
    num_rows: int, samples: int, small_config: Path, tmp_path: Path
) -> None:
    config = load_config(small_config, ["cluster.gpus_per_machine=1"])
    inputs, plan = check_run(config, tmp_path / "model")
    executor = TracingExecutor()
    group = build_roles(executor, config, plan, inputs, ()).having("generate_sequences")
    calls = list_draws(group, num_rows, SamplingParams(max_new_tokens=1, n=samples))
    assert sum(calls) == num_rows and max(calls) * samples <= max(512, samples)
    assert len(calls) == -(-num_rows // max(1, 512 // samples))


def refuse(config: Any, plan: Any) -> Any:
    raise ConfigError("nothing starts")
