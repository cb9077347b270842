"""The ``hf-mapper`` command."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hf_mapper.calibration import calibrate_folder
from hf_mapper.config import read_config
from hf_mapper.explanation import explain_plan
from hf_mapper.page import build_page
from hf_mapper.reasons import render_explanation
from hf_mapper.report import render_calibration, render_errors, render_plan
from hf_mapper.search import StopSign, map_dataflow
from hf_mapper.simulation import parse_placement, read_placement, simulate_placement
from hf_mapper.simulation_report import render_simulation, render_stage_errors
from hf_mapper.traces import TraceConstants, calibrate_traces, validate_trace
from hf_mapper.validation import build_report, validate_folder
from hf_protocols import HybridFlowError, MappingPlan

__all__ = ["calibrate", "explain", "main", "plan", "simulate", "validate"]


class _InputError(click.ClickException):
    """A user's mistake: one line, exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """Commands whose arguments, where they cannot be used, end in one line like any other mistake."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _InputError(error.format_message()) from error


def _read_time_limit(context: click.Context, option: click.Parameter, seconds: float | None) -> StopSign:
    """The clock as a stop sign, from now on; without a limit one that never comes."""
    if seconds is not None and not seconds >= 0:
        raise _InputError(f"--time-limit: {seconds:g} must be at least 0 seconds")
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


_time_limit = click.option(
    "--time-limit",
    "should_stop",
    type=float,
    callback=_read_time_limit,
    metavar="SECONDS",
    help="Stop then with what was found, and the plan's proven gap. One plan is always found first.",
)


@click.group(cls=_Commands)
@click.version_option(package_name="hf-mapper")
def main() -> None:
    """Which GPUs, which placement, which parallelism: the device mapper of HybridFlow."""


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the plan as JSON, as hf_controller and hybridflow read it."
)
@_time_limit
@click.option("--html", type=click.Path(path_type=Path), help="Write the plan as one self-contained page to this file.")
def plan(config: Path, as_json: bool, html: Path | None, should_stop: StopSign) -> None:
    """Place the models of CONFIG, a TOML file, on its cluster."""
    try:
        problem = read_config(config)
        found = map_dataflow(
            problem.dataflow,
            problem.models,
            problem.cluster,
            problem.workload,
            should_stop,
            backends=problem.backends,
        )
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if html is not None:
        _write_page(html, build_page(found))
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_plan(found, Console())


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the plan is its key `plan`.")
@_time_limit
@click.option("--html", type=click.Path(path_type=Path), help="Write plan and reasons as one page to this file.")
@click.option("--quick", is_flag=True, help="Leave out how wrong the simulators may be: hundreds of searches less.")
def explain(config: Path, as_json: bool, html: Path | None, quick: bool, should_stop: StopSign) -> None:
    """Say why the plan of CONFIG is the best: other placements, what bounds it, how sure it is."""
    try:
        found = explain_plan(read_config(config), should_stop, robustness=not quick)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if html is not None:
        _write_page(html, build_page(found.plan, found))
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_explanation(found, Console())


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _InputError(f"--html: {path} cannot be written: {error.strerror}") from error


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--placement",
    required=True,
    metavar="PLACEMENT",
    help="Pools, such as actor+reference=8,critic+reward=8 (=8@h100 names the kind, =8@h100#2 its second entry), or a "
    "plan's JSON file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan of the placement and every call as JSON.")
def simulate(config: Path, placement: str, as_json: bool) -> None:
    """Say what a given placement of CONFIG's models takes: seconds and bytes of every call, stage by stage."""
    try:
        problem = read_config(config)
        if placement.endswith(".json"):
            pools = read_placement(MappingPlan.from_json(_read(Path(placement))))
        else:
            pools = parse_placement(placement)
        found = simulate_placement(
            problem.dataflow, problem.models, problem.cluster, problem.workload, pools, backends=problem.backends
        )
        found.check_memory()
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        calls = [{**asdict(call), "excess_bytes": call.excess_bytes} for call in found.calls]
        click.echo(json.dumps({"plan": json.loads(found.plan.to_json()), "calls": calls}, indent=2))
    else:
        render_plan(found.plan, Console())
        render_simulation(found, Console())


@main.command()
@click.option("--data", type=click.Path(path_type=Path), help="A folder of measured tables, *.csv.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="The trace.json in the directory of a run of hybridflow."
)
@click.option("--constants", type=click.Path(path_type=Path), help="With --trace: what calibrate --output wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; errors are fractions.")
def validate(data: Path | None, trace: Path | None, constants: Path | None, as_json: bool) -> None:
    """Compare the simulators with measured tables, recognised by their columns, or with a run of hybridflow."""
    if (data is None) == (trace is None):
        raise _InputError("give either --data, a folder of measured tables, or --trace, a run's trace.json")
    if data is not None and constants is not None:
        raise _InputError("--constants goes with --trace: with --data the shipped constants are compared")
    if data is None:
        assert trace is not None, "one of the two is given"
        _validate_trace(trace, constants, as_json=as_json)
        return
    try:
        errors = validate_folder(data)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(json.dumps(build_report(errors), indent=2))
    else:
        render_errors(errors, Console())


@main.command()
@click.option("--data", type=click.Path(path_type=Path), help="A folder of measured tables, *.csv.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    help="The trace.json in the directory of a run of hybridflow; several runs of different sizes tell more.",
)
@click.option("--output", type=click.Path(path_type=Path), help="With --trace: write the constants here, as JSON.")
@click.option("--stack", help="With --data: only this software, such as pytorch or vllm.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; errors are fractions.")
def calibrate(
    data: Path | None, traces: tuple[Path, ...], output: Path | None, stack: str | None, as_json: bool
) -> None:
    """Fit the constants of each GPU and software in measured tables; every model is left out once and scored.

    With --trace, fit those of the device that runs of hybridflow were on.
    """
    if (data is None) == (not traces):
        raise _InputError("give either --data, a folder of measured tables, or --trace, a run's trace.json")
    if data is not None and output is not None:
        raise _InputError("--output goes with --trace: with --data --json prints the constants")
    if data is None and stack is not None:
        raise _InputError("--stack goes with --data: a run's trace says what software it was")
    if data is None:
        _calibrate_traces(traces, output, as_json=as_json)
        return
    try:
        found = calibrate_folder(data, stack=stack)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"calibrations": [asdict(calibration) for calibration in found]}, indent=2))
    else:
        render_calibration(found, Console())


def _validate_trace(trace: Path, constants: Path | None, *, as_json: bool) -> None:
    try:
        known = None if constants is None else TraceConstants.from_json(_read(constants))
        errors = validate_trace(trace, known)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"stages": [asdict(stage) for stage in errors]}, indent=2))
    else:
        render_stage_errors(errors, Console())


def _calibrate_traces(traces: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    try:
        found = calibrate_traces(traces)
        errors = [stage for trace in traces for stage in validate_trace(trace, found)]
        if output is not None:
            _write(output, found.to_json())
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_stage_errors(errors, Console())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _InputError(f"{path} cannot be read: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _InputError(f"{path} cannot be written: {error.strerror}") from error
