"""Pages about runs and plans: charts, tables and documents as HTML that loads nothing and needs no script.

The functions here turn numbers and names into text, for `report.html`, `hybridflow serve` and the mapper's page.
Everything that a caller passes is escaped, except `Markup`. What must not live here: knowledge of runs and plans, and
the reading of files.
"""

from __future__ import annotations

from hf_protocols.drawing.curves import Curve, Line, Point, render_curve, render_spark
from hf_protocols.drawing.documents import read_style, render_document, render_section
from hf_protocols.drawing.lanes import Bar, Lane, choose_colours, render_lanes, render_legend
from hf_protocols.drawing.numbers import (
    format_bytes,
    format_duration,
    format_gib,
    format_milliseconds,
    format_number,
    format_seconds,
    format_sparkline,
    round_ticks,
)
from hf_protocols.drawing.shares import render_share, render_stack
from hf_protocols.drawing.tables import Markup, render_table

__all__ = [
    "Bar",
    "Curve",
    "Lane",
    "Line",
    "Markup",
    "Point",
    "choose_colours",
    "format_bytes",
    "format_duration",
    "format_gib",
    "format_milliseconds",
    "format_number",
    "format_seconds",
    "format_sparkline",
    "read_style",
    "render_curve",
    "render_document",
    "render_lanes",
    "render_legend",
    "render_section",
    "render_share",
    "render_spark",
    "render_stack",
    "render_table",
    "round_ticks",
]
