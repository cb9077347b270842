"""Programs as forks of a process that has imported torch: those of pages and examples start in milliseconds.

What a test says about starts, imports or launchers is said of a program that it starts as users do.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_engine.testing._local_ranks import fork_context

__all__ = ["ForkedProgram", "run_forked"]


class ForkedProgram:
    """A Python file that runs as `python FILE ARGUMENTS` would, in a process of its own.

    Args:
        program: the file.
        arguments: its `sys.argv[1:]`.
        folder: where it runs; by default the current folder.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(program), *arguments]
        self._streams = tempfile.TemporaryDirectory()
        given = (self._command, str(folder or Path.cwd()), os.environ | dict(environment or {}), self._streams.name)
        self._process = fork_context().Process(target=_run, args=given)
        self._process.start()

    def wait(self, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Returns exit code and output, as `subprocess.run` does.

        Raises:
            TimeoutExpired: after `timeout_s`; the process was killed.
        """
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        output, errors = (Path(self._streams.name, name).read_text() for name in ("stdout", "stderr"))
        self._streams.cleanup()
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout_s, output, errors)
        return subprocess.CompletedProcess(self._command, code, output, errors)


def run_forked(
    program: Path,
    arguments: Sequence[str] = (),
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python file to its end, as `ForkedProgram` starts it."""
    return ForkedProgram(program, arguments, folder=folder, environment=environment).wait(timeout_s)


def _run(command: list[str], folder: str, environment: dict[str, str], streams: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    own = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(command[0]).parent), *own]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them
