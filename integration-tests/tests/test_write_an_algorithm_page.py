"""docs/how-to/write-an-algorithm.md, as written, in a user's own folder."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_algorithms.config import load_config
from hf_protocols import MappingPlan
from small_runs import Outcome, read_metrics, without_times

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-algorithm.md").read_text()
BLOCKS = [
    (re.findall(r"`(\w+\.(?:py|toml))`", before)[-1], block)
    for before, block in re.findall(r"^([^\n]+)\n\n```(?:python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
"""Each file that the page names, with a part of it."""
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with the files of the page, where commands run."""
    for name in {name for name, _ in BLOCKS}:
        (tmp_path / name).write_text("\n\n".join(block for each, block in BLOCKS if each == name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    for module in ("pass_at_k", "my_rewards"):
        sys.modules.pop(module, None)


def run(hybridflow: Callable[..., Outcome], commands: list[str]) -> list[Outcome]:
    outcomes = []
    for command in commands:
        program, *words = command.split()
        if program == "python":
            subprocess.run([sys.executable, "-c", command.split('"')[1]], check=True)
            continue
        outcomes.append(hybridflow(*words))
        assert outcomes[-1].exit_code == 0, outcomes[-1].errors
    return outcomes


def test_the_files_are_on_the_page() -> None:
    assert [name for name, _ in BLOCKS] == ["pass_at_k.py", "my_rewards.py", "pass_at_k.toml", "pass_at_k.py"]
    assert sum(bool(line.strip()) for line in BLOCKS[0][1].splitlines()) <= 35


def test_the_page_runs_as_written(folder: Path, hybridflow: Callable[..., Outcome]) -> None:
    settings, plan, _, _ = run(hybridflow, [each for each in COMMANDS if "executor=ray" not in each])
    assert "# Factor of the lead.\nlead_scale = 2.0\n" in settings.output
    assert "actor" in plan.output
    clipped, squared = (read_metrics(folder / "runs" / name) for name in ("pass_at_k", "dro"))
    assert [row["iteration"] for row in clipped] == [1, 2]
    assert clipped[0]["reward/mean"] == squared[0]["reward/mean"]
    assert clipped[0]["actor/policy_loss"] != squared[0]["actor/policy_loss"]
    assert any(row["actor/grad_norm"] > 0 for row in clipped)


@pytest.mark.slow  # a cluster of its own, whose ranks import the user's file
@pytest.mark.timeout(300)
def test_two_ranks_train_like_one(folder: Path, hybridflow: Callable[..., Outcome]) -> None:
    """Both of the user's classes travel to other processes: the estimator, and the surrogate in its loss."""
    own = "--set algorithm.recipe=pass_at_k.py:PASS_AT_K_DRO"
    (on_ray,) = (each for each in COMMANDS if "executor=ray" in each)
    run(hybridflow, [COMMANDS[0], f"hybridflow train pass_at_k.toml {own}", f"{on_ray} {own}"])
    assert MappingPlan.from_json((folder / "runs" / "two_ranks" / "plan.json").read_text()).pools[0].num_slots == 2
    alone, together = (without_times(read_metrics(folder / "runs" / name)) for name in ("pass_at_k", "two_ranks"))
    for name in ("reward/mean", "actor/policy_loss", "actor/grad_norm", "response/tokens"):
        assert together[0][name] == pytest.approx(alone[0][name], rel=1e-5, abs=1e-7), name


def test_a_wrong_key_is_refused(folder: Path, hybridflow: Callable[..., Outcome]) -> None:
    outcome = hybridflow("config", "pass_at_k.toml", "--set", "algorithm.kl_place=reward")
    assert outcome.exit_code == 2
    assert "algorithm.kl_place = 'reward': must be 'loss' or 'none'" in outcome.errors


def test_the_lead_is_the_gradient_of_pass_at_k(folder: Path) -> None:
    """Over all groups of a Bernoulli prompt the expected gradient is (1 - p)^(n - 1) that of p."""
    recipe = load_config(folder / "pass_at_k.toml", search_path=[str(folder)]).recipe
    estimator: Any = sys.modules[recipe.step.__module__].Lead(1.0)
    for p, n in ((0.1, 4), (0.3, 4), (0.5, 4), (0.3, 8)):
        found = 0.0
        for group in itertools.product((0.0, 1.0), repeat=n):
            columns = {
                "scores": torch.tensor(group, dtype=torch.float64),
                "group_id": torch.zeros(n, dtype=torch.int64),
                "response_mask": torch.ones(n, 1, dtype=torch.bool),
            }
            advantages = estimator(columns)["advantages"][:, 0].tolist()
            chance = p ** sum(group) * (1 - p) ** (n - sum(group))
            score = [1 / p if success else -1 / (1 - p) for success in group]
            found += chance * sum(a * g for a, g in zip(advantages, score, strict=True)) / n
        assert found == pytest.approx((1 - p) ** (n - 1), abs=1e-12)


def test_unscored_responses_are_left_out(folder: Path) -> None:
    recipe = load_config(folder / "pass_at_k.toml", search_path=[str(folder)]).recipe
    found = sys.modules[recipe.step.__module__].Lead(2.0)(
        {
            "scores": torch.tensor([1.0, float("nan"), 3.0, 0.5, float("nan")]),
            "group_id": torch.tensor([7, 7, 7, 2, 2]),
            "response_mask": torch.tensor([[True, True]] * 4 + [[True, False]]),
        }
    )
    assert found["advantages"].tolist() == [[0, 0], [0, 0], [4, 4], [0, 0], [0, 0]]
