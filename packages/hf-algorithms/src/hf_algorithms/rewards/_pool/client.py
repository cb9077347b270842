"""The worker's end of a pool."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import psutil

from hf_algorithms.rewards._pool.messages import Calls, Outcome, Setup
from hf_protocols.errors import RewardError

__all__ = ["RewardPool"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from {0} import main; main()"
_HOST = "hf_algorithms.rewards._pool.host"
_END_S = 5.0
_LOOK_S = 1.0
"""Interval between two looks at a host that has not answered."""
_MOST_LOOKS = 10
"""Consecutive looks that find a host stopped before it is ended. A worker that is stopped as well does not look."""


class RewardPool:
    """Processes that call functions, for one worker. They start at once, while the worker goes on.

    Args:
        loaders: pickled, of each function.
        num_processes: that make calls.
    """

    def __init__(self, loaders: Sequence[bytes], *, num_processes: int) -> None:
        own, hosts = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # a module of the working folder may have a name of the standard library
                    "-c",
                    _START.format(_HOST),
                    *map(str, (hosts.fileno(), read_end, json.dumps(sys.path))),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(hosts.fileno(), read_end),
                start_new_session=True,  # its group is killed as a whole, with what a user's functions started
            )
        finally:
            hosts.close()
            os.close(read_end)
        self._connection = Connection(own.detach())
        self._watch = _HostWatch(self._process.pid)
        self._end = weakref.finalize(self, _end, self._process, self._connection, write_end, self._watch)
        self._send(Setup(list(loaders), num_processes))

    def run(self, batches: Sequence[Calls]) -> list[list[Outcome | None]]:
        """Makes every call and returns its outcomes in order, by batch.

        Where a function raises or returns something else than scores, calls that are left have no outcome.

        Raises:
            RewardError: if the host is gone, or a signal such as SIGSTOP holds it.
        """
        found: list[list[Outcome | None]] = [[None] * len(calls.payloads) for calls in batches]
        with self._watch.waiting():
            self._send(list(batches))
            try:
                settled = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise self._describe_loss() from error
        for batch, indices, outcomes in settled:
            for index, outcome in zip(indices, pickle.loads(outcomes), strict=True):
                found[batch][index] = outcome
        return found

    def close(self) -> None:
        """Ends the processes; the pool cannot be used again."""
        self._end()

    def _send(self, message: object) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._describe_loss() from error

    def _describe_loss(self) -> RewardError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._watch.has_ended_it:
            return RewardError(
                "the processes of the reward functions do not answer: a signal such as SIGSTOP held their host, "
                f"process {self._process.pid}, for {_MOST_LOOKS * _LOOK_S:g} s. It was ended; --resume goes on"
            )
        return RewardError(
            f"the processes of the reward functions have ended: their host, process {self._process.pid}, left with "
            f"exit code {self._process.returncode}. Look at its output above"
        )


class _HostWatch:
    """Ends a host that is stopped while the pool waits for it: the wait would have no end.

    Its thread starts with the first wait, and stays: starting one takes a millisecond where all cores are busy.

    Args:
        pid: of the host, the leader of its process group.

    Attributes:
        has_ended_it: True once the host was killed.
    """

    def __init__(self, pid: int) -> None:
        self.has_ended_it = False
        self._pid = pid
        self._is_over = threading.Event()
        self._num_waits = 0
        self._is_waiting = False
        self._has_thread = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Watches the host during the block."""
        if not self._has_thread:
            threading.Thread(target=self._look, name="reward-host", daemon=True).start()
            self._has_thread = True
        self._num_waits += 1
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()

    def _look(self) -> None:
        looks, wait = 0, 0
        while not self._is_over.wait(_LOOK_S):
            is_same, wait = wait == self._num_waits, self._num_waits
            is_stopped = self._is_waiting and _is_stopped(self._pid)
            # Of a wait that is new, the first look may come at once.
            looks = looks + 1 if is_stopped and is_same else 0
            if looks == _MOST_LOOKS:
                self.has_ended_it = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _end(process: subprocess.Popen[bytes], connection: Connection, life: int, watch: _HostWatch) -> None:
    watch.close()
    os.close(life)
    connection.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
