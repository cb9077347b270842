"""Safe-RLHF holds its limit on a small text, and its control without a limit does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import constrained_text
import pytest

from hf_algorithms.config import parse_config
from hf_algorithms.data import write_addition_data
from hf_algorithms.run.loop import run_training
from hf_algorithms.run_directory import RunDirectory
from small_runs import read_metrics

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

ITERATIONS = 90


def train(folder: Path, data: Path, **algorithm: Any) -> dict[str, float]:
    """Means of the metrics of a constraint, and of the reward, over the last third of a run."""
    keys = {**constrained_text.SAFE_RLHF_KEYS, **algorithm}
    body = constrained_text.build_constrained_text(data, keys, seed=0, iterations=ITERATIONS)
    body["run"] |= {"output_dir": str(folder), "eval_every": ITERATIONS}
    directory = RunDirectory(folder)
    directory.begin()
    run_training(parse_config(body), directory)
    last = read_metrics(folder)[-ITERATIONS // 3 :]
    names = ("constraint/cost", "constraint/lambda", "constraint/infeasible", "reward/mean")
    return {name: sum(row[name] for row in last) / len(last) for name in names}


def test_safe_rlhf_comes_to_its_limit(tmp_path: Path) -> None:
    limit, data = constrained_text.COST_LIMIT, tmp_path / "data"
    write_addition_data(data, seed=0)
    held = train(tmp_path / "held", data)
    assert held["constraint/cost"] == pytest.approx(limit, abs=0.12)
    assert held["constraint/infeasible"] == 0.0
    assert held["reward/mean"] > 0.4
    free = train(tmp_path / "free", data, cost_limit=2.0)  # no response costs as much
    assert free["constraint/cost"] > limit + 0.25
    assert free["constraint/lambda"] < held["constraint/lambda"]
