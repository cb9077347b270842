"""`hybridflow serve`: runs on a page of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hf_protocols.paths import read_path

__all__ = ["serve"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address to listen on.")
@click.option("--port", default=8642, show_default=True, help="Port to listen on; 0 for any free one.")
def serve(runs: tuple[str, ...], host: str, port: int) -> None:
    """Show runs on a local page while they go on, or when they ended: curves, samples, times, side by side.

    Reads files only, and fetches nothing from a network. Needs the extra `serve`.
    """
    from hf_algorithms.report.live import serve as serve_runs

    directories = [Path(read_path("RUN", run)) for run in runs]
    try:
        serve_runs(directories, host=host, port=port, note=lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        sys.exit(130)
