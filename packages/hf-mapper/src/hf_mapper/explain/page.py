"""A plan as one self-contained HTML page: its Gantt chart, its memory on every device, its reasons. No script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hf_mapper.explain.explanation import Explanation
from hf_mapper.explain.reasons import (
    describe_bottleneck,
    describe_extension,
    describe_memory_range,
    describe_pools,
    describe_range,
    describe_winner,
)
from hf_mapper.explain.report import (
    describe_devices,
    describe_generation,
    describe_generation_limit,
    describe_role,
)
from hf_protocols import MachinePlan, MappingPlan, PlanEstimates, PoolPlan
from hf_protocols.drawing import (
    Bar,
    Lane,
    choose_colours,
    format_gib,
    format_seconds,
    render_document,
    render_lanes,
    render_legend,
    render_section,
    render_stack,
    render_table,
)

__all__ = ["build_page"]

_DRAWN_MACHINES = 64
"""Machines of a pool whose devices are drawn one by one; the others are alike and are counted."""
_DRAWN_SLOTS = 64
"""Devices of a machine that are drawn; its label has their number."""
_CELL_PX, _CELL_HEIGHT_PX = 12, 30


def build_page(plan: MappingPlan, explanation: Explanation | None = None) -> str:
    """The page's HTML: it loads nothing, needs no script and fits a screen 390 px wide.

    `explanation` adds the other placements, the bottleneck and the sensitivity to errors of the simulators.

    Raises:
        PlanError: for a plan without the mapper's estimates.
    """
    seconds = format_seconds(plan.require_estimates().iteration_s)
    lead = escape(_summarise(plan, explanation))
    header = f'<p class="brand">HybridFlow <span>PLACEMENT</span></p><h1>{seconds} s for an iteration</h1><p>{lead}</p>'
    parts = [
        f"<header>{header}</header>",
        render_section("Time", "One row per model, one bar per stage.", _draw_time(plan)),
        render_section("Memory of every device", "", "".join(_draw_memory(plan))),
        render_section("Layouts", "", _tabulate_models(plan)),
        *(_tell_reasons(explanation) if explanation else []),
    ]
    return render_document(f"Placement: {seconds} s an iteration", "\n".join(parts))


def _summarise(plan: MappingPlan, explanation: Explanation | None) -> str:
    estimates = plan.require_estimates()
    placed = [pool for pool in plan.pools if pool.name in estimates.pools]
    devices = sum(pool.num_slots for pool in placed)
    idle = estimates.idle_gpus
    said = [
        f"{len(placed)} pool{'s' * (len(placed) > 1)} on {devices} device{'s' * (devices > 1)}"
        + (f", {idle} idle" if idle else "")
        + ("" if estimates.search.complete else " (search stopped: the best so far)")
        + "."
    ]
    if (limit := describe_generation_limit(plan)) is not None:
        said.append(f"G{limit[1:]}.")
    if explanation:
        said.append(describe_bottleneck(explanation.bottleneck) + ".")
    return " ".join(said)


def _draw_time(plan: MappingPlan) -> str:
    """A lane for each model, pool by pool; in a stage the models of a pool run one after another."""
    estimates = plan.require_estimates()
    total, stages = estimates.iteration_s or 1.0, estimates.stages
    busy = [index for index, stage in enumerate(stages) if stage.latency_s]
    names = {
        f"stage {index + 1}: {', '.join(stages[index].calls)}, {format_seconds(stages[index].latency_s)} s": index
        for index in busy
    }
    parts = [render_legend(choose_colours(names))]
    for pool in plan.pools:
        if pool.name not in estimates.pools:
            continue
        roles = [role for role in plan.roles_of(pool.name) if role in estimates.models]
        idle = 1 - sum(estimates.pools[pool.name].stage_s) / total
        devices = escape(describe_devices(plan, pool))
        parts.append(f"<h3>{escape(pool.name)}</h3>")
        parts.append(f'<p class="soft">{devices}, idle {100 * max(0.0, idle):.0f} % of the time</p>')
        lanes = _build_lanes(estimates, roles, busy)
        parts.append(render_lanes(lanes, span=total, format_tick=lambda tick: "0 s" if tick == 0 else f"{tick:g}"))
    return "".join(parts)


def _build_lanes(estimates: PlanEstimates, roles: Sequence[str], busy: Sequence[int]) -> list[Lane]:
    bars: dict[str, list[Bar]] = {role: [] for role in roles}
    start = 0.0
    for number, index in enumerate(busy):
        at = start
        for role in roles:
            seconds = estimates.models[role].stage_s[index]
            if seconds:
                title = f"{role}, stage {index + 1}: {format_seconds(seconds)} s from {format_seconds(at)} s"
                bar = Bar(start=at, end=at + seconds, title=title, colour=number % 8, text=f"stage {index + 1}")
                bars[role].append(bar)
                at += seconds
        start += estimates.stages[index].latency_s
    return [
        Lane(label=role, note="", description="; ".join(bar.title for bar in own), bars=own)
        for role, own in bars.items()
    ]


def _draw_memory(plan: MappingPlan) -> Iterable[str]:
    """Of each pool one wide bar with its parts, then a small bar for every device."""
    estimates = plan.require_estimates()
    for pool in plan.pools:
        estimate = estimates.pools.get(pool.name)
        if estimate is None:
            continue
        roles = [role for role in plan.roles_of(pool.name) if role in estimates.models]
        states = {role: estimates.models[role].state_bytes for role in roles}
        parts = [(f"{role}: resident memory", states[role]) for role in roles]
        parts.append(("the largest call", max(0.0, estimate.memory_bytes - sum(states.values()))))
        used, usable = estimate.memory_bytes, estimate.usable_bytes
        yield f"<h3>{escape(pool.name)}</h3>"
        yield f"<p>{format_gib(used)} of {format_gib(usable)} GiB that can be used on each of {pool.num_slots}</p>"
        yield render_stack([(f"{name} {format_gib(size)} GiB", size / usable) for name, size in parts])
        yield _draw_devices(pool, used, usable)


def _draw_devices(pool: PoolPlan, used: float, usable: float) -> str:
    full = min(1.0, used / usable)
    drawn = pool.machines[:_DRAWN_MACHINES]
    machines = "".join(_draw_machine(number, machine, full) for number, machine in enumerate(drawn))
    rest = len(pool.machines) - len(drawn)
    more = f'<p class="soft">and {rest} machines more, filled alike</p>' if rest else ""
    return f'<div class="machines">{machines}</div>{more}'


def _draw_machine(number: int, machine: MachinePlan, full: float) -> str:
    """The devices of a machine side by side, each filled from the bottom."""
    height, drawn = full * _CELL_HEIGHT_PX, min(machine.slots, _DRAWN_SLOTS)
    cells = "".join(
        f'<rect x="{slot * _CELL_PX + 1}" y="1" width="{_CELL_PX - 3}" height="{_CELL_HEIGHT_PX}" class="track"/>'
        f'<rect x="{slot * _CELL_PX + 1}" y="{_CELL_HEIGHT_PX + 1 - height:.1f}" width="{_CELL_PX - 3}" '
        f'height="{height:.1f}" class="fill c0"/>'
        for slot in range(drawn)
    )
    label = f"machine {number + 1}: {machine.slots} x {machine.gpu_kind}, each {100 * full:.0f} % full"
    width = drawn * _CELL_PX
    return (
        f'<svg viewBox="0 0 {width} {_CELL_HEIGHT_PX + 2}" style="width:{width}px;max-width:100%" role="img" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>{cells}</svg>'
    )


def _tabulate_models(plan: MappingPlan) -> str:
    rows = []
    estimates = plan.require_estimates().models
    for role, model in plan.models.items():
        estimate = estimates.get(role)
        if model.train is None or estimate is None:
            rows.append((role, model.pool, model.backend, "-", "-", "-"))
            continue
        rows.append((
            describe_role(role, model),
            model.pool,
            f"{model.train} {model.backend}",
            describe_generation(model, estimate.generation_waves),
            format_gib(estimate.state_bytes),
            format_gib(estimate.work_bytes),
        ))  # fmt: skip
    headings = ("model", "pool", "pp-tp-dp", "generates pp-tp", "GiB that stay", "GiB of a call")
    return render_table(headings, rows, numbers=(4, 5), style="stacked")


def _tell_reasons(explanation: Explanation) -> Iterable[str]:
    rows = [
        (
            describe_pools(entry.pools) + (f" ({entry.name})" if entry.name else ""),
            "-" if entry.num_gpus is None else " | ".join(map(str, entry.num_gpus)),
            "-" if entry.iteration_s is None else format_seconds(entry.iteration_s),
            entry.reason,
        )
        for entry in explanation.alternatives
    ]
    table = render_table(("pools", "devices", "s", "why"), rows, numbers=(2,), chosen=0, style="stacked")
    yield render_section("Why not another placement", "", table)
    saved = sorted(explanation.bottleneck.saved_s.items(), key=lambda item: -item[1])
    twice = [(f"2x throughput of {resource}", format_seconds(saved_s)) for resource, saved_s in saved]
    extensions = "".join(f"<p>{escape(describe_extension(entry))}.</p>" for entry in explanation.extensions)
    table = render_table(("resource", "s saved"), twice, numbers=(1,), style="stacked")
    yield render_section("Bottlenecks", "", table + extensions)
    if explanation.tolerances:
        lead = "Factors on the seconds of one simulator between which no other plan is better."
        yield render_section("Sensitivity", lead, _tabulate_tolerances(explanation))
    if explanation.memory:
        yield f"<p>{escape(describe_memory_range(explanation.plan, explanation.memory))}.</p>"
    if not explanation.complete:
        yield "<p>Stopped by the time limit: other placements and reasons were not looked at.</p>"


def _tabulate_tolerances(explanation: Explanation) -> str:
    rows = [
        (
            entry.simulator,
            describe_range(entry),
            describe_winner(explanation.plan, entry.winner_below),
            describe_winner(explanation.plan, entry.winner_above),
            f"{100 * entry.loss_if_faster:.1f} %",
            f"{100 * entry.loss_if_slower:.1f} %",
        )
        for entry in explanation.tolerances
    ]
    headings = ("simulator", "factors", "below wins", "above wins", "loss at 0.8", "loss at 1.25")
    return render_table(headings, rows, numbers=(4, 5), style="stacked")
