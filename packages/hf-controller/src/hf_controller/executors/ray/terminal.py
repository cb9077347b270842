"""Filters the user's terminal: workers' output passes, Ray's texts about its own processes do not."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_controller.executors.ray.ray_internals import filter_printed

__all__ = ["drop_ray_lines", "quiet_ray", "without_quiet"]

_LOG_LEVEL, _QUIETEST = "RAY_BACKEND_LOG_LEVEL", "fatal"
_RAY_LINE = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,.]+ [A-Z] \d+ \d+\] ")
"""Matches the start of lines of Ray's own code, in the processes of workers and of the program."""


@contextmanager
def quiet_ray() -> Iterator[None]:
    """While Ray starts: what its processes and its code in this one have to say stays in Ray's log files.

    A user who sets `RAY_BACKEND_LOG_LEVEL` sees what Ray's code says in this process.
    """
    filter_printed(_print_workers_lines)
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _QUIETEST
    try:
        with _stderr_without_ray():  # Ray says that the level is set
            yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def without_quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of Ray, which logs what it always does: only this process logs less."""
    return {name: value for name, value in environment.items() if (name, value) != (_LOG_LEVEL, _QUIETEST)}


def drop_ray_lines(data: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of a log as Ray publishes them, without Ray's own. Workers have a number as their `pid`, Ray a name."""
    is_workers = str(data.get("pid", "")).isdecimal()
    return {**data, "lines": [line for line in data.get("lines", []) if is_workers and not _RAY_LINE.match(line)]}


def _print_workers_lines(printer: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(printer)
    def print_workers_lines(data: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        kept = drop_ray_lines(data)
        if kept["lines"]:
            printer(kept, *arguments, **options)

    return print_workers_lines


@contextmanager
def _stderr_without_ray() -> Iterator[None]:
    """On Linux, standard error of this process waits for the end of the block, which drops the lines of Ray from it."""
    if sys.platform != "linux" or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    with os.fdopen(os.memfd_create("stderr"), "r+b") as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            for line in held:
                if not _RAY_LINE.match(line.decode(errors="replace")):
                    os.write(2, line)
