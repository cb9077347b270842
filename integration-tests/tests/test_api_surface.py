"""scripts/api_surface.py lists what packages export, and names what changed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
from dataclasses import dataclass

from one.inner import move as move

__all__ = ["LIMIT", "Mover", "Size", "move"]

LIMIT: int = 3


@dataclass(frozen=True, kw_only=True)
class Size:
    rows: int
    name: str = "none"


class Mover(Size):
    def run(self, rows: list[int], /, *names: str, fast: bool = False, **options: int) -> None: ...

    def _hidden(self) -> None: ...


def absent() -> None: ...
"""
INNER = "def move(rows: int, *, to: str = 'host') -> bool: ...\n"
LINES = [
    "one.LIMIT: int",
    "one.Mover(Size)",
    "    run(rows: list[int], *names: str, fast: bool = False, **options: int) -> None",
    "one.Size()",
    "    __init__(*, rows: int, name: str = 'none') -> None",
    "    name: str",
    "    rows: int",
    "one.move(rows: int, *, to: str = 'host') -> bool",
]


@pytest.fixture(scope="module")
def surface() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "api_surface.py"))


def test_surface_lists_exports_with_signatures(surface: dict[str, Any], tmp_path: Path) -> None:
    package = tmp_path / "one"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    (package / "inner.py").write_text(INNER)
    assert [line for line in surface["read_surface"](["one"], [tmp_path]) if "__init__(self" not in line] == LINES


def test_surface_names_changes_with_their_class(surface: dict[str, Any]) -> None:
    changed = [line.replace("name: str", "name: bytes") for line in LINES if not line.startswith("one.move")]
    assert surface["compare"](LINES, LINES) == []
    assert surface["compare"](LINES, changed) == [
        "+ one.Size.__init__(*, rows: int, name: bytes = 'none') -> None",
        "- one.Size.__init__(*, rows: int, name: str = 'none') -> None",
        "+ one.Size.name: bytes",
        "- one.Size.name: str",
        "- one.move(rows: int, *, to: str = 'host') -> bool",
    ]


def test_surface_list_names_every_package(surface: dict[str, Any]) -> None:
    lines = surface["LIST"].read_text().splitlines()
    assert {line.partition(".")[0] for line in lines if not line.startswith(" ")} == set(surface["PACKAGES"])
