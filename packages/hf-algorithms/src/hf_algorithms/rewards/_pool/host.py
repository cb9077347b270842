"""The host: a clean process that distributes calls to the processes of a pool, and ends with its worker."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection

from hf_algorithms.rewards._pool.chunks import ChunkScheduler
from hf_algorithms.rewards._pool.messages import Setup

__all__ = ["main"]


def main() -> None:
    """Serves one worker: `argv` has the file descriptors of its messages and of its life."""
    messages, life = int(sys.argv[1]), int(sys.argv[2])
    _print_to_stderr()
    threading.Thread(target=_end_with_worker, args=(life,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    connection = Connection(messages)
    setup: Setup = pickle.loads(connection.recv_bytes())
    scheduler = ChunkScheduler(setup.loaders, setup.num_processes, closes=(messages, life))
    while True:
        try:
            batches = pickle.loads(connection.recv_bytes())
        except EOFError:
            return _kill_group()
        connection.send_bytes(pickle.dumps(scheduler.run(batches)))


def _print_to_stderr() -> None:
    """Keeps what functions print off the program's results, line by line: nothing is flushed when a process is killed.

    The processes of the pool inherit both.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # the program has no stderr
            os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)


def _end_with_worker(life: int) -> None:
    """Waits until the worker closes its end, which its death does as well."""
    os.read(life, 1)
    _kill_group()


def _kill_group() -> None:
    """Ends this process, those of the pool, and what a user's functions started."""
    os.killpg(0, signal.SIGKILL)
