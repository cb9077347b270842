"""A run that goes on by itself after a failure: from its last commit, as often as it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms.checkpoints import LEDGER, count_ledger
from small_runs import Outcome, read_metrics, without_times

RECIPE = """
import dataclasses, os, signal, time
from pathlib import Path

from hf_algorithms.recipes import RECIPES
from hf_algorithms.workers import AdvantageWorker
from hf_protocols import FROM_ARGUMENT, RANK_ZERO, register


class Failing(AdvantageWorker):
    @register(protocol=RANK_ZERO, reads=("response_mask",), writes=FROM_ARGUMENT)
    def compute_advantages(self, batch, estimator):
        calls = Path({calls!r})
        with calls.open("a") as file:
            file.write("x")
        number = calls.stat().st_size
        if number in {failing}:
            commit = Path({run!r}, "steps", str({failing}[number]), "COMMIT")
            for _ in range(6000):  # it becomes durable meanwhile
                if commit.exists() or {failing}[number] is None:
                    break
                time.sleep(0.01)
            {act}
        return super().compute_advantages(batch, estimator)


GRPO = RECIPES["grpo"]
ROLES = tuple(dataclasses.replace(role, worker=Failing) if role.name == "advantage" else role for role in GRPO.roles)
FAILING = dataclasses.replace(GRPO, roles=ROLES)
"""
KEYS = ("run.checkpoint_every=1", "run.iterations=4", "run.eval_every=2", "rollout.samples_per_prompt=2",
        "warm_start.max_steps=0")  # fmt: skip
RAISE = 'raise RuntimeError("the device is lost")'


def write_recipe(small_config: Path, name: str, act: str, failing: dict[int, int | None]) -> tuple[str, ...]:
    """Writes a recipe whose calls of one method fail; returns the words that choose it.

    Args:
        small_config: it lies next to this file.
        name: of the recipe's file, and of the run's directory.
        act: statement that fails.
        failing: commits that are durable then, by the numbers of the calls.
    """
    calls, run = str(small_config.with_name(f"{name}.calls")), str(small_config.with_name(name))
    small_config.with_name(f"{name}.py").write_text(RECIPE.format(calls=calls, run=run, failing=failing, act=act))
    keys = (*KEYS, f"algorithm.recipe={name}.py:FAILING", f"run.output_dir={run}")
    return tuple(word for key in keys for word in ("--set", key))


@pytest.mark.slow
def test_an_iteration_that_fails_twice_ends_the_run(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    """Calls 1, 4 and 5 fail: iteration 1 before any commit, and iteration 3 after the commit of iteration 2, twice."""
    run, whole = (small_config.with_name(name) for name in ("failing", "whole"))
    ended = hybridflow("train", small_config, *write_recipe(small_config, "failing", RAISE, {1: None, 4: 2, 5: 2}))
    assert ended.exit_code == 1
    (message,) = [line for line in ended.errors.splitlines() if line.startswith("Error: ")]
    failure = "advantage.compute_advantages on rank 0 failed: RuntimeError: the device is lost"
    assert message == f"Error: {failure}" and "iteration 3 failed twice, so that the run is not" in ended.errors
    restarts = [line for line in ended.output.splitlines() if ". Restart " in line]
    assert restarts == [
        f"{failure}. Restart 1 of run.max_restarts = 2: the run starts again: nothing is committed",
        f"{failure}. Restart 2 of run.max_restarts = 2: the run goes on after iteration 2",
    ]
    assert [line for line in ended.output.splitlines() if "--resume" in line] == [
        f"hybridflow train --resume {run} goes on after iteration 2"
    ]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["last_commit"]) == ("failed", 2, 2)
    assert [path.relative_to(run / "replay").as_posix() for path in (run / "replay").glob("*/*/*")] == [
        "3/advantage/rank-0"
    ]
    replay = f"hybridflow replay {run} --iteration 3"
    assert f"{replay} --role advantage --rank 0 runs this call again" in ended.errors
    assert f"{replay} with --role advantage --rank 0 runs one again" in ended.errors
    again = hybridflow("replay", run, "--iteration", "3", "--role", "advantage")
    assert again.exit_code == 0 and "compute_advantages of rank 0 in iteration 3: 16 rows, of a role" in again.output
    assert "returned 16 rows with advantages" in again.output
    assert hybridflow("train", "--resume", run).exit_code == 0
    assert hybridflow("train", small_config, *write_recipe(small_config, "whole", RAISE, {})).exit_code == 0
    assert without_times(read_metrics(run)) == without_times(read_metrics(whole))
    assert (run / LEDGER).read_text() == (whole / LEDGER).read_text()
    assert (run / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    summaries = [json.loads((each / "summary.json").read_text()) for each in (run, whole)]
    assert [each["restarts"] for each in summaries] == [2, 0]


def test_a_run_on_ray_goes_on_after_a_killed_worker(
    small_config: Path, hybridflow: Callable[..., Outcome], cluster_address: str
) -> None:
    words = write_recipe(small_config, "killed", "os.kill(os.getpid(), signal.SIGKILL)", {3: 2})
    on_ray = ("--set", "run.executor=ray", "--set", f"cluster.address={cluster_address}")
    ended = hybridflow("train", small_config, *words, *on_ray)
    assert ended.exit_code == 0, ended.errors
    run = small_config.with_name("killed")
    assert [row["iteration"] for row in read_metrics(run)] == [1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["last_commit"]) == ("finished", 1, 4)
    assert summary["resumed_from"] == [2]
    assert summary["ledger"] == count_ledger(run / LEDGER)
    (line,) = [line for line in ended.output.splitlines() if ". Restart " in line]
    assert "process reward+advantage/0 is gone" in line and line.endswith("the run goes on after iteration 2")
