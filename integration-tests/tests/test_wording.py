"""Text in the paths that scripts/wording.toml holds is free of the expressions that it forbids."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wording() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "wording.py"))


def test_wording_held_paths_have_no_hits(wording: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status = wording["main"]([])
    assert (status, capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("code.py", '"""Which rows."""\n', [(1, "Which")]),
        ("code.py", '"""Rows."""\n\nLIMIT = 3\n"""\nWhat it is."""\n', [(4, "\nWhat")]),
        ("code.py", 'TEXT = "Which rows."\n', []),
        ("code.py", '"""A value that\nis\nno number."""\n', [(2, "is\nno")]),
        ("code.py", "# the row is no longer read, and there is no other\n", []),
        ("code.py", 'def f(anew: int) -> str:\n    return f"{anew} is made " "anew"\n', [(2, "anew")]),
        ("code.py", "rows = []  # read anew\n", [(1, "anew")]),
        ("code.py", "'''See ``rows``.'''\n", [(1, "``"), (1, "``")]),
        ("code.py", 'TEXT = "```json\\n{}\\n```"\n', []),
        ("page.md", "# Rows\n\nThey are\nkept beside it.\n\n    ``code``\n", [(4, "beside")]),
    ],
)
def test_wording_finds_expressions_with_their_lines(
    wording: dict[str, Any], tmp_path: Path, name: str, content: str, found: list[tuple[int, str]]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    hits = wording["find_hits"](path, wording["read_rules"]()[1])
    assert [(hit.line, hit.found) for hit in hits] == found


def test_wording_lists_hits_and_missing_paths(
    wording: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("Make it anew.\n")
    assert wording["main"]([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/page.md:1: 'anew': write again; regenerate\n"
    assert wording["main"]([str(tmp_path / "absent")]) == 2
