"""A breakdown as tables in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.report._breakdown import Breakdown, Usage
from hf_protocols.drawing import format_bytes, format_duration

if TYPE_CHECKING:  # pages do without rich
    from rich.console import Console
    from rich.table import Table

__all__ = ["render_breakdown"]


def render_breakdown(breakdown: Breakdown, console: Console) -> None:
    """Prints a line of wall time, a table of roles and methods, and a table of pools."""
    from hf_mapper.explain.terminal import print_table  # a run that follows a plan does without hf-mapper

    num_calls = sum(usage.num_calls for usage in breakdown.roles)
    console.print(
        f"{num_calls} calls in {format_duration(breakdown.wall_s)}. Seconds and bytes are sums over ranks; "
        "busy: share of that time in which at least one rank was running this."
    )
    print_table(console, _build_role_table(breakdown), drop=("remote", "read", "fetch", "queue", "calls", "busy"))
    print_table(console, _build_pool_table(breakdown), drop=("busy", "slots"))


def _build_table(*headings: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _build_role_table(breakdown: Breakdown) -> Table:
    from rich.text import Text

    table = _build_table("role, method", "calls", "compute", "fetch", "queue", "read", "remote", "busy")
    for role in breakdown.roles:
        table.add_row(Text(role.role), *_cells(role), style="bold")
        for usage in breakdown.methods:
            if usage.role == role.role:
                table.add_row(Text(f" {usage.method}"), *_cells(usage))
    return table


def _cells(usage: Usage) -> list[str]:
    times_s = (usage.compute_s, usage.fetch_s, usage.queue_s)
    sizes = (usage.bytes_read, usage.remote_bytes)
    return [f"{usage.num_calls:,}", *map(_format_s, times_s), *map(format_bytes, sizes), f"{usage.wall_share:.0%}"]


def _build_pool_table(breakdown: Breakdown) -> Table:
    from rich.text import Text

    table = _build_table("pool", "slots", "busy", "idle")
    for pool in breakdown.pools:
        table.add_row(Text(pool.pool), str(pool.num_slots), _format_s(pool.busy_s), f"{pool.idle_share:.1%}")
    return table


def _format_s(seconds: float) -> str:
    return f"{seconds:,.2f}"
