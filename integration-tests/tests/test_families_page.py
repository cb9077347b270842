"""docs/reference/families.md has the results of the tests of all families."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from hf_engine.testing import FURTHER_FAMILIES, TINY_FAMILIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "families.py"))


@pytest.fixture(scope="module")
def rows(script: dict[str, Any]) -> dict[str, list[str]]:
    """Cells of the table, by family."""
    return rows_between(script["PAGE"].read_text(), script["BEGIN"], script["END"])


def rows_between(page: str, begin: str, end: str) -> dict[str, list[str]]:
    table = page.partition(begin)[2].partition(end)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_family_was_tested_and_equals_transformers(rows: dict[str, list[str]]) -> None:
    assert list(rows) == list(TINY_FAMILIES), "run make test-families"
    assert {row[1] for row in rows.values()} == {"equal"}
    assert {row[2] for row in rows.values()} <= {"follows", "takes", ""}
    assert {row[3] for row in rows.values()} <= {"follows", "loads", ""}


def test_every_further_family_equals_transformers(script: dict[str, Any]) -> None:
    page = script["PAGE"].read_text()
    rows = rows_between(page, script["FURTHER_BEGIN"], script["FURTHER_END"])
    assert list(rows) == list(FURTHER_FAMILIES), "run scripts/families.py --further"
    assert {row[1] for row in rows.values()} == {"equal"}


def test_engines_take_what_the_page_says(
    script: dict[str, Any], rows: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few = ("qwen2", "gemma2", "deepseek_v3", "mistral", "phi")
    build = script["build_table"]
    monkeypatch.setitem(build.__globals__, "TINY_FAMILIES", few)
    followed = {name: rows[name][2] for name in few if rows[name][2] == "follows"}
    loaded = {name: rows[name][3] for name in few if rows[name][3]}
    table = build(dict.fromkeys(few, "equal"), followed, loaded, tmp_path).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table] == [rows[name] for name in few]


def test_results_are_read_from_the_report(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase name="test_family_equals_transformers[llama]"/>'
        '<testcase name="test_family_equals_transformers[phi]"><failure message="off"/></testcase>'
        '<testcase name="test_family_equals_transformers[opt]"><skipped/></testcase>'
        '<testcase name="test_something_else[gemma]"/>'
        "</testsuite></testsuites>"
    )
    assert script["read_results"](tmp_path / "report.xml") == {"llama": "equal", "phi": "differs"}
