"""Runs of the command with real experiment trackers, in .venv-trackers; they have no network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import Outcome, read_metrics

pytestmark = [pytest.mark.trackers, pytest.mark.timeout(600)]

HOOK = """
import json
def keep(iteration, metrics):
    with open({path!r}, "a") as file:
        file.write(json.dumps([iteration, metrics["reward/mean"]]) + "\\n")
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of the trackers, and no account."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_training_run_is_followed(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = small_config.parent
    (folder / "hooks.py").write_text(HOOK.format(path=str(folder / "kept.jsonl")))
    settings = ('run.trackers=["tensorboard", "wandb"]', "run.on_metrics=hooks.py:keep")
    outcome = hybridflow("train", small_config, *(word for each in settings for word in ("--set", each)))
    assert outcome.exit_code == 0, outcome.errors
    assert outcome.output.count("wandb: the run is kept offline, because no API key was found") == 1
    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    rows = read_metrics(folder / "run")
    for name in ("reward/mean", "actor/policy_loss", "time/iteration_s", "perf/tokens_per_s"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(row["iteration"], pytest.approx(row[name], rel=1e-5)) for row in rows]
    kept = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    assert kept == [[row["iteration"], row["reward/mean"]] for row in rows]


def test_a_signal_ends_the_run_at_the_trackers(small_config: Path) -> None:
    from mlflow import MlflowClient

    command = [str(Path(sys.executable).with_name("hybridflow")), "train", str(small_config)]
    settings = ('run.trackers=["mlflow"]', "run.iterations=1000000", "run.eval_every=1000000")
    command += [word for each in settings for word in ("--set", each)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        metrics, end_s = small_config.parent / "run" / "metrics.jsonl", time.monotonic() + 400
        while program.poll() is None and time.monotonic() < end_s and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.2)
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate(timeout=100)
    finally:
        program.kill()
    assert program.returncode == 143, output
    client = MlflowClient()
    experiment = client.get_experiment_by_name("hybridflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["summary.status"]) == ("run", "KILLED", "interrupted")
    assert client.get_metric_history(run.info.run_id, "reward/mean")[0].step == 1
