"""`hybridflow replay`: one recorded call, run again in this process."""

from __future__ import annotations

from pathlib import Path

import click

from hf_algorithms.commands.command_line import UserPath

__all__ = ["replay"]


@click.command()
@click.argument("run", type=UserPath(exists=True, file_okay=False))
@click.option("--iteration", required=True, type=click.IntRange(min=0), help="Iteration of the call; 0: a warm start.")
@click.option("--role", required=True, metavar="NAME", help="Role whose call was recorded.")
@click.option("--rank", default=0, show_default=True, type=click.IntRange(min=0), help="Rank that recorded it.")
@click.option("--debug", is_flag=True, help="Stop in the first line of the method, and where it raises, with pdb.")
def replay(run: Path, iteration: int, role: str, rank: int, debug: bool) -> None:
    """Run a recorded call of RUN again in this process, and print its metrics."""
    from hf_algorithms.replay.bundle import find_bundle
    from hf_algorithms.replay.rerun import run_again

    call = find_bundle(run, iteration, role, rank)
    metrics = run_again(run, call, debug=debug, note=click.echo)
    for name, value in sorted(metrics.items()):
        click.echo(f"{name:40} {value:g}")
