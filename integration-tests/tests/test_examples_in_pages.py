"""Python shown in a package's README runs, and where a page shows what a block prints, it prints that; elsewhere it
parses, and what it imports from us exists.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from engine_testing.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READMES = sorted(ROOT.glob("packages/*/README.md"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if "\n```python\n" in path.read_text()]
"""Those whose docstring shows a program."""


def _blocks(pages: list[Path]) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in pages
        for number, block in enumerate(PYTHON_BLOCK.findall(page.read_text()), 1)
    ]


@pytest.mark.parametrize("block", _blocks(READMES))
def test_a_readmes_block_runs(block: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(block)
    finished = run_forked(program)
    assert finished.returncode == 0, finished.stderr
    # A block that only defines functions is run by a test of its package.
    assert bool(finished.stdout) == ("print(" in block)


PRINTING_BLOCK = re.compile(r"^```python\n(.*?)^```\n\nprints\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTING = [
    pytest.param(block, shown, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (block, shown) in enumerate(PRINTING_BLOCK.findall(page.read_text()), 1)
]


def test_the_page_on_the_data_plane_shows_what_its_blocks_print() -> None:
    assert sum("data-plane" in str(case.id) for case in PRINTING) == 3


@pytest.mark.parametrize(("block", "shown"), PRINTING)
def test_a_pages_block_prints_what_the_page_shows(block: str, shown: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(block)
    finished = run_forked(program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == shown


@pytest.mark.parametrize("block", _blocks([*PAGES, *SOURCES]))
def test_a_pages_block_parses_and_its_imports_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
