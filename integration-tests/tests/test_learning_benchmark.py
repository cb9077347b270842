"""`make bench-learning`: finished runs are kept by name, none starts late, and its page and pictures can be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_learning
import learning_page
import measurement
import pytest
from learning_experiments import SEPARATIONS, Experiment

EXPERIMENTS = {experiment.name: experiment for experiment in bench_learning.ALL}
LENGTHS = ([2.0] * 5 + [4.0] * 3 + [6.0] * 3, [3.0] * 12)
PARITY = next(each for each in SEPARATIONS if each.task == "parity")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; what would train says so."""

    def refuse(body: dict[str, Any], folder: Path) -> Path:
        raise AssertionError(f"{folder.name} would train")

    monkeypatch.setattr(bench_learning, "CACHE", tmp_path)
    monkeypatch.setattr(bench_learning, "_train", refuse)
    bench_learning._write_data()
    return tmp_path


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the page, which is written next to its pictures."""
    page = tmp_path / "page.md"
    page.write_text(learning_page.PAGE.read_text())
    monkeypatch.setattr(learning_page, "PAGE", page)
    monkeypatch.setattr(learning_page, "ASSETS", tmp_path / "curves")
    monkeypatch.setattr(measurement, "RESULTS", tmp_path / "results")
    return page


def run(name: str, seed: int, iterations: int | None = None, *, starts: bool = True) -> dict[str, Any] | None:
    return bench_learning._run_once(EXPERIMENTS[name], seed, iterations, starts=starts)


def keep(cache: Path, name: str, seed: int, result: dict[str, Any]) -> None:
    experiment = EXPERIMENTS[name]
    body = bench_learning._configure(experiment, seed)
    digest = bench_learning._digest(body, bench_learning._find_sources(experiment))
    folder = cache / "runs" / f"{name}-{seed}-{digest}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))


def make_result(experiment: Experiment, value: float = 0.5) -> dict[str, Any]:
    curves = {name: [(1, value / 2), (2, value)] for name in experiment.curves}
    return {"before": 0.3, "after": 0.55, "cpu_s": 12.0, "curves": curves}


def test_a_finished_run_is_not_run_again(cache: Path) -> None:
    keep(cache, "grpo", 1, {"after": 0.5})
    assert run("grpo", 1) == {"after": 0.5}
    with pytest.raises(AssertionError, match=r"^warm-\w{12} would train$"):
        run("grpo", 2)
    with pytest.raises(AssertionError, match="would train"):
        run("grpo", 1, 5)  # a smoke has a name of its own


def test_no_run_starts_late(cache: Path) -> None:
    assert run("grpo", 0, starts=False) is None
    keep(cache, "grpo", 0, {"after": 0.5})
    assert run("grpo", 0, starts=False) == {"after": 0.5}


def test_runs_of_one_task_start_from_one_file(cache: Path) -> None:
    found: dict[str, set[str]] = {}
    for experiment in EXPERIMENTS.values():
        with pytest.raises(AssertionError) as warm:
            bench_learning._warm_model(experiment)
        found.setdefault(experiment.task, set()).add(str(warm.value))
    assert all(len(starts) == 1 for starts in found.values())
    assert found["constrained"] != found["addition"]


def test_experiments_have_names_of_their_own() -> None:
    assert len(EXPERIMENTS) == len(bench_learning.ALL)


def test_page_and_pictures_are_written(page: Path) -> None:
    results = {name: {seed: make_result(each) for seed in range(3)} for name, each in EXPERIMENTS.items()}
    learning_page.write_page(results)
    text = page.read_text()
    assert "| `grpo` | addition | 3 | 0.300 | 0.550, 0.550 to 0.550 | 12 | 3 of 3 |" in text
    assert "| length of wrong responses | at least 2 under `grpo`, at most 1.5 under `dr_grpo` | `grpo` 1.33 (" in text
    assert "are not made yet" not in text
    pictures = {path.stem for path in (page.parent / "curves").iterdir()}
    assert pictures >= {"addition", "ppo", "safe_rlhf", "dr_grpo", "maxrl", *(each.task for each in SEPARATIONS)}
    for name in pictures:
        ElementTree.fromstring((page.parent / "curves" / f"{name}.svg").read_text())


def test_the_page_can_be_written_from_some_runs(page: Path) -> None:
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in EXPERIMENTS}
    results["grpo"][0] = make_result(EXPERIMENTS["grpo"])
    learning_page.write_page(results)
    text = page.read_text()
    assert "| `grpo` | addition | 1 |" in text
    assert "| `ppo` | addition | 0 | - | - | - | - |" in text
    assert {path.stem for path in (page.parent / "curves").iterdir()} == {"addition", "grpo"}


def test_a_task_is_judged_by_means_over_seeds_that_all_have() -> None:
    grpo, dr_grpo = ({"curves": {"wrong/tokens": [(n, value) for n, value in enumerate(row)]}} for row in LENGTHS)
    found = [{0: grpo, 1: grpo, 2: dr_grpo}, {0: dr_grpo, 2: dr_grpo}]
    assert PARITY.measure_all(found) == [[pytest.approx(3.0), pytest.approx(1.0)], [pytest.approx(1.0)] * 2]
    assert PARITY.judge(found) is True  # 2 and 1
    assert PARITY.judge([{0: dr_grpo}, {0: grpo}]) is False
    assert PARITY.judge([{0: grpo}, {1: dr_grpo}]) is None


@pytest.mark.parametrize(
    ("cost", "smallest", "passes"), [(0.315, 0.30, True), (0.285, 0.30, True), (0.325, 0.30, False), (0.3, 0.25, False)]
)
def test_safe_rlhf_passes_if_cost_and_lambda_settle(cost: float, smallest: float, passes: bool) -> None:
    rising = [smallest + (0.32 - smallest) * place / 7 for place in range(8)]
    lambdas = [1.0] * 24 + rising  # the last quarter
    curves = {"constraint/cost": [0.0] * 24 + [cost] * 8, "constraint/lambda": lambdas}
    result = {"curves": {name: list(enumerate(values)) for name, values in curves.items()}}
    assert EXPERIMENTS["safe_rlhf"].judge(result) == (pytest.approx(cost), passes)
