"""`make bench-learning`: finished runs are kept by name, none starts late, and its page and pictures can be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_learning
import measurement
import pytest

EXPERIMENTS = {experiment.name: experiment for experiment in bench_learning.EXPERIMENTS}
CURVES = ("eval/validation/exact_match", "constraint/cost", "constraint/lambda")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; what would train says so."""

    def refuse(body: dict[str, Any], folder: Path) -> Path:
        raise AssertionError(f"{folder.name} would train")

    monkeypatch.setattr(bench_learning, "CACHE", tmp_path)
    monkeypatch.setattr(bench_learning, "_train", refuse)
    return tmp_path


def run(name: str, seed: int, iterations: int | None = None, *, starts: bool = True) -> dict[str, Any] | None:
    return bench_learning._run_once(EXPERIMENTS[name], seed, iterations, starts=starts)


def keep(cache: Path, name: str, seed: int, result: dict[str, Any]) -> None:
    body = EXPERIMENTS[name].configure(seed)
    digest = bench_learning._digest(body, bench_learning._find_sources())
    folder = cache / "runs" / f"{name}-{seed}-{digest}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))


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
    found: dict[str, set[str]] = {"addition": set(), "text": set()}
    for experiment in EXPERIMENTS.values():
        with pytest.raises(AssertionError) as warm:
            bench_learning._warm_model(experiment)
        found["text" if experiment.is_constrained else "addition"].add(str(warm.value))
    assert [len(starts) for starts in found.values()] == [1, 1]
    assert found["text"] != found["addition"]


def test_page_and_pictures_are_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, assets = cache / "page.md", cache / "assets"
    assets.mkdir()
    page.write_text(bench_learning.PAGE.read_text())
    for name, value in {"PAGE": page, "ASSETS": assets}.items():
        monkeypatch.setattr(bench_learning, name, value)
    monkeypatch.setattr(measurement, "RESULTS", cache / "results")
    curves = {name: [(1, 0.25), (2, 0.5)] for name in CURVES}
    result = {"before": 0.3, "after": 0.55, "wall_s": 12.0, "curves": curves}
    bench_learning._write({name: [result] * len(bench_learning.SEEDS) for name in EXPERIMENTS})
    text = page.read_text()
    assert "| `grpo` | addition | 3 | 0.300 | 0.550, 0.550 to 0.550 | 12 |" in text
    assert "are not made yet" not in text
    for picture in ("learning-addition.svg", "learning-constrained.svg"):
        assert f"../assets/{picture}" in text
        ElementTree.fromstring((assets / picture).read_text())
