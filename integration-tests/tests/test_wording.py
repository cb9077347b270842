"""Text in the paths that scripts/wording.toml holds is free of the expressions that it forbids."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = tomllib.loads((ROOT / "integration-tests" / "wording_cases.toml").read_text())
"""In a file of their own, because the tests are free of these expressions."""


@pytest.fixture(scope="module")
def wording() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "wording.py"))


def test_wording_of_scripts_has_no_hits(wording: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The whole tree is read by `make check`."""
    status = wording["main"]([str(ROOT / "scripts")])
    assert (status, capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(("name", "content", "found"), [tuple(case.values()) for case in CASES["cases"]])
def test_wording_finds_expressions_with_their_lines(
    wording: dict[str, Any], tmp_path: Path, name: str, content: str, found: list[list[object]]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    hits = wording["find_hits"](path, wording["read_rules"]()[1])
    assert [[hit.line, hit.found] for hit in hits] == found


def test_wording_lists_hits_and_missing_paths(
    wording: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text(CASES["listed"]["content"])
    assert wording["main"]([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/{CASES['listed']['output']}"
    assert wording["main"]([str(tmp_path / "absent")]) == 2
