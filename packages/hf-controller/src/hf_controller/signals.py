"""Signals that end a program, while an executor has processes to end with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["SignalGuard", "Terminated", "after_imports", "shielded"]

Handler = Callable[[int, FrameType | None], Any]

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SLICE_S = 0.05
_LONGEST_IMPORT_S = 10.0


class Terminated(SystemExit):
    """Is raised in the main thread on SIGTERM and SIGHUP. Code that catches SystemExit must raise it again."""


class SignalGuard:
    """Makes Ctrl-C, SIGTERM and SIGHUP exceptions of the main thread, so that `with` blocks and `finally` run.

    SIGTERM becomes `Terminated(143)`, a SystemExit, and SIGHUP `Terminated(129)`. Ctrl-C keeps its handler. Ctrl-C and
    SIGHUP are ignored where they were ignored. An exception may get lost: a library swallows it, or Python cannot raise
    it, as in a finalizer. The next `watching` raises it again. Python allows handlers in the main thread alone; in
    another one the guard does nothing.

    Args:
        with_interrupts: watch Ctrl-C as well.
    """

    def __init__(self, *, with_interrupts: bool = True) -> None:
        self._with_interrupts = with_interrupts
        self._received: int | None = None
        self._lost: int | None = None
        self._ending: int | None = None
        self._before: dict[int, Any] = {}
        self._unraisable_before: Any = None

    def install(self) -> None:
        """Starts watching; `restore` puts the earlier handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return
        for kind in _ENDING:
            if kind == signal.SIGTERM or signal.getsignal(kind) is not signal.SIG_IGN:  # as `nohup` has it
                self._before[kind] = signal.signal(kind, self._record(after_imports(_exit)))
        interrupt = signal.getsignal(signal.SIGINT)
        if self._with_interrupts and callable(interrupt):
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._record(interrupt))
        self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._note_lost

    def restore(self) -> None:
        """Stop."""
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        for kind, handler in self._before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()
        sys.unraisablehook = self._unraisable_before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps third-party code, such as a library's wait: a signal that arrives in the block raises its exception at
        the end of the block, even if that code handled or changed the exception.
        """
        self._received = None
        try:
            yield
        except BaseException:  # that code may raise anything in the place of the signal's exception
            if self._received is None:
                raise
        kinds = {self._received, self._lost}
        self._received, self._lost = None, None
        # Code that ends the program in order (except, finally, __exit__) may wait for a last call.
        ends_unnoticed = not isinstance(sys.exc_info()[1], SystemExit)
        if self._ending is not None and (ends_unnoticed or self._ending in kinds):
            _exit(self._ending, None)
        if signal.SIGINT in kinds:
            raise KeyboardInterrupt

    def _record(self, handler: Handler) -> Handler:
        def record(kind: int, frame: FrameType | None) -> None:
            self._received = kind
            if kind in _ENDING:
                self._ending = kind
            handler(kind, frame)

        return record

    def _note_lost(self, unraisable: sys.UnraisableHookArgs) -> None:
        if self._received is not None and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            self._lost = self._received
        else:
            self._unraisable_before(unraisable)


def after_imports(handler: Handler) -> Handler:
    """A signal handler that waits, for some seconds, while a module is imported.

    An exception in the middle of an import leaves modules half imported, so that other modules raise errors of their
    own about them. Where native code imports, it aborts the program.
    """
    arrived_s: list[float] = []

    def handle(kind: int, frame: FrameType | None) -> None:
        arrived_s.append(time.monotonic())
        if _is_importing(frame) and arrived_s[-1] - arrived_s[0] < _LONGEST_IMPORT_S:
            again = threading.Timer(_SLICE_S, os.kill, (os.getpid(), kind))
            again.daemon = True
            again.start()
        else:
            arrived_s.clear()
            handler(kind, frame)

    return handle


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def shielded() -> Iterator[None]:
    """Within the block, a further Ctrl-C, SIGTERM or SIGHUP waits: ending takes seconds and has a deadline.

    A signal that arrives is delivered afterwards, in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    kinds = [kind for kind in (signal.SIGINT, *_ENDING) if signal.getsignal(kind) is not signal.SIG_IGN]
    before: dict[int, Any] = {kind: signal.signal(kind, lambda kind, _: arrived.append(kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)
    for kind in arrived[:1]:
        signal.raise_signal(kind)


def _exit(kind: int, frame: FrameType | None) -> None:
    raise Terminated(128 + kind)
