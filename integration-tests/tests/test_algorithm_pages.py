"""docs/algorithms is what scripts/algorithm_pages.py writes from the recipes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_algorithms.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "algorithms"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "algorithm_pages.py"))


def test_the_pages_are_what_the_script_writes(script: dict[str, Any]) -> None:
    pages = script["write_pages"]()
    assert {path.name for path in FOLDER.iterdir()} == set(pages) == {"index.md", *(f"{name}.md" for name in RECIPES)}
    differing = [name for name, text in pages.items() if (FOLDER / name).read_text() != text]
    assert differing == [], "run scripts/algorithm_pages.py"


def test_every_page_has_its_parts(script: dict[str, Any]) -> None:
    for name, recipe in RECIPES.items():
        text = (FOLDER / f"{name}.md").read_text()
        parts = [text.index(f"\n## {title}\n") for title in ("Dataflow", "Equations", "Keys of `[algorithm]`")]
        assert parts == sorted(parts)
        assert "actor.generate_sequences" in text
        assert [key for key in recipe.config.model_fields if f"\n| `{key}` | " not in text] == []


def test_readers_learn_how_many_algorithms_there_are() -> None:
    assert len(RECIPES) == 18
    for page in ("README.md", "docs/index.md", "packages/hf-algorithms/README.md"):
        assert "eighteen algorithms" in (ROOT / page).read_text().lower(), page


def test_the_menu_has_every_page() -> None:
    menu = next(part["Algorithms"] for part in _read_menu() if isinstance(part, dict) and "Algorithms" in part)
    assert menu == ["algorithms/index.md", *({name: f"algorithms/{name}.md"} for name in RECIPES)]


def _read_menu() -> list[Any]:
    text = (ROOT / "mkdocs.yml").read_text()
    nav: list[Any] = yaml.safe_load("nav:\n" + text.partition("\nnav:\n")[2].partition("\n\n")[0])["nav"]
    return nav


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One.", ("One.", "")),
        ("One.\n\nDeviation from X: a.\n\nMore.", ("One.\n\nMore.", "Deviation from X: a.")),
        ("One.\n\nDeviations:\n\n- a;\n- b.\n\nMore.", ("One.\n\nMore.", "Deviations:\n\n- a;\n- b.")),
    ],
)
def test_a_docstring_is_split(script: dict[str, Any], text: str, expected: tuple[str, str]) -> None:
    split: Callable[[str], tuple[str, str]] = script["split_docstring"]
    assert split(text) == expected
