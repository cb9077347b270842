"""A plan as one self-contained HTML page: its Gantt chart, its memory on every device, its reasons. No script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hf_mapper.estimates import check_estimates
from hf_mapper.explanation import Explanation
from hf_mapper.reasons import (
    describe_bottleneck,
    describe_extension,
    describe_memory_range,
    describe_pools,
    describe_range,
    describe_winner,
)
from hf_mapper.report import (
    describe_devices,
    describe_generation,
    describe_generation_limit,
    describe_role,
    format_gib,
    format_layout,
    format_seconds,
)
from hf_protocols import MachinePlan, MappingPlan, PoolPlan

__all__ = ["build_page"]

_DRAWN_MACHINES = 64
"""Machines of a pool whose devices are drawn one by one; the others are alike and are counted."""
_DRAWN_SLOTS = 64
"""Devices of a machine that are drawn; its label has their number."""
_ROW_PX, _BAR_PX = 26, 18
_CELL_PX, _CELL_HEIGHT_PX = 12, 30

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de; --track: #eaeef2;
  --c0: #0b5cad; --c1: #8a4b00; --c2: #1a7f5a; --c3: #8b2f8b; --c4: #b3261e; --c5: #4d5761; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9ea7b3; --paper: #0d1117; --line: #30363d;
  --track: #21262d; --c0: #6cb6ff; --c1: #e3a24f; --c2: #57c99b; --c3: #d79ae6; --c4: #ff8a80; --c5: #b1bac4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } p { margin: .5rem 0; } .soft { color: var(--soft); }
svg { display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.track { fill: var(--track); } .cut { stroke: var(--line); } .edge { fill: none; stroke: var(--line); }
.s0 { fill: var(--c0); } .s1 { fill: var(--c1); } .s2 { fill: var(--c2); } .s3 { fill: var(--c3); }
.s4 { fill: var(--c4); } .s5 { fill: var(--c5); }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .5rem 0; list-style: none; }
.key svg { display: inline-block; margin-right: .35rem; }
.machines { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: end; margin: .5rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem .3rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
tr.chosen td { font-weight: 600; }
@media (max-width: 40rem) {
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; text-align: right; }
  td::before { content: attr(data-of); color: var(--soft); text-align: left; flex: none; max-width: 45%; }
  td.n { text-align: right; } }
"""


def build_page(plan: MappingPlan, explanation: Explanation | None = None) -> str:
    """The page's HTML: it loads nothing, needs no script and fits a screen 390 px wide.

    ``explanation`` adds the other placements, what bounds the iteration and how wrong the simulators may be.

    Raises:
        PlanError: for a plan without the mapper's estimates.
    """
    check_estimates(plan)
    seconds = format_seconds(plan.estimates["iteration_s"])
    parts = [
        f"<h1>{seconds} s for an iteration</h1>",
        f"<p>{_summarise(plan, explanation)}</p>",
        "<h2>Time</h2>",
        *_draw_time(plan),
        "<h2>Memory of every device</h2>",
        *_draw_memory(plan),
        "<h2>Layouts</h2>",
        _tabulate_models(plan),
        *(_tell_reasons(explanation) if explanation else []),
    ]
    title = f"Placement: {seconds} s an iteration"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _summarise(plan: MappingPlan, explanation: Explanation | None) -> str:
    found = plan.estimates.get("search", {})
    placed = [pool for pool in plan.pools if pool.name in plan.estimates["pools"]]
    devices = sum(pool.num_slots for pool in placed)
    idle = plan.estimates["idle_gpus"]
    said = [
        f"{len(placed)} pool{'s' * (len(placed) > 1)} on {devices} device{'s' * (devices > 1)}"
        + (f", {idle} idle" if idle else "")
        + ("" if found.get("complete", True) else " (search stopped: the best so far)")
        + "."
    ]
    if (limit := describe_generation_limit(plan)) is not None:
        said.append(f"G{limit[1:]}.")
    if explanation:
        said.append(describe_bottleneck(explanation.bottleneck) + ".")
    return escape(" ".join(said))


def _draw_time(plan: MappingPlan) -> Iterable[str]:
    """A row for each model, pool by pool; in a stage the models of a pool run one after another."""
    total = plan.estimates["iteration_s"] or 1.0
    stages = plan.estimates["stages"]
    busy = [index for index, stage in enumerate(stages) if stage["latency_s"]]
    keys = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" class="s{number % 6}"/></svg>'
        f"stage {index + 1}: {escape(', '.join(stages[index]['calls']))}, "
        f"{format_seconds(stages[index]['latency_s'])} s</li>"
        for number, index in enumerate(busy)
    )
    yield f'<ul class="key">{keys}</ul>'
    for pool in plan.pools:
        if pool.name not in plan.estimates["pools"]:
            continue
        roles = [role for role in plan.roles_of(pool.name) if role in plan.estimates["models"]]
        idle = 1 - sum(plan.estimates["pools"][pool.name]["stage_s"]) / total
        yield f"<h3>{escape(pool.name)}</h3>"
        devices = escape(describe_devices(plan, pool))
        yield f'<p class="soft">{devices}, idle {100 * max(0.0, idle):.0f} % of the time</p>'
        yield _draw_gantt(plan, roles, busy, total)


def _draw_gantt(plan: MappingPlan, roles: Sequence[str], busy: Sequence[int], total: float) -> str:
    height = 2 * _ROW_PX * len(roles)
    marks, told, start = [], [], 0.0
    for number, index in enumerate(busy):
        at = start
        for row, role in enumerate(roles):
            seconds = plan.estimates["models"][role]["stage_s"][index]
            if seconds:
                place = f'x="{100 * at / total:.3f}%" width="{100 * seconds / total:.3f}%"'
                top = (2 * row + 1) * _ROW_PX - 4
                hint = f"{role}, stage {index + 1}: {format_seconds(seconds)} s from {format_seconds(at)} s"
                bar = f'<rect {place} y="{top}" height="{_BAR_PX}" class="s{number % 6}">'
                marks.append(f"{bar}<title>{escape(hint)}</title></rect>")
                told.append(hint)
                at += seconds
        start += plan.estimates["stages"][index]["latency_s"]
        if number < len(busy) - 1:
            edge = f"{100 * start / total:.3f}%"
            marks.append(f'<line x1="{edge}" x2="{edge}" y1="0" y2="{height}" class="cut"/>')
    rows = "".join(
        f'<text x="0" y="{2 * row * _ROW_PX + 16}">{escape(role)}</text>'
        f'<rect x="0" width="100%" y="{(2 * row + 1) * _ROW_PX - 4}" height="{_BAR_PX}" class="track"/>'
        for row, role in enumerate(roles)
    )
    label = escape("; ".join(told), quote=True)
    return f'<svg width="100%" height="{height}" role="img" aria-label="{label}">{rows}{"".join(marks)}</svg>'


def _draw_memory(plan: MappingPlan) -> Iterable[str]:
    """Of each pool one wide bar with its parts, then a small bar for every device."""
    for pool in plan.pools:
        estimate = plan.estimates["pools"].get(pool.name)
        if estimate is None:
            continue
        roles = [role for role in plan.roles_of(pool.name) if role in plan.estimates["models"]]
        states = {role: plan.estimates["models"][role]["state_bytes"] for role in roles}
        parts = [(f"{role}: resident memory", states[role]) for role in roles]
        parts.append(("the largest call", max(0.0, estimate["memory_bytes"] - sum(states.values()))))
        used, usable = estimate["memory_bytes"], estimate["usable_bytes"]
        yield f"<h3>{escape(pool.name)}</h3>"
        yield f"<p>{format_gib(used)} of {format_gib(usable)} GiB that can be used on each of {pool.num_slots}</p>"
        yield _draw_parts(parts, usable)
        yield _draw_devices(pool, used, usable)


def _draw_parts(parts: Sequence[tuple[str, float]], usable: float) -> str:
    bars, at = [], 0.0
    for number, (name, size) in enumerate(parts):
        share = 100 * size / usable
        bars.append(
            f'<rect x="{at:.3f}%" width="{share:.3f}%" height="22" class="s{number % 6}">'
            f"<title>{escape(name)}: {format_gib(size)} GiB</title></rect>"
        )
        at += share
    told = "; ".join(f"{name} {format_gib(size)} GiB" for name, size in parts)
    keys = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" class="s{number % 6}"/></svg>'
        f"{escape(name)} {format_gib(size)} GiB</li>"
        for number, (name, size) in enumerate(parts)
    )
    return (
        f'<svg width="100%" height="22" role="img" aria-label="{escape(told, quote=True)}">'
        f'<rect width="100%" height="22" class="track"/>{"".join(bars)}</svg><ul class="key">{keys}</ul>'
    )


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
        f'height="{height:.1f}" class="s0"/>'
        for slot in range(drawn)
    )
    label = f"machine {number + 1}: {machine.slots} x {machine.gpu_kind}, each {100 * full:.0f} % full"
    width = drawn * _CELL_PX
    return (
        f'<svg viewBox="0 0 {width} {_CELL_HEIGHT_PX + 2}" style="width:{width}px;max-width:100%" role="img" '
        f'aria-label="{escape(label, quote=True)}"><title>{escape(label)}</title>{cells}</svg>'
    )


def _tabulate_models(plan: MappingPlan) -> str:
    rows = []
    for role, model in plan.models.items():
        estimate = plan.estimates["models"].get(role)
        if model.train is None or estimate is None:
            rows.append((role, model.pool, model.backend, "-", "-", "-"))
            continue
        rows.append((
            describe_role(role, model),
            model.pool,
            f"{format_layout(model.train)} {model.backend}",
            describe_generation(model, estimate["generation_waves"]),
            format_gib(estimate["state_bytes"]),
            format_gib(estimate["work_bytes"]),
        ))  # fmt: skip
    headings = ("model", "pool", "pp-tp-dp", "generates pp-tp", "GiB that stay", "GiB of a call")
    return _tabulate(headings, rows, numbers={4, 5})


def _tell_reasons(explanation: Explanation) -> Iterable[str]:
    yield "<h2>Why not another placement</h2>"
    rows = [
        (
            describe_pools(entry.pools) + (f" ({entry.name})" if entry.name else ""),
            "-" if entry.num_gpus is None else " | ".join(map(str, entry.num_gpus)),
            "-" if entry.iteration_s is None else format_seconds(entry.iteration_s),
            entry.reason,
        )
        for entry in explanation.alternatives
    ]
    yield _tabulate(("pools", "devices", "s", "why"), rows, numbers={2}, chosen=0)
    yield "<h2>Bottlenecks</h2>"
    saved = sorted(explanation.bottleneck.saved_s.items(), key=lambda item: -item[1])
    twice = [(f"2x throughput of {resource}", format_seconds(saved_s)) for resource, saved_s in saved]
    yield _tabulate(("resource", "s saved"), twice, numbers={1})
    yield from (f"<p>{escape(describe_extension(entry))}.</p>" for entry in explanation.extensions)
    if explanation.tolerances:
        yield "<h2>Sensitivity</h2>"
        yield "<p>Factors on the seconds of one simulator between which no other plan is better.</p>"
        headings = ("simulator", "factors", "below wins", "above wins", "loss at 0.8", "loss at 1.25")
        tolerances = [
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
        yield _tabulate(headings, tolerances, numbers={4, 5})
    if explanation.memory:
        yield f"<p>{escape(describe_memory_range(explanation.plan, explanation.memory))}.</p>"
    if not explanation.complete:
        yield "<p>Stopped by the time limit: other placements and reasons were not looked at.</p>"


def _tabulate(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: set[int], chosen: int | None = None
) -> str:
    """A table; on a narrow screen every row is a block that repeats the headings."""

    def kind(column: int) -> str:
        return ' class="n"' if column in numbers else ""

    head = "".join(f'<th scope="col"{kind(column)}>{escape(name)}</th>' for column, name in enumerate(headings))
    body = "".join(
        f"<tr{' class=chosen' * (number == chosen)}>"
        + "".join(
            f'<td data-of="{escape(headings[column], quote=True)}"{kind(column)}>{escape(str(cell))}</td>'
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
