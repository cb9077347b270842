"""An engine's process as its rank sees it: requests with deadlines, a typed error when it ends, nothing left behind."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hf_engine.rollout.sglang._session import end_session, find_segments
from hf_protocols.errors import BackendError

__all__ = ["EngineProcess", "cut_sample"]

_LOG_BYTES = 1 << 16


class EngineProcess:
    """A process that runs `_server`, in a session of its own; it ends with this one.

    Args:
        environment: makes the process's environment from the directory of its temporary files.
    """

    def __init__(self, environment: Callable[[str], dict[str, str]]) -> None:
        self._directory = tempfile.mkdtemp(prefix="hf-engine-sglang-")
        self._log = Path(self._directory) / "engine.log"
        self._segments: set[str] = set()
        self._ended = ""
        self._process: subprocess.Popen[bytes] | None = None
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
            ours = self._start(environment)
            undo.pop_all()
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too.

        Raises:
            BackendError: if the process has ended.
        """
        return self._running().pid

    def call(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Calls a method of `Server` and waits for its result.

        Raises:
            BackendError: if the engine refuses, ends on the way or does not answer in time; after the last two it
                is gone. So it is after an interrupt: its answer would be taken for the next request's.
        """
        self._running()
        with ExitStack() as undo:
            undo.callback(self._end, f"{method!r} was interrupted")  # unless it ended for another reason
            succeeded, value = self._ask((method, arguments, options), timeout_s)
            undo.pop_all()
        if not succeeded:
            raise BackendError(f"SGLang refused {method!r}: {value}")
        return value

    def _ask(self, request: tuple[str, tuple[Any, ...], dict[str, Any]], timeout_s: float) -> tuple[bool, Any]:
        method, *_ = request
        try:
            self._connection.send_bytes(pickle.dumps(request))
            if not self._wait(timeout_s, watch=method == "start"):
                self._end(f"it did not finish {method!r} in {timeout_s:g} s")
                raise BackendError(
                    f"SGLang did not finish {method!r} in {timeout_s:g} s and was ended. Build the backend again, with "
                    f"a longer {'start_timeout_s' if method == 'start' else 'timeout_s'} if it only needs more time"
                )
            answer: tuple[bool, Any] = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            how, why = self._end_of_process(), self._last_words()
            self._end(f"in {method!r}, {how}")
            text = f"SGLang's process ended in {method!r} ({how}): {why.rstrip('.')}. Build the backend again"
            raise BackendError(text) from error
        return answer

    def close(self) -> None:
        """Ends the process with all of its children and removes its files."""
        if self._process is None:
            return
        end_session(self._process.pid, self._segments)
        self._process.wait()
        self._connection.close()
        self._process = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, environment: Callable[[str], dict[str, str]]) -> socket.socket:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), self._directory]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hf_engine.rollout.sglang._server", *arguments],
                env=environment(self._directory),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours

    def _end(self, why: str) -> None:
        self._ended = self._ended or f" ({why})"
        self.close()

    def _wait(self, timeout_s: float, *, watch: bool) -> bool:
        """Returns True if an answer came in time. Watches a start for shared memory: a failing engine ends its tree."""
        stop = time.monotonic() + timeout_s
        while watch:
            self._segments |= find_segments(self.pid)
            left = stop - time.monotonic()
            if self._connection.poll(max(0.0, min(left, 1.0))):
                self._segments |= find_segments(self.pid)
                return True
            watch = left > 0
        return self._connection.poll(max(0.0, stop - time.monotonic()))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BackendError(f"the SGLang engine has ended{self._ended}. Build the backend again")
        return self._process

    def _end_of_process(self) -> str:
        try:
            code = self._running().wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "it hung up"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _last_words(self) -> str:
        """The last error in the engine's log."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (errors or ["it left no message"])[-1][:500]


def cut_sample(sample: tuple[list[int], list[float], str], length: int | None) -> tuple[list[int], list[float], str]:
    """Returns the sample up to the token that completes a stop string; None: the whole sample."""
    ids, logprobs, _ = sample
    return sample if length is None else (ids[:length], logprobs[:length], "stop")
