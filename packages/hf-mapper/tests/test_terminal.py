from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from hf_mapper import render_plan
from hf_mapper.explain.terminal import build_console, print_table
from hf_protocols import MappingPlan

GOLDEN = Path(__file__).parent / "golden"
WORDS = ("generate_sequences", "64", "a-word-of-characters", "transformers")


def printed(width: int, drop: tuple[str, ...] = ()) -> str:
    table = Table("call", "of", "words and words", pad_edge=False)
    table.add_row("generate_sequences transformers", "64", "a-word-of-characters " * 4)
    console = Console(width=width, file=io.StringIO())
    print_table(console, table, drop=drop)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 54])
def test_words_stay_whole_while_the_longest_fit(width: int) -> None:
    text = printed(width)
    assert all(word in text for word in WORDS)
    assert max(map(len, text.splitlines())) <= width
    assert ("generate_sequences transformers" in text) is (width > 130)


def test_a_column_that_has_no_room_is_left_out_and_named() -> None:
    text = printed(45, drop=("words and words", "of"))
    assert "a-word-of" not in text
    assert "generate_sequences" in text
    assert "64" in text
    assert "left out at this width: words and words\n" in text
    both = printed(20, drop=("words and words", "of", "absent"))
    assert "64" not in both
    assert "generate_sequences" in both


def test_a_table_that_fits_leaves_nothing_out() -> None:
    assert "left out" not in printed(200, drop=("of",))


def test_a_pipe_is_as_wide_as_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert build_console().width > 1000
    monkeypatch.setenv("COLUMNS", "60")
    assert build_console().width == 60


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_no_word_of_a_plan_is_cut(width: int) -> None:
    plan = MappingPlan.from_json((GOLDEN / "quickstart.json").read_text())
    console = Console(width=width, file=io.StringIO())
    render_plan(plan, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= width
    for role in plan.models:
        assert re.search(rf"\b{role}\b", text)
    for stage in plan.estimates.stages:
        assert all(re.search(rf"(^|\s){re.escape(call)}(\s|$)", text) for call in stage.calls)
