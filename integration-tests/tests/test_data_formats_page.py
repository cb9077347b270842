"""docs/reference/data-formats.md shows what is found in a file of each convention."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "data_formats.py"))
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text()
    assert page == script["write_page"](), "run scripts/data_formats.py"
