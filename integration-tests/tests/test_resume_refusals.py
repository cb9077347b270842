"""Runs that are asked to go on where something is wrong: said before anything starts, and an earlier commit is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hf_algorithms.checkpoints import LEDGER
from small_runs import Outcome, read_metrics, without_times

WORDS = ("--set", "algorithm.name=grpo", "--set", "rollout.samples_per_prompt=2", "--set", "run.checkpoint_every=1",
         "--set", "run.iterations=3", "--set", "run.keep=3", "--set", "warm_start.max_steps=0")  # fmt: skip


@pytest.fixture
def run(small_config: Path, hybridflow: Callable[..., Outcome]) -> Path:
    outcome = hybridflow("train", small_config, *WORDS)
    assert outcome.exit_code == 0, outcome.errors
    return small_config.parent / "run"


def list_files(run: Path) -> dict[str, bytes]:
    return {str(each.relative_to(run)): each.read_bytes() for each in run.rglob("*") if each.is_file()}


def test_what_is_asked_for_wrongly_changes_nothing(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    before = list_files(run)
    asked: Sequence[tuple[Sequence[str], str]] = (
        (("--set", "run.iterations=2"), "run.iterations = 2: the run has made 3 iterations. Set it to 3 or more"),
        (("--allow-changed", "run.sede"), "--allow-changed run.sede: unknown key. `hybridflow config` lists all keys"),
        (("--set", "run.output_dir=other"), "run.output_dir = 'other': a run goes on in its directory. Leave the key"),
    )
    for words, message in asked:
        outcome = hybridflow("train", "--resume", run, *words)
        assert (outcome.exit_code, outcome.errors.count("\n")) == (2, 1) and message in outcome.errors
    outcome = hybridflow("train", "--resume", run / "metrics.jsonl")
    assert outcome.exit_code == 2 and f"--resume {run / 'metrics.jsonl'}: is not a directory" in outcome.errors
    assert {name: text for name, text in list_files(run).items() if name != ".lock"} == {
        name: text for name, text in before.items() if name != ".lock"
    }
    (run / "plan.json").write_bytes(b"\xff")
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 2 and f"{run / 'plan.json'}: is not text in UTF-8. Restore it" in outcome.errors
    (run / "plan.json").write_text("{}")
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 2 and "Regenerate" not in outcome.errors and "Restore it, or start" in outcome.errors
    (run / "plan.json").unlink()
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert "plan.json: cannot be read: No such file or directory. Restore it, or start" in outcome.errors


def test_a_file_that_became_a_directory_is_named(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 2
    assert f"{run / 'metrics.jsonl'}: is a directory, and was a file at the commit of iteration 3" in outcome.errors


@pytest.mark.parametrize("name", ["metrics.jsonl", LEDGER])
def test_a_file_that_lost_its_end_is_written_again(name: str, run: Path, hybridflow: Callable[..., Outcome]) -> None:
    whole = run.with_name("whole")
    shutil.copytree(run, whole)
    lines = (run / name).read_bytes().splitlines(keepends=True)
    (run / name).write_bytes(b"".join(lines[:-1]))
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 0, outcome.errors
    said = " ".join(outcome.output.split())
    assert f"warning: {run / name}: has " in said and "at the commit of iteration 3. It is not used" in said
    assert "resuming after iteration 2" in outcome.output
    assert without_times(read_metrics(run))[:3] == without_times(read_metrics(whole))
    assert (run / LEDGER).read_text().startswith((whole / LEDGER).read_text())


def test_without_the_beginning_of_a_file_nothing_starts(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    (run / "metrics.jsonl").write_text("x\n")
    before = list_files(run)
    outcome = hybridflow("train", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 2 and "starting" not in outcome.output
    assert "no commit can be used" in outcome.errors and "Restore these files, or start another" in outcome.errors
    assert {**list_files(run), ".lock": b""} == {**before, ".lock": b""}
