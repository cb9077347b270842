"""`hybridflow watch`: a run on the terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hf_protocols.paths import read_path

if TYPE_CHECKING:
    from rich.console import Console

    from hf_algorithms.report.live import LiveRun

__all__ = ["print_run", "watch", "watch_run"]

_REFRESH_S = 1.0


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--once", is_flag=True, help="Print the run as it is now; the default where output is not a terminal.")
def watch(run: str, once: bool) -> None:
    """Show RUN on the terminal while it goes on, or when it ended: curves, health, phases, last samples.

    Reads files only, so a copied or killed run is shown as well. The key q or Ctrl-C leaves.
    """
    from hf_algorithms.report.live import open_runs
    from hf_algorithms.run.display import build_console

    (found,) = open_runs([Path(read_path("RUN", run))])
    console = build_console()
    if once or not console.is_interactive:
        print_run(found, console)
        return
    try:
        with _keys() as wait_for_key:
            watch_run(found, console, wait_for_key)
    except KeyboardInterrupt:
        sys.exit(130)


def print_run(run: LiveRun, console: Console) -> None:
    """Prints a run once, as it is."""
    from hf_algorithms.report.terminal import draw_run

    run.refresh()
    run.finish_reading()
    width = min(console.width, 160)  # as wide as anything in a pipe
    for line in draw_run(run, width=width, ascii_only=console.options.ascii_only):
        console.print(line, soft_wrap=True)


def watch_run(run: LiveRun, console: Console, wait_for_key: Callable[[float], str]) -> None:
    """Draws a run again and again on the whole terminal, until the key q.

    Args:
        run: which may be deleted meanwhile; then it stays as it was read.
        console: a terminal.
        wait_for_key: returns a key that was pressed within so many seconds, or an empty string.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from hf_algorithms.report.terminal import draw_run

    with Live(console=console, screen=True, auto_refresh=False) as live:
        key = ""
        while key not in ("q", "Q"):
            run.refresh()
            size = console.size
            ascii_only = console.options.ascii_only
            lines = draw_run(run, width=size.width, height=size.height - 1, ascii_only=ascii_only)
            live.update(Group(*lines, Text("q leaves", "dim")), refresh=True)
            key = wait_for_key(_REFRESH_S)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Lets a block read single keys from a terminal, without echo; elsewhere, it only waits."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        raise click.UsageError("standard input is not a terminal, from which the key q is read. Use --once")
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda timeout_s: _read_key(descriptor, timeout_s)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_key(descriptor: int, timeout_s: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    return os.read(descriptor, 1).decode(errors="replace") if ready else ""
