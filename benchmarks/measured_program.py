"""A program that is measured in turns with others: it waits for a line on standard input, and answers each with one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["MeasuredProgram"]

_END_TIMEOUT_S = 120.0


class MeasuredProgram:
    """Runs a program until `close`.

    Args:
        command: of the program, from the descriptor on which it writes its answers.
        log: file of its output.
        environment: variables of its own, added to this process's.
        folder: that it runs in; None: the current one.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        reading, writing = os.pipe()
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command(writing),
                cwd=folder,
                env=os.environ | environment,
                pass_fds=[writing],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def ask(self, line: str = "") -> str:
        """Sends a line; returns the answer. This program ends where the other one has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> str:
        """The next answer."""
        line = self._answers.readline()
        if not line:
            sys.exit(f"{self._log}: the process ended without an answer\n{self._log.read_text()[-3000:]}")
        return line

    def close(self) -> None:
        """Ends the input, and waits until the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
