"""Training from Python: the page's cells, every kind of argument, and what is refused."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import hf_algorithms
from hf_protocols import ConfigError, DataError, HybridFlowError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "from-python.md"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
TINY = {"tokenizer": "characters", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1,
        "max_positions": 16}  # fmt: skip
SMALL = {"training.shard": "root", "run.iterations": 1, "run.eval_every": 1, "rollout.batch_size": 4,
         "rollout.max_new_tokens": 3}  # fmt: skip


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with the name that IPython defines while it runs a cell."""
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_runs_cell_by_cell(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(cells) == 5
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), names)
    first, second, third = (names[name] for name in ("tuned", "result", "preferred"))
    assert [each.run_dir for each in (first, second, third)] == [
        notebook / "runs" / f"{name}-1" for name in ("sft", "train", "dpo")
    ]
    assert first.summary["score_after"] < first.summary["score_before"]
    assert [row["iteration"] for row in second.metrics] == [1, 2]
    assert all((each.model_dir / "config.json").is_file() for each in (first, second, third))
    assert Path("loop-model/config.json").is_file() and names["rewards"].shape == (8, 4)
    assert str(first.model_dir) in (printed := capsys.readouterr().out) and "4 64 final" in printed


def test_an_error_leaves_the_kernel_usable_and_no_files(notebook: Path) -> None:
    def fail(completions: list[str], **_: Any) -> list[float]:
        raise ValueError("on purpose")

    with pytest.raises(HybridFlowError, match="on purpose"):
        hf_algorithms.train(TINY, ROWS, fail, set=SMALL)
    with pytest.raises(ConfigError, match=r"unknown key 'run\.sede'"):
        hf_algorithms.train(TINY, ROWS, len, set=SMALL | {"run.sede": 1}, output_dir="refused")
    assert not Path("refused").exists() and not Path("refused.inputs").exists()
    lengths = {"short": lambda completions, **_: [-1.0] * len(completions), "none": "small_runs:nothing"}
    result = hf_algorithms.train(TINY, {"train": ROWS, "test": ROWS[:2]}, lengths, set=SMALL, output_dir="run")
    assert {name for name in result.metrics[0] if name.startswith("reward/")} >= {"reward/short/mean"}
    again = hf_algorithms.train(config="run/config.toml", set={"run.output_dir": "again"})
    assert again.metrics[0]["reward/mean"] == result.metrics[0]["reward/mean"] == -1.0
    lengths["short"] = lambda completions, **_: [-2.0] * len(completions)
    keys = SMALL | {"reward.processes": 0}  # this process calls it, and has called the one before
    other = hf_algorithms.train(TINY, ROWS, lengths, set=keys, output_dir="run", overwrite=True)
    assert other.metrics[0]["reward/mean"] == -2.0
    replaced = hf_algorithms.train(config="run/config.toml", reward=lengths["short"], set=keys, output_dir="third")
    assert replaced.metrics[0]["reward/mean"] == -2.0, "of both functions of the file none is left"
    with pytest.raises(ConfigError, match=r"model = 5: is not a path or a hub name"):
        hf_algorithms.evaluate(5, data=ROWS, metrics="exact_match")


def test_a_function_that_cannot_be_pickled_runs_here(notebook: Path) -> None:
    lock, seen = threading.Lock(), []

    def held(completions: list[str], **_: Any) -> list[float]:
        with lock:
            seen.append(os.getpid())
        return [0.5] * len(completions)

    result = hf_algorithms.train(TINY, ROWS, held, set=SMALL)
    assert result.metrics[0]["reward/mean"] == 0.5 and set(seen) == {os.getpid()}
    with pytest.raises(ConfigError, match=r"reward 'reward': cannot be pickled for workers on Ray \(TypeError"):
        hf_algorithms.train(TINY, ROWS, held, set=SMALL | {"run.executor": "ray"})


def generate() -> Iterator[dict[str, str]]:
    yield from ROWS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dataset": generate()},
            "dataset 'train': is of type generator, which has no length, and rows are read",
        ),
        ({"dataset": [1]}, "dataset 'train', row 1: is of type int, not a mapping of columns to values"),
        (
            {"dataset": [{"prompt": "1", "answer": b"1"}]},
            "dataset 'train', row 1: column 'answer': Object of type bytes is not JSON",
        ),
        ({"dataset": []}, "dataset 'train': is empty. Pass at least one row"),
        (
            {"dataset": [[{"role": "user", "content": "1+1="}]]},
            "dataset 'train', row 1: is a chat alone. Pass it as {\"messages\": [...]}",
        ),
        ({"dataset": {"rows": ROWS}}, "dataset: a mapping with the keys rows. Pass rows as a list"),
        ({"reward": 3}, "reward = 3: is not a function"),
        ({"reward": []}, "reward = []: is empty. Pass a function"),
        ({"model": None}, "model is missing. Pass a directory or a hub name"),
        ({"dataset": None}, "dataset is missing. Pass rows or a path"),
        ({"dataset": None, "config": {}}, "dataset is missing. Pass rows or a path, or set data.train in config"),
        ({"on_metrics": 5}, "on_metrics = 5: is not a function of an iteration and its metrics"),
        ({"config": 3}, "config = 3: is not a path or a mapping of sections"),
        ({"model": object}, "model = <class 'object'>: is not a path, a hub name or the keys of [model]"),
        ({"algorithm": 5}, "algorithm = 5: is not a name"),
        ({"set": ["run.seed=1"]}, "set = ['run.seed=1']: is not a mapping of section.key to values"),
        ({"output_dir": 5}, "output_dir = 5: is not a path"),
        ({"config": {"run": 3}}, "config: run = 3: is not a section"),
        ({"set": {"seed": 1}}, "set: 'seed' is not section.key"),
    ],
)
def test_wrong_arguments_are_one_line(notebook: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as refused:
        hf_algorithms.train(**{"model": TINY, "dataset": ROWS, **arguments})
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert list(notebook.iterdir()) == []


def test_a_dataset_of_datasets_is_rows(notebook: Path) -> None:
    result = hf_algorithms.sft(TINY, datasets.Dataset.from_list(ROWS), set={
        "training.shard": "root", "run.iterations": 1, "algorithm.batch_size": 8})  # fmt: skip
    assert result.summary["rows"] == 8


def test_importing_the_functions_loads_no_torch() -> None:
    program = "import hf_algorithms, sys; hf_algorithms.train; print('torch' in sys.modules, 'ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["False", "False"]


def test_functions_of_one_name_all_count(notebook: Path) -> None:
    def make(value: float) -> Any:
        def score(completions: list[str], **_: Any) -> list[float]:
            return [value] * len(completions)

        return score

    result = hf_algorithms.train(TINY, ROWS, [make(1.0), make(2.0)], set=SMALL)
    row = result.metrics[0]
    assert (row["reward/score/mean"], row["reward/score_2/mean"], row["reward/mean"]) == (1.0, 2.0, 3.0)


def score_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def test_generate_and_evaluate_take_rows_and_callables(notebook: Path) -> None:
    tuned = hf_algorithms.sft(
        TINY, ROWS, set={"training.shard": "root", "run.iterations": 1, "algorithm.batch_size": 8}
    )
    model, lock = tuned.model_dir, threading.Lock()

    def held(completions: list[str], **_: Any) -> list[float]:
        with lock:
            return [0.25] * len(completions)

    with pytest.raises(
        ConfigError, match=r"data: is one mapping, with the keys train, test\. Pass the rows of one set"
    ):
        hf_algorithms.generate(model, data={"train": ROWS, "test": ROWS}, output="texts.jsonl")
    written = hf_algorithms.generate(model, data=["1+1=", "2+2="], output="texts.jsonl", max_new_tokens=3)
    assert written.rows == 2 and '"prompt": "1+1="' in Path("texts.jsonl").read_text()
    sets = {"all": datasets.Dataset.from_list(ROWS), "some": ROWS[:3]}
    for _ in range(2):
        metrics = [score_length, "exact_match", lambda completions, **_: [0.5] * len(completions)]
        scores = hf_algorithms.evaluate(model, data=sets, metrics=metrics, max_new_tokens=3)
        assert {name: each.rows for name, each in scores.sets.items()} == {"all": 8, "some": 3}
        assert set(scores.sets["some"].metrics) == {"score_length", "exact_match", "function_3"}
        assert scores.metrics[1]["eval/some/function_3"] == 0.5
    scores = hf_algorithms.evaluate(model, data=ROWS, metrics={"quarter": held}, max_new_tokens=3)
    assert scores.metrics == [{"set": "data", "eval/data/quarter": 0.25}]
    for arguments, message in (
        ({"data": generate()}, "data: is of type generator, which has no length"),
        ({"data": []}, "data: is empty. Pass at least one row"),
        ({"data": {}}, "data: is an empty mapping. Pass rows as a list of mappings"),
        (
            {"data": {"prompt": ["1+1="], "answer": ["2"]}},
            "data: is a mapping of the columns prompt, answer. Pass rows as a list of mappings",
        ),
        ({"data": {"mine": [1]}}, "data 'mine', row 1: is of type int"),
        ({"data": {"../mine": ROWS}}, "data '../mine': the name '../mine' must consist of letters"),
        ({"metrics": [3]}, "metric 'function_1' = 3: is not a function"),
        ({"metrics": 3}, "metrics = 3: is not a function"),
        ({"metrics": {"a b": held}}, "the name 'a b' must consist of letters"),
        ({"temperature": "hot"}, "temperature = 'hot': is not a number"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    ):
        with pytest.raises((ConfigError, DataError)) as refused:
            hf_algorithms.evaluate(model, **{"data": ROWS, "metrics": ["exact_match"], **arguments})
        assert message in str(refused.value) and "\n" not in str(refused.value)


class Frame:
    """Has what a data frame has, whose iteration yields the names of columns."""

    columns = ("prompt", "answer")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        return []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Frame(), "is a data frame. Pass its to_dict('records')"),
        ({"1+1="}, "is of type set. Pass a list of mappings, or a path"),
        (b"1+1=", "is of type bytes. Pass"),
        (5, "is of type int. Pass"),
        (iter(ROWS), "is of type list_iterator, which has no length"),
    ],
)
def test_what_is_not_a_list_of_rows_is_refused(notebook: Path, rows: Any, message: str) -> None:
    """Iterated, a frame or a mapping would have passed its names for prompts."""
    for call in (hf_algorithms.train, hf_algorithms.sft, hf_algorithms.dpo, hf_algorithms.reward_model):
        with pytest.raises(ConfigError, match=f"dataset 'train': {re.escape(message)}"):
            call(TINY, rows, set=SMALL)
    assert not list(notebook.iterdir())


def test_values_of_other_kinds_are_refused(notebook: Path) -> None:
    """Before anything is read or made."""
    model = "no-model"
    cases: list[tuple[str, Any]] = [
        ("output, output_dir: neither is given", lambda: hf_algorithms.generate(model, data=ROWS)),
        ("output=5. Use a path", lambda: hf_algorithms.generate(model, data=ROWS, output=5)),  # type: ignore[arg-type]
        ("output_dir=5. Use a path", lambda: hf_algorithms.export(model, output_dir=5)),  # type: ignore[arg-type]
        ("output_dir=5. Use a path", lambda: hf_algorithms.evaluate(model, data=ROWS, output_dir=5)),  # type: ignore[arg-type]
        ("merge='no'. Use True or False", lambda: hf_algorithms.export(model, output_dir="o", merge="no")),  # type: ignore[arg-type]
        ("overwrite = 'no': is not True or False", lambda: hf_algorithms.train(TINY, ROWS, len, overwrite="no")),  # type: ignore[arg-type]
        ("config: cannot pickle", lambda: hf_algorithms.train(config={"run": {"seed": threading.Lock()}})),
        ("model: has the keys hiden_size. Give path", lambda: hf_algorithms.train({"hiden_size": 3}, ROWS, len)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(ConfigError, match=re.escape(message)):
            call()
    assert not list(notebook.iterdir())


def test_numbers_of_numpy_and_paths_are_values(notebook: Path) -> None:
    rate = np.logspace(-4, -3, 2, dtype=np.float32)[0]
    keys = {**SMALL, "run.iterations": np.int64(1), "algorithm.whiten": np.bool_(False), "optimizer.betas": (rate, 0.5)}
    given: dict[str, Any] = {"run": {"output_dir": Path("run"), "seed": np.array(3)}}
    result = hf_algorithms.train(TINY, ROWS, lambda completions, **_: [1.0] * len(completions), config=given, set=keys)
    assert result.run_dir == notebook / "run" and len(result.metrics) == 1
    written = tomllib.loads((result.run_dir / "config.toml").read_text())
    assert written["run"]["seed"] == 3 and written["optimizer"]["betas"] == [float(rate), 0.5]
    assert written["algorithm"]["whiten"] is False
    resumed = hf_algorithms.train(resume=result.run_dir, set={"run.iterations": np.int64(2)})
    assert len(resumed.metrics) == 2
    keys = {"rollout.max_new_tokens": np.int64(2)}
    assert hf_algorithms.generate(result, data=ROWS[:1], set=keys, output=Path("texts.jsonl"))


@pytest.mark.parametrize(
    "value", [np.array([3]), np.mean, np.add, np.timedelta64(3, "ns"), np.array(None), torch.tensor(3), 3j]
)
def test_other_things_are_refused_as_they_are(notebook: Path, value: Any) -> None:
    of_type = rf"^run\.seed = .*: is of type {type(value).__name__}, which TOML does not have"
    for given in ({"set": SMALL | {"run.seed": value}}, {"config": {"run": {"seed": value}}}):
        with pytest.raises(ConfigError, match=of_type):
            hf_algorithms.train(TINY, ROWS, len, **given)
    with pytest.raises(ConfigError, match=r"^output_dir = .*: is not a path"):
        hf_algorithms.train(TINY, ROWS, len, set=SMALL | {"run.output_dir": value})
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    with pytest.raises(ConfigError, match=r"nest deeper than 32 levels\. Flatten them"):
        hf_algorithms.train(TINY, ROWS, len, set=SMALL | {"run.seed": nested})


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("run.output_dir", {"output_dir": "p"}),
        ("run.on_metrics", {"on_metrics": print}),
        ("reward.function", {"reward": len}),
        ("data.train", {}),
    ],
)
def test_a_value_is_given_once(notebook: Path, key: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given), 'dataset')}, and set '{key}': both are given"):
        hf_algorithms.train(TINY, ROWS, **given, set={**SMALL, key: "x:y"})
    assert not list(notebook.iterdir())


def test_refused_rows_are_named_as_they_were_passed(notebook: Path) -> None:
    half = [{"prompt": "1\ud800", "answer": "1"}]
    with pytest.raises(DataError, match=r"^dataset 'train', row 1: has '\\ud800', half of a character"):
        hf_algorithms.train(TINY, half, len, set=SMALL)
    empty = [*ROWS, {"prompt": "", "answer": "1"}]
    with pytest.raises(HybridFlowError, match=r"^dataset 'train', row 9: no token stands before its answer"):
        hf_algorithms.sft(TINY, empty, set={"training.shard": "root"})
    with pytest.raises(HybridFlowError) as refused:
        hf_algorithms.train(TINY, empty, {"mine": int}, set=SMALL)
    assert "reward 'mine' is a class" in str(refused.value) and "dataset 'train', row 9: " in str(refused.value)
    assert "inputs" not in str(refused.value)
    assert not list(notebook.iterdir())


def test_prompts_alone_are_evaluated_by_the_reward(notebook: Path) -> None:
    """They have no answers, which the usual metric compares with."""

    def digits(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(str.isdigit, text))) for text in completions]

    prompts = [row["prompt"] for row in ROWS]
    result = hf_algorithms.train(TINY, prompts, digits, algorithm="grpo", set=SMALL | {"rollout.samples_per_prompt": 2})
    assert result.summary["score_after"] > 0
    with pytest.raises((ConfigError, DataError), match="no row has an answer"):
        hf_algorithms.train(TINY, prompts, digits, set=SMALL | {"reward.metric": "exact_match"})
    score = hf_algorithms.evaluate(result, data={"two": prompts[:2]}, metrics=digits)
    assert score.run_dir == result.run_dir and score.metrics[0]["set"] == "two"


def test_functions_and_rows_are_values_of_a_configuration(notebook: Path) -> None:
    lock = threading.Lock()

    def held(completions: list[str], **_: Any) -> list[float]:
        with lock:
            return [0.25] * len(completions)

    half: Any = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    sets = [{"name": "mine", "data": ROWS[:2], "metrics": [score_length, "exact_match", half]}]
    config = {"reward": {"metric": held}, "evaluation": sets}
    result = hf_algorithms.train(TINY, ROWS, score_length, config=config, set=SMALL)
    found = {name: value for name, value in result.metrics[-1].items() if name.startswith("eval/mine/")}
    assert found.keys() == {"eval/mine/score_length", "eval/mine/exact_match", "eval/mine/function_3"}
    assert found["eval/mine/function_3"] == 0.5 and result.summary["score_after"] == 0.25
    assert result.metrics[-1]["reward/score_length/mean"] == result.metrics[-1]["reward/mean"]
    assert sets[0]["data"] == ROWS[:2], "what was passed stays as it was"
    for change, message in (
        ({"data": []}, r"evaluation\[0\]\.data: is empty"),
        ({"data": [{"prompt": "", "answer": "1"}]}, r"^evaluation\[0\]\.data, row 1: its prompt has no tokens"),
        ({"metrics": [int]}, r"is a class"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            hf_algorithms.train(TINY, ROWS, score_length, config={"evaluation": [sets[0] | change]}, set=SMALL)
    with pytest.raises(ConfigError, match=r"metric 'held': cannot be pickled for workers on Ray"):
        hf_algorithms.train(TINY, ROWS, score_length, config=config, set=SMALL | {"run.executor": "ray"})
