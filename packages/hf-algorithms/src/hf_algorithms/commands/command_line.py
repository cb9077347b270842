"""Parts of every command: paths, search path, exit codes, and the last lines of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hf_protocols import HybridFlowError
from hf_protocols.paths import read_path

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.run_directory import RunDirectory

__all__ = ["UserPath", "describe_error", "exit_codes", "fail", "print_summary", "search_path_of"]


class UserPath(click.Path):
    """A path in which a leading `~` is the home directory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path of what was typed."""
        assert param is not None, "a command's own parameter"
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        return super().convert(read_path(name, os.fspath(value)), param, ctx)


def describe_error(error: HybridFlowError) -> str:
    """Returns the message, and where it was raised; the whole remote traceback of an error that is not ours."""
    from hf_controller import RemoteCallError

    notes = getattr(error, "__notes__", [])
    if not isinstance(error, RemoteCallError):
        notes = [f"({note.partition(', traceback there:')[0]})" for note in notes]
    return "\n".join([str(error), *notes])


@contextmanager
def exit_codes(directory: RunDirectory | None = None) -> Iterator[None]:
    """Exits with 2 for an error before the run's directory is touched, of any class, and with 1 for a later one."""
    try:
        yield
    except HybridFlowError as error:
        fail(describe_error(error), 1 if directory is not None and directory.has_begun else 2)


def fail(message: str, code: int) -> NoReturn:
    """Prints an error and exits."""
    click.echo(f"Error: {message}", err=True)
    sys.exit(code)


def search_path_of(config: Path) -> tuple[str, ...]:
    """Folders where a user's own modules are: the current one and that of the configuration."""
    return (os.getcwd(), str(config.resolve().parent))


def print_summary(summary: dict[str, Any], directory: Path, config: Config) -> None:
    """Prints what a run reached, and its directory; of a run that stopped before its last iteration, the directory."""
    if summary["status"] == "interrupted":
        click.echo(directory)
        return
    rows = "rows of data.train" if config.data.key_of("test") == "train" else "held-out rows"
    name = f"{summary['metric']}{' (lower is better)' if summary.get('lower_is_better') else ''}"
    parts = [f"{name} on {rows}: {summary['score_before']:.3f} -> {summary['score_after']:.3f}"]
    if interval := summary.get("interval_after"):
        parts[0] += f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f}, {summary['rows']} rows)"
    if divergence := summary.get("kl_to_reference"):
        parts.append(f"KL to the reference: {divergence['value']:.2f} {divergence['unit']} ({divergence['estimator']})")
    parts.append(f"{summary['wall_s']:.0f} s")
    click.echo("   ".join(parts) + f"\n{directory}")
