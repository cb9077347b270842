"""Calls in chunks: few messages for quick functions, an even load for slow ones."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from hf_algorithms.rewards._pool.messages import Calls, CrashedCall, ExpiredCall, Outcome
from hf_algorithms.rewards._pool.process import (
    ALL_AT_ONCE,
    ChunkResult,
    clear_progress,
    initialize,
    is_gone,
    read_progress,
    run_chunk,
)
from hf_protocols.foreign_code import Caught

__all__ = ["ChunkScheduler", "Settled"]

_Describe = Callable[[float], Outcome]
"""From the deadline of a call to its outcome."""

_BUDGET_S = 0.2
"""Time for one chunk: a chunk that is slower than expected returns the outcomes that it has."""
_LEAST_S = 0.004
"""No chunk is meant to be shorter: a message costs about a tenth of it."""
_AHEAD = 2
"""Chunks for each process: one runs, one waits."""
_MOST_AT_ONCE = 64
"""Calls of an async function that one process waits for."""
_MOST_LOSSES = 3
"""Number of times that a call may lose its process before the call began."""
_LOOK_S = 0.5
"""Time without a result after which the pool looks for chunks whose process is gone."""
_LATE_S = 1.0
"""An async function cancels its calls itself; it is killed when it does not."""


class Settled(NamedTuple):
    """Outcomes of some calls of a batch, as a pickled list."""

    batch: int
    indices: list[int]
    outcomes: bytes


class _Chunk(NamedTuple):
    batch: int
    indices: list[int]
    slot: int


class ChunkScheduler:
    """Makes calls in the processes of a pool.

    Args:
        loaders: pickled, of each function.
        num_processes: of the pool.
        closes: file descriptors that the processes close.
    """

    def __init__(self, loaders: Sequence[bytes], num_processes: int, *, closes: Sequence[int] = ()) -> None:
        self._loaders = list(loaders)
        self._num_processes = num_processes
        self._closes = tuple(closes)
        self._progress = mmap.mmap(-1, 16 * num_processes * _AHEAD)
        self._call_s: dict[int, float] = {}
        self._pool = self._start_pool()

    def run(self, batches: Sequence[Calls]) -> list[Settled]:
        """Makes every call; returns outcomes with the calls that they are of.

        A function that raises or returns something else ends the run: calls that are left have no outcome.
        """
        return _Round(self, batches).run()

    def restart(self) -> None:
        """Begins a pool in place of a broken one."""
        with Caught():  # what is left of it may be in any state
            self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool = self._start_pool()

    def schedule(self, calls: Calls, slot: int) -> Any:
        """Sends a chunk; returns its future."""
        clear_progress(self._progress, slot)
        timeout_s = calls.deadline_s * max(calls.num_rows) + (_LATE_S if calls.is_async else _BUDGET_S)
        return self._pool.schedule(run_chunk, args=(calls, slot, _BUDGET_S), timeout=timeout_s)

    def read_progress(self, slot: int) -> int:
        """Returns where the chunk of a slot was."""
        return read_progress(self._progress, slot)

    def is_gone(self, slot: int) -> bool:
        """True where the process that made the calls of a slot has ended."""
        return is_gone(self._progress, slot)

    def choose_size(self, calls: Calls, left: int) -> int:
        """Returns how many of the calls that are left make the next chunk.

        A share of what is left balances the processes at the end; the time of a call bounds it from both sides.
        """
        if calls.is_async:
            return min(math.ceil(left / self._num_processes), _MOST_AT_ONCE)
        share = math.ceil(left / (2 * self._num_processes))
        call_s = self._call_s.get(calls.function)
        if call_s is None:
            return share
        return min(max(min(share, int(_BUDGET_S / call_s)), int(_LEAST_S / call_s), 1), left)

    def note_time(self, function: int, call_s: float) -> None:
        """Learns how long a call of a function takes."""
        before = self._call_s.get(function, call_s)
        self._call_s[function] = max((before + call_s) / 2, 1e-7)

    @property
    def num_slots(self) -> int:
        """Chunks that may be under way."""
        return self._num_processes * _AHEAD

    def _start_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._num_processes,
            initializer=initialize,
            initargs=(self._loaders, self._progress, os.getpid(), self._closes),
            context=multiprocessing.get_context("fork"),  # of a process that has loaded no user's module
        )
        pool.schedule(os.getpid)  # the first call starts the processes
        return pool


class _Round:
    """The calls of one message."""

    def __init__(self, scheduler: ChunkScheduler, batches: Sequence[Calls]) -> None:
        self._scheduler = scheduler
        self._batches = batches
        self._settled: list[Settled] = []
        self._is_refused = False
        self._waiting = [deque(range(len(calls.payloads))) for calls in batches]
        self._alone: list[deque[int]] = [deque() for _ in batches]
        self._losses: Counter[tuple[int, int]] = Counter()
        self._running: dict[Any, _Chunk] = {}
        self._gone: set[Any] = set()
        self._free_slots = list(range(scheduler.num_slots))

    def run(self) -> list[Settled]:
        while not self._is_refused:
            while self._free_slots and (chosen := self._choose()) is not None:
                self._send(*chosen)
            if not self._running:
                break
            done = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done
            for future in done:
                self._settle(future)
            if not done:
                self._settle_gone()
        for future in self._running:
            future.cancel()
        return self._settled

    def _choose(self) -> tuple[int, list[int]] | None:
        """The next chunk: a batch and its calls."""
        for batch, (calls, waiting, alone) in enumerate(zip(self._batches, self._waiting, self._alone, strict=True)):
            if waiting:
                size = self._scheduler.choose_size(calls, len(waiting))
                return batch, [waiting.popleft() for _ in range(size)]
            if alone:
                return batch, [alone.popleft()]
        return None

    def _send(self, batch: int, indices: list[int]) -> None:
        chunk = _Chunk(batch, indices, self._free_slots.pop())
        calls = self._batches[batch].select(indices)
        try:
            future = self._scheduler.schedule(calls, chunk.slot)
        except RuntimeError:  # pebble's word for a pool that is broken
            self._scheduler.restart()
            future = self._scheduler.schedule(calls, chunk.slot)
        self._running[future] = chunk

    def _settle(self, future: Any) -> None:
        chunk = self._running.pop(future)
        self._free_slots.append(chunk.slot)
        try:
            result: ChunkResult = future.result()
        except TimeoutError:
            self._settle_lost(chunk, ExpiredCall)
        except ProcessExpired as error:
            code = -1 if error.exitcode is None else int(error.exitcode)
            self._settle_lost(chunk, lambda _: CrashedCall(code))
        except (CancelledError, RuntimeError):  # the pool broke: none of its chunks can be blamed
            self._put_back(chunk.batch, chunk.indices, lambda _: CrashedCall(-1), is_loss=True)
        else:
            self._settled.append(Settled(chunk.batch, chunk.indices[: result.num_calls], result.outcomes))
            self._is_refused = self._is_refused or result.is_refused
            if result.elapsed_s:
                call_s = result.elapsed_s / result.num_calls
                self._scheduler.note_time(self._batches[chunk.batch].function, call_s)
            self._put_back(chunk.batch, chunk.indices[result.num_calls :])

    def _settle_gone(self) -> None:
        """Settles chunks whose process was gone at this look and at the one before.

        Pebble looks for ended processes and reads what they began in two threads. A process that ends just after it
        began is missed where the first is the quicker one, and its chunk would wait for its deadline.
        """
        gone = {future for future, chunk in self._running.items() if self._scheduler.is_gone(chunk.slot)}
        for future in gone & self._gone:
            if future.cancel():
                chunk = self._running.pop(future)
                self._free_slots.append(chunk.slot)
                self._settle_lost(chunk, lambda _: CrashedCall(-1))
        self._gone = gone

    def _settle_lost(self, chunk: _Chunk, describe: _Describe) -> None:
        """The call that a process ended in has its outcome; the others of its chunk are made again."""
        number = self._scheduler.read_progress(chunk.slot)
        if number == ALL_AT_ONCE and len(chunk.indices) > 1:
            self._alone[chunk.batch] += chunk.indices
        elif number == 0:
            self._put_back(chunk.batch, chunk.indices, describe, is_loss=True)
        else:
            culprit = chunk.indices[max(number, 1) - 1]
            self._note(chunk.batch, culprit, describe)
            self._put_back(chunk.batch, [index for index in chunk.indices if index != culprit])

    def _put_back(
        self, batch: int, indices: Sequence[int], describe: _Describe = ExpiredCall, *, is_loss: bool = False
    ) -> None:
        for index in reversed(indices):
            self._losses[batch, index] += is_loss
            if self._losses[batch, index] >= _MOST_LOSSES:
                self._note(batch, index, describe)
            else:
                self._waiting[batch].appendleft(index)

    def _note(self, batch: int, index: int, describe: _Describe) -> None:
        calls = self._batches[batch]
        outcome = describe(calls.deadline_s * calls.num_rows[index])
        self._settled.append(Settled(batch, [index], pickle.dumps([outcome])))
