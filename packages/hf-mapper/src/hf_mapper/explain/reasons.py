"""An explanation as tables: the plan, other placements, bottlenecks, gain from more, and sensitivity."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_mapper.explain.alternatives import Alternative
from hf_mapper.explain.bottlenecks import Bottleneck, Extension
from hf_mapper.explain.explanation import Explanation
from hf_mapper.explain.memory_tolerance import MemoryTolerance
from hf_mapper.explain.report import build_table, render_plan
from hf_mapper.explain.robustness import MOST_FACTOR, Tolerance
from hf_mapper.explain.terminal import print_table
from hf_protocols import MappingPlan
from hf_protocols.drawing import format_seconds

__all__ = [
    "describe_bottleneck",
    "describe_extension",
    "describe_memory_range",
    "describe_pools",
    "describe_range",
    "describe_winner",
    "render_explanation",
]


def render_explanation(explanation: Explanation, console: Console) -> None:
    """Prints the plan as `render_plan` does, then its reasons."""
    render_plan(explanation.plan, console)
    console.print()
    print_table(console, _build_alternative_table(explanation.alternatives), drop=("why", "devices"))
    console.print(Text(describe_bottleneck(explanation.bottleneck)), highlight=False)
    print_table(console, _build_saving_table(explanation.bottleneck))
    for extension in explanation.extensions:
        console.print(Text(describe_extension(extension)), highlight=False)
    if not explanation.extensions and explanation.complete:
        console.print(Text("The gain of one more machine needs the cluster's inter_bandwidth_bytes_per_s"))
    if explanation.tolerances:
        console.print()
        table = _build_tolerance_table(explanation.plan, explanation.tolerances)
        print_table(console, table, drop=("loss at 0.8, 1.25", "above wins", "below wins", "error"))
    if explanation.memory:
        console.print(Text(describe_memory_range(explanation.plan, explanation.memory)), highlight=False)
    if not explanation.complete:
        console.print(Text("Stopped by the time limit: other placements and reasons were not looked at", style="bold"))


def describe_pools(pools: tuple[tuple[str, ...], ...]) -> str:
    """`"actor+reference | critic+reward"`."""
    return " | ".join("+".join(roles) for roles in pools)


def describe_bottleneck(found: Bottleneck) -> str:
    """The stage, the pool and the resource that bound an iteration, in a line."""
    return (
        f"Bound by stage {found.stage + 1} ({', '.join(found.calls)}): {format_seconds(found.latency_s)} s, "
        f"{100 * found.part:.0f} % of the iteration, on pool {'+'.join(found.pool)}, by {found.resource}"
    )


def describe_extension(found: Extension) -> str:
    """Returns the gain from one more machine, in a line."""
    idle = f", {found.idle_gpus} devices idle" if found.idle_gpus else ""
    bought = f"{100 * found.saved_part:.1f} % less" if found.saved_part > 5e-4 else "nothing gained"
    return (
        f"One more machine of {found.gpu_kind} ({found.num_machines} in all): "
        f"iteration {format_seconds(found.iteration_s)} s, {bought}{idle}"
    )


def describe_range(found: Tolerance) -> str:
    """`"0.92 to 1.8"`: the factors between which the plan stays optimal; open where no search found an end."""
    low = f"{found.optimal_from:.3g}" if found.winner_below else f"below {1 / MOST_FACTOR:.3g}"
    high = f"{found.optimal_to:.3g}" if found.winner_above else f"above {MOST_FACTOR:.3g}"
    return f"{low} to {high}"


def describe_memory_range(plan: MappingPlan, found: MemoryTolerance) -> str:
    """Between which factors on the bytes the plan stays optimal, and what takes over below, in a line."""
    low = f"{found.optimal_from:.3g}" if found.winner_below else f"less than {found.optimal_from:.3g}"
    below = f"; with less {describe_winner(plan, found.winner_below)} fits and is faster" if found.winner_below else ""
    return (
        f"Memory: the plan stays optimal where models need {low} to {found.optimal_to:.3g} times the bytes that were "
        f"predicted; with more it does not fit{below}"
    )


def describe_winner(plan: MappingPlan, winner: tuple[tuple[str, ...], ...]) -> str:
    """The pools that take over, or that only the layouts change."""
    if not winner:
        return "-"
    own = {frozenset(plan.roles_of(pool.name)) for pool in plan.pools if pool.name in plan.require_estimates().pools}
    return "other layouts" if set(map(frozenset, winner)) == own else describe_pools(winner)


def _build_alternative_table(alternatives: tuple[Alternative, ...]) -> Table:
    table = build_table("Placements: the best plan of each", "pools", "devices")
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for entry in alternatives:
        name = f" ({entry.name})" if entry.name else ""
        devices = "-" if entry.num_gpus is None else " | ".join(map(str, entry.num_gpus))
        seconds = "-" if entry.iteration_s is None else format_seconds(entry.iteration_s)
        style = "bold" if entry.chosen else ""
        table.add_row(describe_pools(entry.pools) + name, devices, seconds, entry.reason, style=style)
    return table


def _build_saving_table(found: Bottleneck) -> Table:
    table = build_table("Bottlenecks", "2x throughput of")
    table.add_column("s saved", justify="right", no_wrap=True)
    for resource, saved_s in sorted(found.saved_s.items(), key=lambda item: -item[1]):
        table.add_row(resource, format_seconds(saved_s))
    return table


def _build_tolerance_table(plan: MappingPlan, tolerances: tuple[Tolerance, ...]) -> Table:
    table = build_table("Sensitivity: error factors of each cost model within which this plan stays optimal")
    table.add_column("simulator", no_wrap=True)
    for heading in ("factors", "error"):
        table.add_column(heading, no_wrap=True, justify="right")
    for heading in ("below wins", "above wins", "loss at 0.8, 1.25"):
        table.add_column(heading, overflow="fold")
    for found in tolerances:
        table.add_row(
            found.simulator,
            describe_range(found),
            _describe_error(found),
            describe_winner(plan, found.winner_below),
            describe_winner(plan, found.winner_above),
            f"{100 * found.loss_if_faster:.1f} %, {100 * found.loss_if_slower:.1f} %",
        )
    return table


def _describe_error(found: Tolerance) -> str:
    """The largest error either way; at least that, where the end that bounds it is only as far as was looked."""
    open_ended = not found.winner_below if found.largest_error == 1 - found.optimal_from else not found.winner_above
    return f"{'over ' * open_ended}{100 * found.largest_error:.0f} %"
