"""The ``hf-mapper`` command."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from hf_mapper.calibration import calibrate_folder
from hf_mapper.config import read_config
from hf_mapper.report import render_calibration, render_errors, render_plan
from hf_mapper.search import map_dataflow
from hf_mapper.validation import build_report, validate_folder
from hf_protocols import HybridFlowError

__all__ = ["calibrate", "main", "plan", "validate"]


class _InputError(click.ClickException):
    """A user's mistake: one line, exit code 2."""

    exit_code = 2


@click.group()
@click.version_option(package_name="hf-mapper")
def main() -> None:
    """Which GPUs, which placement, which parallelism: the device mapper of HybridFlow."""


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the plan as JSON, as hf_controller and hybridflow read it."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop then with the best plan so far and its proven gap. One plan is always found first.",
)
def plan(config: Path, as_json: bool, time_limit: float | None) -> None:
    """Place the models of CONFIG, a TOML file, on its cluster."""
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    try:
        problem = read_config(config)
        found = map_dataflow(
            problem.dataflow,
            problem.models,
            problem.cluster,
            problem.workload,
            lambda: time.monotonic() >= deadline,
            backends=problem.backends,
        )
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_plan(found, Console())


@main.command()
@click.option("--data", required=True, type=click.Path(path_type=Path), help="A folder of measured tables, *.csv.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; errors are fractions.")
def validate(data: Path, as_json: bool) -> None:
    """Compare the simulators with measured tables, recognised by their columns."""
    try:
        errors = validate_folder(data)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(json.dumps(build_report(errors), indent=2))
    else:
        render_errors(errors, Console())


@main.command()
@click.option("--data", required=True, type=click.Path(path_type=Path), help="A folder of measured tables, *.csv.")
@click.option("--stack", help="Only this software, such as pytorch or vllm.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; errors are fractions.")
def calibrate(data: Path, stack: str | None, as_json: bool) -> None:
    """Fit the constants of each GPU and software in measured tables; every model is left out once and scored."""
    try:
        found = calibrate_folder(data, stack=stack)
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"calibrations": [asdict(calibration) for calibration in found]}, indent=2))
    else:
        render_calibration(found, Console())
