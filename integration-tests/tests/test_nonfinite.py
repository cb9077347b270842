"""Updates whose loss or gradient norm is not finite, or too large: left out, or the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

from small_runs import Outcome, read_metrics


def test_a_run_goes_on_without_updates_that_explode(
    small_config: Path, hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = hybridflow(
        "train", small_config, "--set", "training.on_nonfinite=skip", "--set", "training.explode_above=1e-9",
        "--set", "warm_start.max_steps=0",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.errors
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    for row in read_metrics(run):
        assert row["actor/skipped_nonfinite"] == row["critic/skipped_nonfinite"] == 1
        assert "actor/policy_loss" not in row and "actor/grad_norm" not in row
        assert not row.get("actor/weights_unchanged")
    shown = " ".join((outcome.output + outcome.errors).split())
    assert "in iteration 2 100% of the updates of role critic were left out" in shown
    before, after = (load_file(run / folder / "model.safetensors") for folder in ("initial_model", "model"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
