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
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection

from hf_algorithms.rewards._pool.messages import Calls, Outcome, Setup
from hf_protocols.errors import RewardError

__all__ = ["RewardPool"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from {0} import main; main()"
_HOST = "hf_algorithms.rewards._pool.host"
_END_S = 5.0


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
        self._end = weakref.finalize(self, _end, self._process, self._connection, write_end)
        self._send(Setup(list(loaders), num_processes))

    def run(self, batches: Sequence[Calls]) -> list[list[Outcome | None]]:
        """Makes every call and returns its outcomes in order, by batch.

        Where a function raises or returns something else than scores, calls that are left have no outcome.

        Raises:
            RewardError: if the host is gone.
        """
        found: list[list[Outcome | None]] = [[None] * len(calls.payloads) for calls in batches]
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
        return RewardError(
            f"the processes of the reward functions have ended: their host, process {self._process.pid}, left with "
            f"exit code {self._process.returncode}. Look at its output above"
        )


def _end(process: subprocess.Popen[bytes], connection: Connection, life: int) -> None:
    os.close(life)
    connection.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
