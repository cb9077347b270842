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
from typing import Any, ClassVar

__all__ = ["SignalGuard", "Terminated", "after_imports", "send_lost_signals_again", "shielded"]

Handler = Callable[[int, FrameType | None], Any]
_Hook = int | None
"""The number of a signal, or `_UNRAISABLE`."""

_UNRAISABLE = None
"""Python's own hook for exceptions that it cannot raise."""

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

    Several guards may watch at once, and end in any order. All of them hear a signal, so that no executor of a program
    goes on after it.

    Args:
        with_interrupts: watch Ctrl-C as well.
    """

    _installed: ClassVar[list[SignalGuard]] = []
    """All guards that watch, the first one first."""

    def __init__(self, *, with_interrupts: bool = True) -> None:
        self._with_interrupts = with_interrupts
        self._received: int | None = None
        self._lost: int | None = None
        self._ending: int | None = None
        self._own: dict[_Hook, Any] = {}
        self._before: dict[_Hook, Any] = {}

    def install(self) -> None:
        """Starts watching; `restore` puts the earlier handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return
        own: dict[_Hook, Any] = {}
        for kind in _ENDING:
            if kind == signal.SIGTERM or signal.getsignal(kind) is not signal.SIG_IGN:  # as `nohup` has it
                own[kind] = self._record(after_imports(_exit))
        interrupt = signal.getsignal(signal.SIGINT)
        if self._with_interrupts and callable(interrupt):
            own[signal.SIGINT] = self._record(interrupt)
        self._own = {**own, _UNRAISABLE: self._note_lost}
        self._before = {hook: _get_hook(hook) for hook in self._own}
        self._installed.append(self)
        for hook, handler in self._own.items():
            _set_hook(hook, handler)

    def restore(self) -> None:
        """Stops watching. A handler that was installed later stays, and restores the one that this guard replaced."""
        if self not in self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed.remove(self)
        for hook, own in self._own.items():
            before = self._before[hook]
            later = next((each for each in self._installed if each._before.get(hook) is own), None)
            if later is not None:
                later._before[hook] = before
            elif _get_hook(hook) is own:
                _set_hook(hook, before)

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
            for guard in self._installed:
                if kind in guard._own:
                    guard._note(kind)
            handler(kind, frame)

        return record

    def _note(self, kind: int) -> None:
        self._received = kind
        if kind in _ENDING:
            self._ending = kind

    def _note_lost(self, unraisable: sys.UnraisableHookArgs) -> None:
        if self._received is not None and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            self._lost = self._received
        else:
            self._before[_UNRAISABLE](unraisable)


def _get_hook(hook: _Hook) -> Any:
    return sys.unraisablehook if hook is _UNRAISABLE else signal.getsignal(hook)


def _set_hook(hook: _Hook, handler: Any) -> None:
    if hook is _UNRAISABLE:
        sys.unraisablehook = handler
    else:
        signal.signal(hook, handler if handler is not None else signal.SIG_DFL)


def after_imports(handler: Handler) -> Handler:
    """A signal handler that waits, for some seconds, while a module is imported.

    An exception in the middle of an import leaves modules half imported, so that other modules raise errors of their
    own about them. Where native code imports, it aborts the program.
    """
    arrived_s: list[float] = []

    def handle(kind: int, frame: FrameType | None) -> None:
        arrived_s.append(time.monotonic())
        if _is_importing(frame) and arrived_s[-1] - arrived_s[0] < _LONGEST_IMPORT_S:
            _send_soon(kind)
        else:
            arrived_s.clear()
            handler(kind, frame)

    return handle


def send_lost_signals_again() -> None:
    """Sends a signal again whose exception Python could not raise, because it arrived in a finalizer.

    For a program whose handlers raise KeyboardInterrupt, or SystemExit with 128 and the signal's number. A guard does
    the same for what it watches; this also serves before there is one.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        kinds = {128 + kind: kind for kind in (signal.SIGINT, *_ENDING)}
        kind = kinds.get(error.code) if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        if isinstance(error, KeyboardInterrupt):
            kind = signal.SIGINT
        if kind is None:
            before(unraisable)
            return
        try:
            _send_soon(kind)
        except RuntimeError:  # the interpreter ends, and so does the program
            before(unraisable)

    sys.unraisablehook = hook


def _send_soon(kind: int) -> None:
    again = threading.Timer(_SLICE_S, os.kill, (os.getpid(), kind))
    again.daemon = True
    again.start()


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
