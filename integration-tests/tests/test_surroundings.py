"""Surroundings of a run: other modules in the user's folder, signals, and Ray's temporary folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_protocols import StateError
from small_runs import Outcome, read_metrics, write_sft

NAMESAKES = ("tokenizers", "profile", "torch", "random", "secrets", "types", "safetensors", "numpy", "aiohttp", "yaml")
REWARD = """
import random

def score(prompts, responses, answers):
    import my_sibling
    return my_sibling.score(responses)
"""
SIBLING = """
def score(responses):
    return [len(response) / 5 for response in responses]
"""
ENDING = """
import os, signal

calls = 0

def score(prompts, responses, answers):
    global calls
    calls += 1
    if calls == 17:  # one for each of 8 prompts: in the third iteration
        os.kill(os.getpid(), signal.SIGTERM)
    return [len(response) / 5 for response in responses]
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_namesakes_next_to_a_run_do_not_reach_its_workers(small_config: Path) -> None:
    """Neither its own program nor Ray's agents: they lie next to the configuration, in the working directory."""
    folder = small_config.parent
    for name in NAMESAKES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name} of the user')\n")
    (folder / "evaluate.py").write_text(REWARD)
    (folder / "my_sibling.py").write_text(SIBLING)
    overrides = {"run.executor": "ray", "run.iterations": 1, "reward.function": "evaluate:score"}
    command = [str(Path(sys.executable).with_name("hybridflow")), "train", small_config.name]
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    ended = subprocess.run([*command, *words], cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(read_metrics(folder / "run")) == 1
    assert ended.stderr == ""


def test_sigterm_ends_a_run_in_process_quietly(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    (small_config.parent / "ending.py").write_text(ENDING)
    settings = ("reward.function=ending:score", "reward.processes=0", "run.iterations=50")
    ended = hybridflow("train", small_config, *(part for each in settings for part in ("--set", each)))
    assert ended.exit_code == 143
    assert ended.errors.startswith("SIGTERM: the run stops after this iteration") and ended.errors.count("\n") == 1
    summary = json.loads((small_config.parent / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert summary["iterations"] == summary["last_commit"] == len(read_metrics(small_config.parent / "run")) == 3


@pytest.mark.parametrize("given", ["/proc", "/tmp/" + "a" * 80])
def test_a_folder_without_room_for_ray_is_refused_at_first(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", given)
    ended = hybridflow("train", small_config, "--set", "run.executor=ray")
    assert ended.exit_code == 2
    assert ended.errors.startswith(f"Error: a local Ray cluster cannot start here: RAY_TMPDIR='{given[:50]}")
    assert len(ended.errors.splitlines()) == 1
    assert not os.path.exists(small_config.parent / "run" / "config.toml")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_without_room_for_its_report_is_complete(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("hf_algorithms.report.write_text", refuse_to_write)
    outcome = hybridflow(command, write_sft(small_config) if command == "sft" else small_config)
    assert outcome.exit_code == 0, outcome.errors
    run = small_config.parent / "run"
    said = f"{run}/report.html cannot be written: No space left on device. Write it later: hybridflow report {run}"
    assert said in " ".join(outcome.output.split())
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def refuse_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_commit_that_cannot_be_written_ends_the_run_soon(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the iterations after it, not at the next commit: what is computed until then could not be kept."""
    monkeypatch.setattr("hf_engine.training.state.saving.write_tensors", refuse_tensors)
    words = ("run.iterations=90", "run.checkpoint_every=30", "run.max_restarts=0", "run.eval_every=90")
    outcome = hybridflow("sft", write_sft(small_config), *(word for key in words for word in ("--set", key)))
    assert outcome.exit_code == 1
    said = " ".join(outcome.errors.split())
    assert "exp_avg-00000.safetensors cannot be written: No space left on device" in said
    assert "Earlier commits are whole. Free some space and use --resume" in said
    assert 30 <= len(read_metrics(small_config.parent / "run")) < 60


def refuse_tensors(path: Path, _: object) -> None:
    raise StateError(f"{path} cannot be written: {os.strerror(errno.ENOSPC)}")


def test_a_run_whose_directory_is_removed_leaves_nothing(
    small_config: Path, hybridflow: Callable[..., Outcome]
) -> None:
    (small_config.parent / "remover.py").write_text(
        "import shutil\nfrom pathlib import Path\n"
        "def remove(iteration, metrics):\n    shutil.rmtree(Path(__file__).with_name('run'))\n"
    )
    hook = f"run.on_metrics={small_config.parent / 'remover.py'}:remove"
    outcome = hybridflow("train", small_config, "--set", hook, "--set", "run.max_restarts=0")
    run = small_config.parent / "run"
    assert outcome.exit_code == 1 and f"run.output_dir={str(run)!r} was removed while the run went on" in outcome.errors
    assert "--resume" not in outcome.output and not run.exists()
