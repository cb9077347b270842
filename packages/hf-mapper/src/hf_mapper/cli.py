"""The ``hf-mapper`` command."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from hf_mapper.config import read_config
from hf_mapper.report import render_plan
from hf_mapper.search import map_dataflow
from hf_protocols import HybridFlowError

__all__ = ["main", "plan"]


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
def plan(config: Path, as_json: bool) -> None:
    """Place the models of CONFIG, a TOML file, on its cluster."""
    try:
        problem = read_config(config)
        found = map_dataflow(
            problem.dataflow, problem.models, problem.cluster, problem.workload, backends=problem.backends
        )
    except HybridFlowError as error:
        raise _InputError(str(error)) from error
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        render_plan(found, Console())
