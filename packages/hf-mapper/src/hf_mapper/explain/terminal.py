"""Tables in a terminal: as wide as their content, without the columns for which a narrow terminal has no room."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

__all__ = ["build_console", "print_table"]

_ANY_WIDTH = 10_000


def build_console() -> Console:
    """Returns a console as wide as the terminal or `COLUMNS`; in a pipe or a file, as wide as anything printed."""
    return Console(width=shutil.get_terminal_size((_ANY_WIDTH, 24)).columns)


def print_table(console: Console, table: Table, *, drop: Sequence[str] = ()) -> None:
    """Prints a table without cutting words in two.

    Args:
        console: where to.
        table: what to print; its columns are changed.
        drop: headings of columns that are left out while the others have no room, the least important first. One line
            below the table names those that were.
    """
    dropped: list[str] = []
    for heading in drop:
        if _fits(console, table):
            break
        kept = [column for column in table.columns if _heading(column) != heading]
        if len(kept) < len(table.columns):
            dropped.append(heading)
            table.columns[:] = [replace(column, _index=index) for index, column in enumerate(kept)]
    if _fits(console, table):
        _share_width(console, table)
    console.print(table, markup=False)  # a name in brackets is a name
    if dropped:
        console.print(Text(f"left out at this width: {', '.join(dropped)}", style="dim"))


def _fits(console: Console, table: Table) -> bool:
    return sum(each.minimum for each in _measure(console, table)) + _frame(console, table) <= console.width


def _share_width(console: Console, table: Table) -> None:
    """Gives every column its longest word, and what is left to those whose texts would be longer on one line."""
    sizes = _measure(console, table)
    room = console.width - _frame(console, table) - sum(each.minimum for each in sizes)
    wanted = sum(each.span for each in sizes)
    if wanted <= room:
        return
    for column, size in zip(table.columns, sizes, strict=True):
        column.width = size.minimum + size.span * room // wanted


def _measure(console: Console, table: Table) -> list[Measurement]:
    """The longest word and the longest line of each column."""
    options = console.options.update(width=_ANY_WIDTH, markup=False)
    found = []
    for column in table.columns:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        longest = max(cell.maximum for cell in cells)
        found.append(Measurement(longest if column.no_wrap else max(cell.minimum for cell in cells), longest))
    return found


def _frame(console: Console, table: Table) -> int:
    """Characters of a line that are lines and blanks between columns."""
    natural = Measurement.get(console, console.options.update(width=_ANY_WIDTH, markup=False), table).maximum
    return natural - sum(each.maximum for each in _measure(console, table))


def _heading(column: Column) -> str:
    return str(column.header).replace("\n", " ")
