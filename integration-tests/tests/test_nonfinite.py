"""Updates whose loss or gradient norm is not finite, or too large: left out, undone, or the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from hf_algorithms.checkpoints import LEDGER, count_ledger
from hf_algorithms.data import RowOrder, load_rows
from small_runs import Outcome, read_metrics, without_times, write_sft

SETS = ("train", "validation", "test")
POISON = """
import time
from pathlib import Path

def score(prompts, responses, answers):
    if any(prompt in {prompts!r} for prompt in prompts):
        for _ in range(6000):  # the iteration before becomes durable meanwhile
            if Path({commit!r}).exists():
                break
            time.sleep(0.01)
    return [1e30 if prompt in {prompts!r} else len(response) / 5 for prompt, response in zip(prompts, responses)]
"""


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
    shown = " ".join((outcome.output + outcome.errors).split())
    assert "in iteration 2 100% of the updates of role critic were left out" in shown
    before, after = (load_file(run / folder / "model.safetensors") for folder in ("initial_model", "model"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def list_draws(data: Path, draws: Sequence[int]) -> list[int]:
    """The rows of `train.jsonl` that these draws of eight have, the first being 1."""
    order = RowOrder([len(load_rows(data / "train.jsonl"))])
    return [row for draw in draws for _, row in order.draw(8, iteration=draw - 1, seed=0)]


def poison(small_config: Path, data: Path, draws: Sequence[int], *, after: int) -> tuple[str, ...]:
    """Writes a reward whose size no loss survives, for the first prompt of each draw; returns the words of such a run.

    Args:
        small_config: it lies next to this file.
        data: folder of the rows.
        draws: of eight rows, from 1.
        after: iteration that is committed before the reward is given.
    """
    run, rows = small_config.parent / "run", load_rows(data / "train.jsonl")
    prompts = [rows[list_draws(data, [draw])[0]].prompt for draw in draws]
    commit = str(run / "steps" / str(after) / "COMMIT")
    small_config.with_name("poison.py").write_text(POISON.format(prompts=prompts, commit=commit))
    keys = ("training.on_nonfinite=rollback", "reward.function=poison:score", "run.checkpoint_every=1",
            "run.iterations=4", "run.eval_every=4", "run.keep=4", "warm_start.max_steps=0")  # fmt: skip
    return tuple(word for key in keys for word in ("--set", key))


def list_rows(run: Path, state: str) -> dict[int, set[int]]:
    """Rows whose samples entered a state, by iteration."""
    found: dict[int, set[int]] = {}
    for line in map(json.loads, (run / LEDGER).read_text().splitlines()):
        if line["state"] == state:
            found.setdefault(line["iteration"], set()).update(row for _, row, _ in line["prompts"])
    return found


@pytest.mark.matrix
def test_two_ranks_on_ray_go_back_too(
    small_config: Path, hybridflow: Callable[..., Outcome], addition_data: Path
) -> None:
    run = small_config.parent / "run"
    words = poison(small_config, addition_data, [3], after=2)
    on_ray = ("--set", "run.executor=ray", "--set", "cluster.gpus_per_machine=2")
    outcome = hybridflow("train", small_config, *words, *on_ray)
    assert outcome.exit_code == 0, outcome.errors
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rollbacks"]) == ("finished", [{"iteration": 3, "after": 2}])
    assert list_rows(run, "dropped") == {3: set(list_draws(addition_data, [3]))}


def test_a_run_goes_back_and_on_with_other_draws(
    small_config: Path, hybridflow: Callable[..., Outcome], addition_data: Path
) -> None:
    """Draw 3 explodes in iteration 3, which is made again of draw 4; what follows is the same after a resume."""
    run = small_config.parent / "run"
    outcome = hybridflow("train", small_config, *poison(small_config, addition_data, [3], after=2))
    assert outcome.exit_code == 0, outcome.errors
    (line,) = [line for line in outcome.output.splitlines() if ". Restart " in line]
    assert "was refused" in line
    assert line.endswith("Restart 1 of run.max_restarts = 2: the run goes on after iteration 2 with other draws")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["resumed_from"]) == ("finished", 1, [2])
    assert summary["rollbacks"] == [{"iteration": 3, "after": 2}]
    assert [row["rollback/count"] for row in read_metrics(run)] == [0, 0, 1, 1]
    assert list_rows(run, "trained") == {
        iteration: set(list_draws(addition_data, [draw])) for iteration, draw in ((1, 1), (2, 2), (3, 4), (4, 5))
    }
    assert list_rows(run, "dropped") == {3: set(list_draws(addition_data, [3]))}
    assert summary["ledger"] == count_ledger(run / LEDGER)
    assert summary["ledger"] == {"planned": 40, "trained": 32, "filtered": 0, "dropped": 8, "in_flight": 0}
    replay = hybridflow("replay", run, "--iteration", 3, "--role", "critic")
    assert replay.exit_code == 1 and "its loss is inf" in replay.errors

    before: list[Any] = [without_times(read_metrics(run)), (run / LEDGER).read_text()]
    for lost, last in (([4], 3), ([3, 4], 2)):  # the second one is a commit from before the rollback
        for iteration in lost:
            (run / "steps" / str(iteration) / "COMMIT").unlink()
        outcome = hybridflow("train", "--resume", run)
        assert outcome.exit_code == 0, outcome.errors
        assert [without_times(read_metrics(run)), (run / LEDGER).read_text()] == before
        resumed = json.loads((run / "summary.json").read_text())
        assert (resumed["resumed_from"][-1], resumed["rollbacks"]) == (last, summary["rollbacks"])


def test_rollbacks_end_with_their_number(
    small_config: Path, hybridflow: Callable[..., Outcome], addition_data: Path
) -> None:
    """Every draw explodes after the first iteration."""
    words = poison(small_config, addition_data, [2, 3, 4], after=1)
    outcome = hybridflow("train", small_config, *words)
    assert outcome.exit_code == 1
    assert "run.max_restarts = 2 restarts were made before" in outcome.errors
    summary = json.loads((small_config.parent / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["type"]) == ("failed", "NonFiniteLossError")
    assert summary["rollbacks"] == [{"iteration": 2, "after": 1}] * 2
    assert (summary["restarts"], summary["iterations"], summary["last_commit"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("key", "reason"),
    [("checkpoint_every", "no commit is made to go back to"), ("max_restarts", "no rollback is allowed")],
)
def test_a_rollback_that_cannot_happen_is_refused(
    small_config: Path, hybridflow: Callable[..., Outcome], key: str, reason: str
) -> None:
    outcome = hybridflow("train", small_config, "--set", "training.on_nonfinite=rollback", "--set", f"run.{key}=0")
    assert outcome.exit_code == 2
    assert f'training.on_nonfinite = "rollback" with run.{key} = 0: {reason}. Raise run.{key}' in outcome.errors
    assert not (small_config.parent / "run").exists()


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_a_supervised_run_goes_back_too(
    command: str, small_config: Path, hybridflow: Callable[..., Outcome], addition_data: Path
) -> None:
    """Every update explodes, from the first one on: the run starts again with the next rows, twice."""
    keys = ["training.on_nonfinite=rollback", "training.explode_above=1e-9"]
    if command != "sft":
        keys += [f"data.{name}={write_pairs(addition_data / f'{name}.jsonl', small_config.parent)}" for name in SETS]
    outcome = hybridflow(command, write_sft(small_config), *(word for key in keys for word in ("--set", key)))
    assert outcome.exit_code == 1 and "above training.explode_above" in outcome.errors
    run = small_config.parent / "run"
    assert json.loads((run / "summary.json").read_text())["rollbacks"] == [{"iteration": 1, "after": 0}] * 2
    assert list_rows(run, "dropped") == {1: set(list_draws(addition_data, [1, 2]))}
    assert list_rows(run, "planned") == {1: set(list_draws(addition_data, [1, 2, 3]))}


def write_pairs(rows: Path, folder: Path) -> Path:
    """The same prompts with the answer and a longer one, in a file of the same name."""
    path = folder / rows.name
    pairs = [{"prompt": row.prompt, "chosen": row.answer, "rejected": f"{row.answer}1"} for row in load_rows(rows)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path
