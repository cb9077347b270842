"""Tables as HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

__all__ = ["Markup", "render_table"]


class Markup(str):
    """HTML that its writer has escaped."""

    __slots__ = ()


def render_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Collection[int] = (),
    wide: Collection[int] = (),
    chosen: int | None = None,
    style: str = "",
    row_styles: Sequence[str] = (),
) -> str:
    """Returns a table; cells are texts, or `Markup`.

    Args:
        headings: of the columns; if all of them are empty, the table has no head.
        rows: as long as `headings`.
        numbers: columns that are aligned to the right.
        wide: columns that narrow screens leave out.
        chosen: row that is set off, or None.
        style: classes of the table. With `stacked`, a narrow screen shows each row as a block that repeats headings.
        row_styles: classes of the rows, or nothing.
    """
    names = [" ".join(["number"] * (place in numbers) + ["wide"] * (place in wide)) for place in range(len(headings))]
    head = "".join(
        f'<th scope="col"{_class(name)}>{_cell(text)}</th>' for text, name in zip(headings, names, strict=True)
    )
    is_stacked = "stacked" in style.split()
    labels = [f' data-of="{escape(text)}"' if is_stacked else "" for text in headings]
    body = "".join(
        f"<tr{_class(_style_row(number, chosen, row_styles))}>"
        + "".join(f"<td{labels[place]}{_class(names[place])}>{_cell(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    shown = f"<thead><tr>{head}</tr></thead>" if any(headings) else ""
    return f"<table{_class(style)}>{shown}<tbody>{body}</tbody></table>"


def _style_row(number: int, chosen: int | None, styles: Sequence[str]) -> str:
    return " ".join([*styles[number : number + 1], *["chosen"] * (number == chosen)])


def _class(names: str) -> str:
    return f' class="{escape(names)}"' if names else ""


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))
