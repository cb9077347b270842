"""Plans, simulations, stages of a run, errors and calibrations as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_mapper.explain.terminal import print_table
from hf_mapper.measurements.calibration import Calibration
from hf_mapper.measurements.traces import StageError
from hf_mapper.measurements.validation import SourceErrors
from hf_mapper.search.planning import find_machines
from hf_mapper.search.simulation import Simulation
from hf_mapper.specs import SHIPPED_GENERATION
from hf_protocols import (
    MappingPlan,
    ModelPlan,
    PlanEstimates,
    PoolEstimate,
    PoolPlan,
)
from hf_protocols.drawing import format_gib, format_seconds

__all__ = [
    "build_table",
    "describe_devices",
    "describe_generation",
    "describe_generation_limit",
    "describe_role",
    "render_calibration",
    "render_errors",
    "render_plan",
    "render_simulation",
    "render_stage_errors",
]

_BAR_CELLS = 10


def render_plan(plan: MappingPlan, console: Console) -> None:
    """Prints tables of pools, models and stages, and one line with the iteration's time.

    Raises:
        PlanError: for a plan without the mapper's estimates.
    """
    estimates = plan.require_estimates()
    print_table(console, _build_pool_table(plan, estimates), drop=("GiB on each", "devices"))
    stages = [f"stage {number}" for number in range(len(estimates.stages), 0, -1)]
    print_table(console, _build_model_table(plan, estimates), drop=("work", "state", *stages, "generate"))
    print_table(console, _build_stage_table(estimates), drop=("waits for pool", "s"))
    console.print(_build_summary(plan, estimates))


def render_errors(errors: Sequence[SourceErrors], console: Console) -> None:
    """Prints a table for each file, a line for each source, phase and GPU; then what was skipped and why.

    The software is the one that the simulators assumed.
    """
    for file in dict.fromkeys(source.file for source in errors):
        table = build_table(f"{file}: errors and regret in %", "source", "phase", "gpu", "software")
        for heading in ("rows", "MAPE", "bias", "rank", "regret"):
            table.add_column(heading, justify="right", no_wrap=True)
        for source in (entry for entry in errors if entry.file == file):
            software = ", ".join(source.software) or "-"
            table.add_row(source.source, source.phase, source.gpu, software, *_error_figures(source))
        print_table(console, table, drop=("software", "rank", "regret", "bias", "rows", "phase"))
    skipped = [(source, reason, count) for source in errors for reason, count in source.rows_skipped.items()]
    for source, reason, count in skipped:
        console.print(Text(f"{source.file}, {source.source}, {source.gpu}: {count} rows skipped: {reason}"))


def _error_figures(source: SourceErrors) -> tuple[str, ...]:
    """Rows, MAPE, bias, rank correlation, and the mean and worst regret of the sweeps."""
    regrets = [sweep.regret for sweep in source.sweeps]
    regret = f"{_percent(sum(regrets) / len(regrets))} to {_percent(max(regrets))}" if regrets else "-"
    rank = "-" if source.spearman is None else f"{source.spearman:.3f}"
    return str(source.rows_used), _percent(source.mape), _percent(source.bias), rank, regret


def render_calibration(found: Sequence[Calibration], console: Console) -> None:
    """Prints the constants of each GPU and software, and the error of each model when it was left out."""
    for calibration in found:
        title = f"{calibration.gpu}, {calibration.stack}: {calibration.rows} rows, MAPE {_percent(calibration.mape)} %"
        table = build_table(title, "constant", "value")
        for name, value in calibration.constants.items():
            table.add_row(name, f"{value:.3g}")
        print_table(console, table)
        for error in calibration.left_out:
            console.print(
                Text(f"left out {error.group}, {error.rows} rows: MAPE {_percent(error.mape)} %"), highlight=False
            )


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def build_table(title: str, *headings: str) -> Table:
    """A table whose columns so far may wrap; numbers' columns are added by the caller."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _build_pool_table(plan: MappingPlan, estimates: PlanEstimates) -> Table:
    table = build_table("Pools", "pool", "devices")
    table.add_column("GiB on each", no_wrap=True)
    for pool in plan.pools:
        table.add_row(pool.name, describe_devices(plan, pool), _draw_memory(estimates.pools.get(pool.name)))
    return table


def _build_model_table(plan: MappingPlan, estimates: PlanEstimates) -> Table:
    """Seconds stand in the columns of the stages that take any."""
    busy = [index for index, stage in enumerate(estimates.stages) if stage.latency_s]
    table = build_table("Models: layouts pp-tp-dp and pp-tp, seconds in each stage, GiB on each device", "model")
    table.add_column("train", no_wrap=True)
    table.add_column("generate", overflow="fold")
    for heading in (*(f"stage\n{index + 1}" for index in busy), "state", "work"):
        table.add_column(heading, justify="right", no_wrap=True)
    for role, model in plan.models.items():
        estimate = estimates.models.get(role)
        if model.train is None or estimate is None:
            table.add_row(role, model.backend)
            continue
        table.add_row(
            describe_role(role, model),
            f"{model.train} {model.backend}",
            describe_generation(model, estimate.generation_waves),
            *(format_seconds(estimate.stage_s[index]) for index in busy),
            format_gib(estimate.state_bytes),
            format_gib(estimate.work_bytes),
        )
    return table


def _build_stage_table(estimates: PlanEstimates) -> Table:
    table = build_table("Stages", "stage", "calls", "s", "waits for pool")
    for number, stage in enumerate(estimates.stages, start=1):
        table.add_row(str(number), "\n".join(stage.calls), format_seconds(stage.latency_s), stage.waits_for or "-")
    return table


def _build_summary(plan: MappingPlan, estimates: PlanEstimates) -> Text:
    idle = f", {estimates.idle_gpus} devices idle" if estimates.idle_gpus else ""
    found = estimates.search
    gap = "an unknown part" if found.gap is None else f"{100 * found.gap:.2g} %"
    proven = "" if found.complete else f" (search stopped: the best so far, at most {gap} from the best)"
    summary = Text(f"iteration {format_seconds(estimates.iteration_s)} s{idle}{proven}", style="bold")
    tokens = sorted({model.micro_batch_tokens for model in plan.models.values() if model.train is not None})
    bounds = " or ".join(f"{count:,}" for count in tokens)
    summary.append(f"\nassumes micro_batch_tokens = {bounds} (from the configuration; not tuned by the mapper)", "none")
    if (adapters := estimates.adapters) is not None:
        sizes = ", ".join(f"{count:,} parameters of {role}" for role, count in adapters.parameters.items())
        summary.append(f"\ntrains adapters of rank {adapters.rank}, {sizes}; the base is frozen, in float32", "none")
    if (limit := describe_generation_limit(plan)) is not None:
        summary.append(f"\n{limit}", "none")
    return summary


def describe_generation_limit(plan: MappingPlan) -> str | None:
    """States the generation layouts that were searched and how to allow more; None for all or unknown."""
    largest = plan.estimates.largest_generation if plan.estimates else None
    if largest is None or all(model.generation is None for model in plan.models.values()):
        return None
    shipped = ", what the shipped engines run" if largest == str(SHIPPED_GENERATION) else ""
    return f"generation layouts of at most {largest}{shipped} (largest_generation of the workload)"


def describe_devices(plan: MappingPlan, pool: PoolPlan) -> str:
    """`"16 x a100-80 on 2 machines"`, one part for each kind."""
    slots, machines = Counter[str](), Counter[str]()
    for machine in pool.machines:
        slots[machine.gpu_kind] += machine.slots
        machines[machine.gpu_kind] += 1
    return ", ".join(
        f"{slots[kind]} x {find_machines(plan, pool.name, kind)}"
        + (f" on {machines[kind]} machines" if machines[kind] > 1 else "")
        for kind in slots
    )


def describe_role(role: str, model: ModelPlan) -> str:
    """The role, and whether its model rests in host memory between its calls."""
    return f"{role} (offloaded)" if model.offload else role


def describe_generation(model: ModelPlan, num_waves: int | None) -> str:
    """The generation layout, and its number of waves where there are several."""
    if model.generation is None:
        return "-"
    waves = f", {num_waves} waves" if num_waves and num_waves > 1 else ""
    return f"{model.generation}{waves}"


def _draw_memory(pool: PoolEstimate | None) -> Text:
    if pool is None:
        return Text("-")
    part = pool.memory_bytes / pool.usable_bytes
    full = min(_BAR_CELLS, round(part * _BAR_CELLS))
    bar = "#" * full + "." * (_BAR_CELLS - full)
    return Text(f"{bar} {format_gib(pool.memory_bytes)} of {format_gib(pool.usable_bytes)}")


def render_stage_errors(errors: Sequence[StageError], console: Console) -> None:
    """Prints a line for each stage: predicted and measured milliseconds an iteration, and the error in %."""
    table = build_table("Stages of the run: milliseconds an iteration")
    for heading in ("stage", "call"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted", "measured", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in errors:
        figures = (f"{1e3 * stage.predicted_s:.1f}", f"{1e3 * stage.measured_s:.1f}", f"{100 * stage.error:+.1f}")
        table.add_row(stage.phase, f"{stage.role}.{stage.method}", *figures)
    print_table(console, table, drop=("stage", "predicted", "measured"))


def render_simulation(simulation: Simulation, console: Console) -> None:
    """Prints a line for each call: its seconds, GiB of those usable per device, and which parts its time has."""
    table = build_table("Calls")
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
