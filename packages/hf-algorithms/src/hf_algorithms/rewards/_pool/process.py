"""One process of the pool: loads the functions once, then makes calls in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import mmap
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_algorithms.rewards._load import get_users_folders, get_users_function, load_function
from hf_algorithms.rewards._pool.messages import CallExpired, Calls, ExpiredCall, Outcome, RaisedCall
from hf_algorithms.rewards._result_numbers import WrongResult
from hf_algorithms.rewards._results import CallScores, read_result
from hf_algorithms.rewards._trainer import CallLog
from hf_algorithms.users_code import describe_raised
from hf_controller import Terminated
from hf_protocols.foreign_code import Caught

__all__ = [
    "ALL_AT_ONCE",
    "ChunkResult",
    "Loader",
    "call_function",
    "clear_progress",
    "initialize",
    "is_async",
    "is_gone",
    "read_progress",
    "run_chunk",
]

ALL_AT_ONCE = -1
"""Progress of a chunk whose calls wait for one another."""

_PROGRESS = struct.Struct("<qq")
"""Of one slot: the process, and the number of its call."""
_PR_SET_PDEATHSIG = 1

_functions: list[Callable[..., Any] | RaisedCall] = []
_progress: mmap.mmap | None = None


class Loader(NamedTuple):
    """Finds a function in a process of the pool: by name in folders, or the object that came pickled."""

    name: str = ""
    search_path: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """Returns the user's function. Modules that its calls import are found where those of its own module were."""
        if self.function is not None:
            return self.function
        sys.path += [folder for folder in self.search_path if folder not in sys.path]
        function = load_function(self.name, search_path=self.search_path)
        sys.path += [folder for folder in get_users_folders(function) if folder not in sys.path]
        return get_users_function(function)


class ChunkResult(NamedTuple):
    """Outcomes of a chunk's first calls.

    Attributes:
        outcomes: pickled list, which the host only passes on.
        num_calls: outcomes.
        is_refused: one of them says that the function raised, or returned something else than scores.
        elapsed_s: that the calls took.
    """

    outcomes: bytes
    num_calls: int
    is_refused: bool
    elapsed_s: float


def initialize(loaders: Sequence[bytes], progress: mmap.mmap, host_pid: int, closes: Sequence[int]) -> None:
    """Ties the process to its host and loads the functions.

    Args:
        loaders: pickled `Loader` of each function.
        progress: memory that is shared with the host.
        host_pid: of the host.
        closes: file descriptors of the host alone.
    """
    global _progress
    _end_with_host(host_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # code that catches SystemExit would live on
    for descriptor in closes:
        os.close(descriptor)
    _progress = progress
    _functions.clear()
    for loader in loaders:
        with Caught(also=(SystemExit,)) as caught:
            _functions.append(pickle.loads(loader).load())
        if caught.error is not None:  # every call reports it
            reason = f"{describe_raised(caught.error)}\n  while it was loaded in a process of the pool"
            _functions.append(RaisedCall(reason, is_load=True))


def run_chunk(calls: Calls, slot: int, budget_s: float) -> ChunkResult:
    """Makes calls in order, and stops between two of them once `budget_s` have passed.

    Args:
        calls: of one function.
        slot: where the number of the running call is written, counted from 1.
        budget_s: after which no further call begins.
    """
    start_s = time.perf_counter()
    function = _functions[calls.function]
    outcomes: list[Outcome] = []
    if isinstance(function, RaisedCall):
        outcomes = [function]
    elif calls.is_async:
        _write_progress(slot, ALL_AT_ONCE)
        outcomes = asyncio.run(_gather(function, calls))
    else:
        for number in range(len(calls.payloads)):
            if outcomes and time.perf_counter() - start_s > budget_s:
                break
            _write_progress(slot, number + 1)
            outcomes.append(call_function(function, calls, number))
    elapsed_s = time.perf_counter() - start_s
    is_refused = any(isinstance(outcome, RaisedCall | WrongResult) for outcome in outcomes)
    return ChunkResult(pickle.dumps(outcomes), len(outcomes), is_refused, elapsed_s)


def call_function(function: Callable[..., Any], calls: Calls, number: int) -> Outcome:
    """Makes one call and reads its result; all that a user's function may raise is an outcome."""
    try:
        args, kwargs = pickle.loads(calls.payloads[number])
        result = function(*args, **kwargs)
        if type(result) is not float and inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return _read(result, calls, number, kwargs)
    except BaseException as error:  # a user's function may raise anything, SystemExit too: it becomes its row's error
        if _progress is None and isinstance(error, KeyboardInterrupt | Terminated):
            raise  # functions run in the program itself, which is asked to end
        return _describe(error, calls.deadline_s * calls.num_rows[number])


def is_async(function: Any) -> bool:
    """True for an async function, and an object whose calls are."""
    method = getattr(type(function), "__call__", None)  # noqa: B004 - whether it is async is asked
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def read_progress(memory: mmap.mmap, slot: int) -> int:
    """Returns the number of the call that a chunk was in, from 1; 0 before the first, or `ALL_AT_ONCE`."""
    number: int = _PROGRESS.unpack_from(memory, slot * _PROGRESS.size)[1]
    return number


def is_gone(memory: mmap.mmap, slot: int) -> bool:
    """True where the process that makes the calls of a chunk has ended and was waited for."""
    pid = _PROGRESS.unpack_from(memory, slot * _PROGRESS.size)[0]
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def clear_progress(memory: mmap.mmap, slot: int) -> None:
    """Begins a chunk."""
    _PROGRESS.pack_into(memory, slot * _PROGRESS.size, 0, 0)


def _write_progress(slot: int, number: int) -> None:
    assert _progress is not None
    _PROGRESS.pack_into(_progress, slot * _PROGRESS.size, os.getpid(), number)


async def _gather(function: Callable[..., Any], calls: Calls) -> list[Outcome]:
    return list(await asyncio.gather(*(_call_async(function, calls, number) for number in range(len(calls.payloads)))))


async def _call_async(function: Callable[..., Any], calls: Calls, number: int) -> Outcome:
    num_rows = calls.num_rows[number]
    limit = asyncio.timeout(calls.deadline_s * num_rows)
    try:
        args, kwargs = pickle.loads(calls.payloads[number])
        async with limit:
            result = await function(*args, **kwargs)
        return _read(result, calls, number, kwargs)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, which is reported
        return ExpiredCall(calls.deadline_s * num_rows) if limit.expired() else _describe(error, calls.deadline_s)


def _read(result: Any, calls: Calls, number: int, arguments: Mapping[str, Any]) -> CallScores:
    """The result of a call, with what the function logged."""
    found = read_result(result, calls.num_rows[number], per_sample=calls.per_sample)
    log = CallLog.of(arguments)
    if log is None:
        return found
    log.check(calls.num_rows[number])
    if found.log is not None:
        log.columns = {**found.log.columns, **log.columns}
    return found._replace(log=log)


async def _wait(result: Any) -> Any:
    return await result


def _describe(error: BaseException, deadline_s: float) -> Outcome:
    if isinstance(error, WrongResult):
        return WrongResult(error.problem, error.row, advice=error.advice)
    if isinstance(error, CallExpired):
        return ExpiredCall(deadline_s)
    return RaisedCall(describe_raised(error))


def _end_with_host(host_pid: int) -> None:
    """Lets the kernel kill this process with its host; elsewhere than on Linux the host's own end must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host_pid:
        os._exit(1)
