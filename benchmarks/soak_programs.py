"""Programs of `soak.py`: forks of a process that has imported what a run needs, watched until nothing is left."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import transformers
from soak_faults import Fault, arm

import hf_algorithms.run.loop  # noqa: F401 - a fork finds it imported
import hf_engine.rollout.transformers
import hf_engine.training.fsdp  # noqa: F401 - a fork finds it imported
from hf_algorithms import cli

__all__ = ["NOTE", "Ended", "run_program"]

NOTE = "fault.json"
"""File of a program's folder that says when its fault came."""
MARK = "HYBRIDFLOW_SOAK"
"""Variable that all processes of a program have in their environment, also those that no longer are its children."""
MOST_S = 900.0
LEFT_S = 60.0
"""Time within which processes and shared memory of an ended program go."""
STOPPED_S = 3.0
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A program that has ended.

    Attributes:
        code: its exit code; minus the number of the signal that ended it.
        at_s: of `time.time`.
        lines: that it wrote.
        problems: sentences about what must not be.
    """

    code: int
    at_s: float
    lines: tuple[str, ...]
    problems: tuple[str, ...]


def run_program(
    arguments: Sequence[str], folder: Path, fault: Fault | None, tend: Callable[[], None] = lambda: None
) -> Ended:
    """Runs `hybridflow` with some arguments to its end, which has a deadline.

    Args:
        arguments: of the command.
        folder: in which it runs.
        fault: that strikes it.
        tend: is called again and again until then, and once more.
    """
    note, mark = folder / NOTE, secrets.token_hex(8)
    note.unlink(missing_ok=True)
    before = _list_shared_memory()
    lines: list[str] = []
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(arguments, folder, fault, write, mark)
    os.close(write)
    reader = threading.Thread(target=_read_lines, args=(read, lines), daemon=True)
    reader.start()
    code, problems = _watch(pid, tend)
    at_s = time.time()
    tend()
    problems += _find_leavings(mark, before)
    reader.join(LEFT_S)
    return Ended(code=code, at_s=at_s, lines=tuple(lines), problems=tuple(problems))


def _run(arguments: Sequence[str], folder: Path, fault: Fault | None, output: int, mark: str) -> NoReturn:
    """The program, in a session of its own."""
    try:
        os.setsid()
        os.chdir(folder)
        os.environ[MARK] = mark
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - for its life
        sys.argv = ["hybridflow", *arguments]
        torch.set_num_threads(1)  # as a rank has
        transformers.utils.logging.disable_progress_bar()
        if fault is not None:
            arm(fault, folder / NOTE)
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(70)


def _read_lines(read: int, lines: list[str]) -> None:
    with open(read, errors="replace") as file:
        for line in file:
            lines.append(line)  # noqa: PERF402 - what was read is there at any time


def _watch(pid: int, tend: Callable[[], None]) -> tuple[int, list[str]]:
    """Waits for a program's end, and continues it where it was stopped; returns its exit code and problems."""
    deadline_s = time.monotonic() + MOST_S
    problems: list[str] = []
    while True:
        tend()
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        elif found:
            return os.waitstatus_to_exitcode(status), problems
        if time.monotonic() > deadline_s:
            problems.append(f"the program had not ended {MOST_S:g} s after its start")
            deadline_s += MOST_S
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _find_leavings(mark: str, before: set[str]) -> list[str]:
    """Waits until neither processes nor shared memory of a program are left."""
    deadline_s = time.monotonic() + LEFT_S
    while True:
        left = [each for each in psutil.process_iter() if _has_mark(each, mark)]
        segments = _list_shared_memory() - before
        segments -= _list_mapped() if segments else set()
        if not left and not segments:
            return []
        if time.monotonic() > deadline_s:
            for each in left:
                each.kill()
            return [f"left after {LEFT_S:g} s: {[*map(_describe, left), *sorted(segments)]}"]
        time.sleep(4 * _LOOK_S)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}"


def _list_mapped() -> set[str]:
    """Segments that a process has mapped: processes of others, as those of the program are gone."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= {line.rpartition("/dev/shm/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line}
    return found


def _list_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
