"""docs/reference/line-counts.md counts the code as it is."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "line_counts.py"))


def test_the_page_is_what_the_script_writes(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "reference" / "line-counts.md").read_text()
    assert page == script["write_page"](), "run scripts/line_counts.py"


def test_lines_of_files_classes_and_methods_are_counted(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '# Copyright\n#\n\n"""Text."""\n\nimport math\n\n\n@math.wrap\nclass One:\n    """More."""\n\n'
        "    # why\n    def run(self) -> None:\n\n        pass\n\n\ndef other() -> None: ...\n"
    )
    count: Callable[[Path, str], int] = script["count_unit"]
    units = ("one.py", "one.py:One", "one.py:One.run", "one.py:other")
    assert [count(tmp_path, unit) for unit in units] == [9, 6, 2, 1]


def test_what_serves_safe_rlhf_alone_serves_nothing_else(script: dict[str, Any]) -> None:
    """No other recipe names the classes that are counted as its own."""
    names = [unit.partition(":")[2] for unit in script["SAFE_RLHF_ALONE"] if ":" in unit]
    folder = script["OURS"] / "recipes"
    others = [path for path in folder.glob("*.py") if path.name not in ("safe_rlhf.py", "__init__.py")]
    assert [(path.name, name) for path in others for name in names if name in path.read_text()] == []
    assert all((script["OURS"] / unit.partition(":")[0]).is_file() for unit in script["SAFE_RLHF_ALONE"])
