"""A few local processes joined by gloo, kept alive so that many checks share one start-up."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.context
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["LocalRanks", "fork_context", "preload"]

# Imported once, by the process that all ranks are forked from: a start takes milliseconds instead of many seconds.
_PRELOADED = [
    "hf_engine.training.fsdp",
    "hf_engine.training.megatron",
    "hf_engine.rollout.transformers",
    "pytest",  # files of tests import it
    "transformers.models.llama.modeling_llama",
]


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Returns the context whose processes are forked from the one that has imported torch and the backends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def preload(*modules: str) -> None:
    """Has the process that ranks are forked from import more modules; call it before the first start."""
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)


class LocalRanks:
    """Runs functions on every rank of a gloo process group on this machine.

    Each rank is a process of its own with one torch thread, a default process group and the environment of the moment
    of its start. After a failure the processes are replaced before the next run, because a broken collective cannot be
    used again. They are forked from one process that has imported torch and the backends and done nothing.

    Example:
        with LocalRanks(2) as ranks:
            ranks.run(check_something, argument)  # a module-level function, called on both ranks

    Args:
        world_size: number of processes.
        timeout_s: deadline of every collective, and of one `run` beyond the slowest rank's.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 30.0) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 100.0) -> list[Any]:
        """Calls a module-level function with the same arguments on every rank; returns the results by rank.

        Raises:
            RuntimeError: with the traceback of every rank that failed, or did not answer in time.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((_locate(function), args))
        for connection in self._connections:
            with suppress(BrokenPipeError, ConnectionResetError):  # of a process that died; `_receive` says so
                connection.send_bytes(request)
        results, failures = [], []
        stop = time.monotonic() + deadline_s
        for rank, connection in enumerate(self._connections):
            succeeded, value = self._receive(rank, connection, stop)
            results.append(value)
            if not succeeded:
                failures.append(f"rank {rank}:\n{value}")
                stop = min(stop, time.monotonic() + self._timeout_s + 5)
        if failures:
            self.close()
            raise RuntimeError("\n".join(failures))
        return results

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        context = fork_context()
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._world_size, str(store), self._timeout_s, theirs, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _receive(self, rank: int, connection: Connection, stop: float) -> tuple[bool, Any]:
        try:
            if not connection.poll(max(0.0, stop - time.monotonic())):
                return False, f"rank {rank} did not answer in time"
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
            return answer
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=2)
            return False, f"the process of rank {rank} died (exit code {self._processes[rank].exitcode})"


def _locate(function: Callable[..., Any]) -> tuple[str, str, str]:
    file = inspect.getsourcefile(inspect.unwrap(function))
    assert file is not None, "a function without a source file cannot be sent to another process"
    return function.__module__, file, function.__qualname__


def _resolve(location: tuple[str, str, str], loaded: dict[str, ModuleType]) -> Callable[..., Any]:
    """Finds the function again: in the module of its name where this process can import it, else by its file."""
    module_name, file, qualified_name = location
    found: Any
    if _is_importable(module_name, file):
        # A second copy from the file would have a state of its own.
        found = importlib.import_module(module_name)
    else:
        if file not in loaded:
            spec = importlib.util.spec_from_file_location(f"_on_rank_{len(loaded)}", file)
            assert spec is not None and spec.loader is not None
            # Dataclasses look their module up by name.
            sys.modules[spec.name] = loaded[file] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[file])
        found = loaded[file]
    for part in qualified_name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _is_importable(module_name: str, file: str) -> bool:
    """True where the name leads to this file, not to another module of the same name."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ModuleNotFoundError, ValueError):  # a parent that is absent; `__main__` of a program
        return False
    return spec is not None and spec.has_location and Path(spec.origin or "").resolve() == Path(file).resolve()


def _serve(
    rank: int, world_size: int, store: str, timeout_s: float, connection: Connection, environment: dict[str, str]
) -> None:
    import faulthandler
    import gc

    import torch
    import torch.distributed as dist

    # What was imported never becomes garbage: a backend that is closed collects it, 0.2 s each time.
    gc.freeze()
    faulthandler.enable()  # a crash in native code leaves no other trace
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    loaded: dict[str, ModuleType] = {}
    while True:
        try:
            location, args = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = pickle.dumps((True, _resolve(location, loaded)(*args)))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - pytest's failures do not derive from Exception
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            connection.send_bytes(answer)
        except (BrokenPipeError, ConnectionResetError):
            break  # nobody waits any more: the deadline is over
    dist.destroy_process_group()
