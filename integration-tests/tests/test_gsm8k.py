"""The GSM8K example on real questions, cut to seconds; its whole run is recorded in the documentation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import Outcome, read_metrics, read_samples

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
SHORT = {
    "run.iterations": 2,
    "run.executor": "in_process",
    "cluster.gpus_per_machine": 1,
    "warm_start.max_steps": 2,
    "warm_start.eval_every": 2,
    "warm_start.batch_size": 4,
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 24,
    "data.max_eval_rows": 8,
    "data.train": GSM8K,
}


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K does not lie next to the repository")
def test_the_example_runs_on_real_questions(tmp_path: Path, hybridflow: Callable[..., Outcome]) -> None:
    overrides = {**SHORT, "run.output_dir": tmp_path / "run"}
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    outcome = hybridflow("train", ROOT / "examples" / "gsm8k_ppo.toml", *words)
    assert outcome.exit_code == 0, outcome.errors
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 2
    assert all(0 <= row["reward/mean"] <= 1 and row["response/tokens"] <= 24 for row in metrics)
    samples = read_samples(tmp_path / "run", 2)
    assert len(samples) == 8
    lengths = {len(sample["prompt"]) for sample in samples}
    assert len(lengths) > 4, "the questions are ragged"
