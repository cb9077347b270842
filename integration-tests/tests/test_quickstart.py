"""The main job as a user runs it: the gain, its control, the files, and the tutorial that walks through them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_runs import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TUTORIAL = ROOT / "docs" / "tutorials" / "quickstart.md"
CALLS = {
    "actor.generate_sequences": 2,
    "actor.compute_logprobs": 2,
    "critic.compute_values": 2,
    "reference.compute_ref_logprobs": 2,
    "reward.compute_reward": 1,
    "advantage.compute_advantages": 1,
    "critic.update_critic": 2,
    "actor.update_actor": 2,
}
SHUFFLED = """
from hf_algorithms.rewards import exact_match

previous = 0.0

def shuffled(prompts, responses, answers):  # a call has one prompt: each takes the score of the one before
    global previous
    scores = [previous, *exact_match(prompts, responses, answers)]
    previous = scores.pop()
    return scores
"""


def hybridflow(*arguments: object, cwd: Path) -> str:
    command = [str(BIN / "hybridflow"), *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart ran."""
    folder = tmp_path_factory.mktemp("home")
    hybridflow("quickstart", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def summary(home: Path) -> dict[str, Any]:
    return json.loads((home / "runs" / "quickstart" / "summary.json").read_text())


def test_ppo_gains_twenty_points_and_stays_near_the_reference(summary: dict[str, Any]) -> None:
    assert summary["score_after"] - summary["score_before"] >= 0.2
    assert 0 <= summary["kl_to_reference"]["value"] <= 2


@pytest.mark.matrix  # `make bench-learning` has a control of three seeds
def test_shuffled_rewards_lose_the_gain(home: Path, summary: dict[str, Any]) -> None:
    """After as many iterations as gave PPO more than half of its gain."""
    iterations = 100
    run = home / "runs" / "quickstart"
    (home / "shuffled_rewards.py").write_text(SHUFFLED)
    overrides = {
        "run.output_dir": home / "runs" / "control",
        "run.iterations": iterations,
        "model.path": run / "warm_model",
        "warm_start.max_steps": 0,
        "reward.function": "shuffled_rewards:shuffled",
    }
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    hybridflow("train", run / "config.toml", *words, cwd=home)
    control = json.loads((home / "runs" / "control" / "summary.json").read_text())
    assert control["score_before"] == summary["score_before"]
    gain = summary["score_after"] - summary["score_before"]
    assert read_metrics(run)[iterations - 1]["eval/validation/exact_match"] - summary["score_before"] > gain / 2
    assert control["score_after"] - control["score_before"] <= gain / 2


def test_every_iteration_shows_its_calls_on_their_ranks(home: Path, summary: dict[str, Any]) -> None:
    run = home / "runs" / "quickstart"
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    reshards = [event for event in events if event["name"] == "reshard"]
    for iteration in range(1, summary["iterations"] + 1):
        calls = [event for event in events if event.get("args", {}).get("iteration") == iteration]
        assert {name: sum(event["name"] == name for event in calls) for name in CALLS} == CALLS
        for generate in (event for event in calls if event["name"] == "actor.generate_sequences"):
            assert sum(_inside(reshard, generate) for reshard in reshards) == 1
    assert len(read_metrics(run)) == summary["iterations"]


def _inside(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    same_row = (part["pid"], part["tid"]) == (whole["pid"], whole["tid"])
    return same_row and whole["ts"] <= part["ts"] <= whole["ts"] + whole["dur"]


def test_the_blocks_of_the_tutorial_run(home: Path) -> None:
    blocks = re.findall(r"^```(sh|python|text)\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    shell = [block for kind, block in blocks if kind == "sh"]
    assert shell[:2] == ["make quickstart\n", "source .venv/bin/activate\n"]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    shown = ""
    for kind, block in blocks:
        if kind == "text" or block in shell[:2]:
            continue
        command = ["bash", "-ec", block] if kind == "sh" else [sys.executable, "-c", block]
        ended = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert ended.returncode == 0, (block, ended.stdout, ended.stderr)
        assert ended.stdout.strip(), block
        shown += ended.stdout
    plan = next(block for kind, block in blocks if kind == "text")
    assert plan in shown
