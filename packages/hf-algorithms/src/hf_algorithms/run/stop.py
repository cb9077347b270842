"""Runs that stop before their last iteration: on a signal, or after `run.max_seconds`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from hf_controller import Terminated

if TYPE_CHECKING:
    from hf_algorithms.config import RunConfig

__all__ = ["RunStop"]


class RunStop:
    """Lets a run stop between two iterations; a context manager around them.

    The first SIGTERM or SIGHUP requests a stop, and so does the end of `run.max_seconds`. An iteration that has not
    ended `run.grace_s` later is dropped: `Terminated` is raised in the main thread. A second signal raises it at once.
    Only the main thread may handle signals. In another thread only `run.max_seconds` requests a stop, and no iteration
    is dropped.

    Args:
        config: `[run]`.
        started_s: of `time.monotonic`, when the run was started.
        after: called with each iteration that has ended well.
    """

    def __init__(self, config: RunConfig, started_s: float, after: Callable[[int], None] = lambda _: None) -> None:
        self._config = config
        self._after = after
        self._started_s = started_s
        self._before: dict[int, Any] = {}
        self._timers: list[threading.Timer] = []
        self._lock = threading.RLock()
        self._is_open = False
        self._signal: int | None = None
        self._drops = False
        self._is_decided = False
        self.has_begun = False
        """True once an iteration has begun."""
        self.code: int | None = None
        """Exit code of the stop that was asked for: 129 or 143 by its signal, 0 after `run.max_seconds`."""

    def __enter__(self) -> RunStop:
        self._is_open = self.has_begun = True
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(kind) is not signal.SIG_IGN:  # as `nohup` has it
                    self._before[kind] = signal.signal(kind, self._hear)
        if (limit_s := self._config.max_seconds) is not None:
            rest_s = max(0.0, self._started_s + limit_s - time.monotonic())
            self._start_timer(rest_s, lambda: self._ask(0, f"run.max_seconds = {limit_s:g} s are over"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_open = False
            for timer in self._timers:
                timer.cancel()
        for signal_kind, handler in self._before.items():
            signal.signal(signal_kind, handler if handler is not None else signal.SIG_DFL)
        if self._drops and isinstance(error, SystemExit):  # raised by the handler that was installed before
            error.code = self.code

    def iterate(self, iterate: Callable[[int], None], first: int, last: int) -> bool:
        """Calls `iterate` with each number from `first` to `last`; returns True if it stopped because it was asked to.

        The iteration that calls `decide` last is the one that stops: it commits.
        """
        with self:
            for iteration in range(first, last + 1):
                iterate(iteration)
                self._after(iteration)
                if self._is_decided:
                    break
        return self._is_decided

    def decide(self) -> bool:
        """Returns True if the iteration that now ends is the last one before a stop."""
        self._is_decided = self.code is not None
        return self._is_decided

    def end(self) -> None:
        """Ends the program where a signal has asked for it.

        Raises:
            Terminated: with the signal's exit code.
        """
        if self.code:
            raise Terminated(self.code)

    def _hear(self, kind: int, frame: FrameType | None) -> None:
        if self._is_open and self._signal is None and not self._drops:
            self._signal = kind
            self._ask(128 + kind, signal.Signals(kind).name)
            return
        handler = self._before[kind]
        if not callable(handler):
            raise Terminated(128 + kind)
        handler(kind, frame)

    def _ask(self, code: int, reason: str) -> None:
        grace_s = self._config.grace_s
        with self._lock:
            if not self._is_open:
                return
            is_first, self.code = self.code is None, code
            if is_first and self._before:
                self._start_timer(grace_s, self._drop)
        line = (
            f"{reason}: the run stops after this iteration. If that takes longer than run.grace_s = {grace_s:g} s, "
            "it is dropped; a second signal ends the run at once\n"
        )
        with suppress(OSError):
            os.write(2, line.encode())  # a handler of signals may not use buffers

    def _drop(self) -> None:
        with self._lock:
            if self._is_open:
                self._drops = True
                os.kill(os.getpid(), signal.SIGTERM if signal.SIGTERM in self._before else signal.SIGHUP)

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
