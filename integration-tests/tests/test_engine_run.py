"""PPO with vLLM or SGLang is the run of the embedded engine: same samples, same numbers, resumed or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms.checkpoints import LEDGER, find_commits
from small_runs import Outcome, read_metrics, without_times

SIZES = ("model.hidden_size=64", "model.num_heads=2")
RESUMED = (
    "run.iterations=4", "run.checkpoint_every=2", "run.eval_every=4", "algorithm.name=grpo",
    "rollout.samples_per_prompt=2", "optimizer.actor_learning_rate=1e-3",
    "rollout.options.cache_bytes=16777216",
)  # fmt: skip
KILLER = """
import os, signal, time
from pathlib import Path

def kill(iteration, metrics):
    if iteration == 4 and not (mark := Path(__file__).with_name("killed")).exists():
        for _ in range(6000):  # iteration 2 becomes durable meanwhile
            if Path(__file__).with_name("run").joinpath("steps", "2", "COMMIT").exists():
                break
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""

ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("gen_tp_size", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_is_the_same_with_another_engine(
    small_config: Path,
    hybridflow: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    gen_tp_size: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # ranks import the reward function
    changed = [argument for size in SIZES for argument in ("--set", size)]
    outcome = hybridflow("train", small_config, *changed)
    assert outcome.exit_code == 0, outcome.errors
    expected = without_times(read_metrics(tmp_path / "run"))
    output = tmp_path / engine
    changed += ["--set", f"run.output_dir={output}", "--set", f"rollout.backend={engine}"]
    too_small = ("--set", "rollout.options.cache_bytes=9", "--set", f"run.output_dir={tmp_path / 'refused'}")
    refused = hybridflow("train", small_config, *changed, *too_small)
    assert refused.exit_code == 1 and "cache_bytes=9" in refused.errors, refused.errors
    changed += ["--set", "rollout.options.cache_bytes=16777216"]
    if gen_tp_size == 2:
        plan = json.loads((tmp_path / "run" / "plan.json").read_text())
        actor = plan["models"]["actor"]
        actor.update(train=actor["train"] | {"dp_size": 2}, generation={"gen_pp_size": 1, "gen_tp_size": 2})
        for model in plan["models"].values():
            if model["pool"] == actor["pool"]:
                model["train"] = actor["train"]
        (pool,) = (pool for pool in plan["pools"] if pool["name"] == actor["pool"])
        pool["machines"][0]["slots"] = 2
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        changed += [
            "--set",
            "run.executor=ray",
            "--set",
            "cluster.gpus_per_machine=2",
            "--plan",
            tmp_path / "plan.json",
        ]
    outcome = hybridflow("train", small_config, *changed)
    assert outcome.exit_code == 0, outcome.errors
    found = without_times(read_metrics(output))
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row["rollout/logprob_gap_max"] < 1e-4
        assert row == pytest.approx(wanted, abs=2e-4, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_has_the_same_curves(
    small_config: Path, hybridflow: Callable[..., Outcome], tmp_path: Path, engine: str
) -> None:
    """The third and fourth iteration, which were done before the kill and are done again from the commit."""
    (tmp_path / "killer.py").write_text(KILLER)
    function = ("--set", f"run.on_metrics={tmp_path / 'killer.py'}:kill")
    words = [word for key in (*SIZES, *RESUMED, f"rollout.backend={engine}") for word in ("--set", key)]
    command = [Path(sys.executable).with_name("hybridflow"), "train", small_config, *words, *function]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}  # of its reward
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    run = tmp_path / "run"
    assert find_commits(run)[-1] == 2
    expected, ledger = without_times(read_metrics(run)), (run / LEDGER).read_text()
    assert [row["iteration"] for row in expected] == [1, 2, 3, 4]
    outcome = hybridflow("train", "--resume", run)
    assert outcome.exit_code == 0, outcome.errors
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == [2]
    found = without_times(read_metrics(run))
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    assert found == [pytest.approx(row, abs=2e-4, rel=1e-3) for row in expected]
    assert (run / LEDGER).read_text() == ledger
