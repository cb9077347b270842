"""Signals that end a program, while an executor has processes to end with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["TerminationGuard", "shielded"]


class TerminationGuard:
    """Turns SIGTERM into ``SystemExit(143)`` in the main thread, so that ``with`` blocks and ``finally`` run.

    Ctrl-C is an exception in Python already. Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Start; the handler that was there before comes back with :meth:`restore`."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _exit)
            self._installed = True

    def restore(self) -> None:
        """Stop."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._installed = False


@contextmanager
def shielded() -> Iterator[None]:
    """Within it, a further Ctrl-C or SIGTERM waits: ending takes seconds and has a deadline.

    A signal that arrives is delivered afterwards, in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {kind: signal.signal(kind, lambda kind, _: arrived.append(kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)
    for kind in arrived[:1]:
        signal.raise_signal(kind)


def _exit(kind: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + kind)
