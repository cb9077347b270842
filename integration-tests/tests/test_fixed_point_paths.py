"""Every algorithm's page shows a path to its fixed point: the kept paths are what the recipes do."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_algorithms.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
KEPT: dict[str, dict[str, Any]] = json.loads((ROOT / "scripts" / "fixed_points.json").read_text())
AS_GRPO = ("gspo", "cispo", "sapo", "gmpo", "dppo_tv")
"""Take GRPO's path, for every ratio is 1."""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "fixed_points.py"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in AS_GRPO else []) for name in RECIPES]
)
def test_a_recipe_takes_the_path_that_its_page_shows(name: str, script: dict[str, Any]) -> None:
    case = script["build_cases"]()[name]
    found = script["describe"](name, case, case.train(name))  # refuses an end elsewhere
    kept = KEPT[name]
    assert {key: found[key] for key in ("keys", "formula", "note", "reference", "rewards", "responses")} == {
        key: kept[key] for key in ("keys", "formula", "note", "reference", "rewards", "responses")
    }
    np.testing.assert_allclose(found["fixed_point"], kept["fixed_point"], atol=1e-4)
    np.testing.assert_allclose(found["end"], kept["end"], atol=1e-3)
    np.testing.assert_allclose(found["path"], kept["path"], atol=1e-2)


def test_losses_of_a_ratio_take_one_path() -> None:
    assert {name: KEPT[name]["path"] for name in AS_GRPO} == dict.fromkeys(AS_GRPO, KEPT["grpo"]["path"])


def test_safe_rlhf_ends_at_its_multiplier() -> None:
    assert KEPT["safe_rlhf"]["multiplier"] == 1.1516
    assert KEPT["safe_rlhf"]["multiplier_end"] == pytest.approx(1.1516, abs=5e-3)


def test_pictures_are_drawn_from_the_paths(script: dict[str, Any]) -> None:
    folder = ROOT / "docs" / "assets" / "fixed-points"
    assert {path.stem for path in folder.iterdir()} == set(KEPT) == set(RECIPES)
    differing = [name for name, path in KEPT.items() if (folder / f"{name}.svg").read_text() != script["draw"](path)]
    assert differing == [], "run scripts/fixed_points.py"
