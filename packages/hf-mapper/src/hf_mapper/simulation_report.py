"""Stages as tables: what a placement would take, and what a run took against it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_mapper.simulation import Simulation
from hf_mapper.terminal import print_table
from hf_mapper.traces import StageError
from hf_protocols.drawing import format_seconds

__all__ = ["render_simulation", "render_stage_errors"]


def render_stage_errors(errors: Sequence[StageError], console: Console) -> None:
    """Print a line for each stage: predicted and measured milliseconds an iteration, and the error in %."""
    table = _build_table("Stages of the run: milliseconds an iteration")
    for heading in ("stage", "call"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted", "measured", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in errors:
        figures = (f"{1e3 * stage.predicted_s:.1f}", f"{1e3 * stage.measured_s:.1f}", f"{100 * stage.error:+.1f}")
        table.add_row(stage.phase, f"{stage.role}.{stage.method}", *figures)
    print_table(console, table, drop=("stage", "predicted", "measured"))


def render_simulation(simulation: Simulation, console: Console) -> None:
    """Print a line for each call: its seconds, GiB of those usable per device, and which parts its time has."""
    table = _build_table("Calls")
    table.add_column("stage", no_wrap=True)
    table.add_column("call", no_wrap=True)
    for heading in ("seconds", "GiB", "of"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("% of the time")
    for call in simulation.calls:
        parts = sorted(call.breakdown.items(), key=lambda part: -part[1])
        shares = [(name.removesuffix("_s").replace("_", " "), 100 * part / call.latency_s) for name, part in parts]
        named = ", ".join(f"{name} {share:.0f}" for name, share in shares if share >= 1)
        figures = (
            format_seconds(call.latency_s),
            f"{call.memory_bytes / 2**30:.1f}",
            f"{call.usable_bytes / 2**30:.1f}",
        )
        table.add_row(str(call.stage + 1), f"{call.role}.{call.method}", *figures, named)
    print_table(console, table, drop=("% of the time", "of", "stage", "GiB"))


def _build_table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
