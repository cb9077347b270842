"""The `hf-mapper` command."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hf_mapper.config import read_config
from hf_mapper.explain.explanation import explain_plan
from hf_mapper.explain.page import build_page
from hf_mapper.explain.reasons import render_explanation
from hf_mapper.explain.report import (
    render_calibration,
    render_errors,
    render_plan,
    render_simulation,
    render_stage_errors,
)
from hf_mapper.explain.terminal import build_console
from hf_mapper.measurements.calibration import calibrate_folder
from hf_mapper.measurements.traces import TraceConstants, calibrate_traces, validate_trace
from hf_mapper.measurements.validation import build_report, validate_folder
from hf_mapper.search.exact_search import StopSign, map_dataflow
from hf_mapper.search.simulation import parse_placement, read_placement, simulate_placement
from hf_protocols import ConfigError, HybridFlowError, load_plan
from hf_protocols.paths import read_path, read_text
from hf_protocols.validation import show

__all__ = ["calibrate", "explain", "main", "plan", "simulate", "validate"]


class _InputError(click.ClickException):
    """A user's mistake: one line, exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """A command group that reports every mistake of the user in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _InputError(error.format_message()) from error
        except HybridFlowError as error:
            raise _InputError(str(error)) from error


class _UserPath(click.Path):
    """A path in which a leading `~` is the home directory.

    Args:
        is_written: the command ends in writing this file, which must be possible before it begins.
    """

    def __init__(self, *, is_written: bool = False) -> None:
        super().__init__()
        self._is_written = is_written

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None, "a command's own parameter"
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        path = Path(str(super().convert(read_path(name, str(value)), param, ctx)))
        if self._is_written and path.is_dir():
            raise ConfigError(f"{name} = {str(path)!r} is a directory. Give the path of a file")
        if self._is_written and not path.parent.is_dir():
            raise ConfigError(f"{name} = {str(path)!r} cannot be written: {path.parent} is not a directory")
        return path


def _read_time_limit(context: click.Context, option: click.Parameter, seconds: float | None) -> StopSign:
    """Returns a function that is True after the time limit; without a limit it is always False."""
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
    help="Return the best plan found within SECONDS and its optimality gap; at least one plan is evaluated.",
)


@click.group(cls=_Commands)
@click.version_option(package_name="hf-mapper")
def main() -> None:
    """Choose GPUs, placement and parallelism for an RLHF job: the device mapper of HybridFlow."""


@main.command()
@click.argument("config", type=_UserPath())
@click.option(
    "--json", "as_json", is_flag=True, help="Print the plan as JSON, as hf_controller and hybridflow read it."
)
@_time_limit
@click.option("--html", type=_UserPath(is_written=True), help="Write the plan as one self-contained page to this file.")
def plan(config: Path, as_json: bool, html: Path | None, should_stop: StopSign) -> None:
    """Place the models of CONFIG, a TOML file, on its cluster."""
    _keep_inputs("--html", html, config)
    problem = read_config(config)
    found = map_dataflow(
        problem.dataflow,
        problem.models,
        problem.cluster,
        problem.workload,
        should_stop,
        backends=problem.backends,
    )
    if html is not None:
        _write_page(html, build_page(found))
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_plan(found, build_console())


@main.command()
@click.argument("config", type=_UserPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the plan is its key `plan`.")
@_time_limit
@click.option("--html", type=_UserPath(is_written=True), help="Write plan and reasons as one page to this file.")
@click.option("--quick", is_flag=True, help="Skip the sensitivity analysis (much faster).")
def explain(config: Path, as_json: bool, html: Path | None, quick: bool, should_stop: StopSign) -> None:
    """Explain the plan of CONFIG: other placements, bottlenecks and sensitivity to errors."""
    _keep_inputs("--html", html, config)
    found = explain_plan(read_config(config), should_stop, robustness=not quick)
    if html is not None:
        _write_page(html, build_page(found.plan, found))
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_explanation(found, build_console())


def _keep_inputs(name: str, output: Path | None, *inputs: Path) -> None:
    """Refuses to write over a file that the command reads.

    Raises:
        ConfigError: naming the option.
    """
    if output is not None and any(output.resolve() == each.resolve() for each in inputs):
        raise ConfigError(f"{name} = {show(str(output))} is a file that the command reads. Give another path")


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _InputError(f"--html: {path} cannot be written: {error.strerror}") from error


@main.command()
@click.argument("config", type=_UserPath())
@click.option(
    "--placement",
    required=True,
    metavar="PLACEMENT",
    help="Pools, such as actor+reference=8,critic+reward=8 (=8@h100 names the kind, =8@h100#2 its second entry), or a "
    "plan's JSON file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan of the placement and every call as JSON.")
def simulate(config: Path, placement: str, as_json: bool) -> None:
    """Estimate time and memory of every call under a given placement."""
    problem = read_config(config)
    if placement.endswith(".json"):
        file = Path(read_path("--placement", placement))
        pools = read_placement(load_plan(file, "--placement"))
    else:
        pools = parse_placement(placement)
    found = simulate_placement(
        problem.dataflow, problem.models, problem.cluster, problem.workload, pools, backends=problem.backends
    )
    found.check_memory()
    if as_json:
        calls = [{**asdict(call), "excess_bytes": call.excess_bytes} for call in found.calls]
        click.echo(json.dumps({"plan": json.loads(found.plan.to_json()), "calls": calls}, indent=2))
    else:
        render_plan(found.plan, build_console())
        render_simulation(found, build_console())


@main.command()
@click.option("--data", type=_UserPath(), help="A folder of measured tables, *.csv.")
@click.option("--trace", type=_UserPath(), help="The trace.json in the directory of a run of hybridflow.")
@click.option("--constants", type=_UserPath(), help="With --trace: the file that calibrate --output wrote.")
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
    errors = validate_folder(data)
    if as_json:
        click.echo(json.dumps(build_report(errors), indent=2))
    else:
        render_errors(errors, build_console())


@main.command()
@click.option("--data", type=_UserPath(), help="A folder of measured tables, *.csv.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=_UserPath(),
    help="The trace.json in the directory of a run of hybridflow; runs of different sizes give better constants.",
)
@click.option("--output", type=_UserPath(is_written=True), help="With --trace: write the constants here, as JSON.")
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
        _keep_inputs("--output", output, *traces)
        _calibrate_traces(traces, output, as_json=as_json)
        return
    found = calibrate_folder(data, stack=stack)
    if as_json:
        click.echo(json.dumps({"calibrations": [asdict(calibration) for calibration in found]}, indent=2))
    else:
        render_calibration(found, build_console())


def _validate_trace(trace: Path, constants: Path | None, *, as_json: bool) -> None:
    known = None
    if constants is not None:
        text = read_text(constants, "--constants", "a file of calibrate --output")
        try:
            known = TraceConstants.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"--constants {constants}: {error}") from None
    errors = validate_trace(trace, known)
    if as_json:
        click.echo(json.dumps({"stages": [asdict(stage) for stage in errors]}, indent=2))
    else:
        render_stage_errors(errors, build_console())


def _calibrate_traces(traces: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    found = calibrate_traces(traces)
    errors = [stage for trace in traces for stage in validate_trace(trace, found)]
    if output is not None:
        _write(output, found.to_json())
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_stage_errors(errors, build_console())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _InputError(f"{path} cannot be written: {error.strerror}") from error
