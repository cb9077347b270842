"""The simulators against a run of this project: calibrated on one run, compared with another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_mapper import read_stages, validate_trace
from hf_mapper.cli import main
from small_runs import Outcome

STAGES = [
    ("actor.generate_sequences", "transition"),
    ("actor.generate_sequences", "generation"),
    ("actor.compute_logprobs", "inference"),
    ("critic.compute_values", "inference"),
    ("reference.compute_ref_logprobs", "inference"),
    ("critic.update_critic", "training"),
    ("actor.update_actor", "training"),
]


@pytest.fixture
def traces(small_config: Path, hybridflow: Callable[..., Outcome]) -> tuple[Path, Path]:
    """A profile run, and one of another seed and batch."""
    found = []
    for name, changes in (("profile", ()), ("other", ("run.seed=1", "rollout.batch_size=16"))):
        run = small_config.parent / name
        overrides = ("run.iterations=4", "run.eval_every=4", f"run.output_dir={run}", *changes)
        outcome = hybridflow("train", small_config, *(word for each in overrides for word in ("--set", each)))
        assert outcome.exit_code == 0, outcome.errors
        found.append(run / "trace.json")
    return found[0], found[1]


def hf_mapper(*arguments: object) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_calibrate_on_one_run_and_validate_on_another(traces: tuple[Path, Path]) -> None:
    profile, other = traces
    constants = profile.parent / "cpu.json"
    hf_mapper("calibrate", "--trace", profile, "--output", constants)
    stages = json.loads(hf_mapper("validate", "--trace", other, "--constants", constants, "--json"))["stages"]
    assert [(f"{stage['role']}.{stage['method']}", stage["phase"]) for stage in stages] == STAGES
    assert [stage["measured_s"] for stage in stages] == [case.measured for case in read_stages(other)]
    assert [case.workload.global_batch for case in read_stages(other)] == [16] * len(STAGES)
    for stage in stages:
        assert stage["measured_s"] > 0
        assert stage["error"] == pytest.approx(stage["predicted_s"] / stage["measured_s"] - 1)
        # one rank receives nothing from another; everything else is predicted to take its time
        assert (stage["predicted_s"] > 0) is (stage["phase"] != "transition")
    # a fit is at least as close to what it was fitted on as the constants of an ordinary core
    fitted = json.loads(hf_mapper("validate", "--trace", profile, "--constants", constants, "--json"))["stages"]
    ordinary = validate_trace(profile)
    assert distance((stage["predicted_s"], stage["measured_s"]) for stage in fitted) <= distance(
        (stage.predicted_s, stage.measured_s) for stage in ordinary
    )


def distance(times: Iterable[tuple[float, float]]) -> float:
    """Mean of abs(log(predicted / measured)), of what is predicted to take time."""
    logs = [abs(math.log(predicted / measured)) for predicted, measured in times if predicted > 0]
    return sum(logs) / len(logs)
