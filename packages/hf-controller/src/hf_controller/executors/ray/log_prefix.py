"""Streams whose lines say which role and rank wrote them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["PrefixedStream", "attribute_streams"]


class PrefixedStream:
    """A text stream that writes whole lines to `target`, each with a label in front.

    Args:
        target: where lines go.
        label: answers the label of the moment, such as `"actor/0"`.
    """

    def __init__(self, target: TextIO, label: Callable[[], str]) -> None:
        self._target = target
        self._label = label
        self._lock = threading.Lock()
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Keep `text` until its line ends, then write the line at once."""
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            if lines:
                label = self._label()
                self._target.write("".join(f"[{label}] {line}\n" for line in lines))
                self._target.flush()
        return len(text)

    def flush(self) -> None:
        """Pass on what is complete; an unfinished line waits for its end."""
        self._target.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def attribute_streams(label: Callable[[], str]) -> None:
    """Send this process's standard output and error, labelled, to standard error."""
    target = sys.stderr
    sys.stdout = PrefixedStream(target, label)
    sys.stderr = PrefixedStream(target, label)
