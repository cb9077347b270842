"""The memory of a program and of every process that it started."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Samples the resident memory of this process and all its descendants while the `with` block runs.

    A page that several processes share, such as Ray's object store, counts once for each of them, so the sum is an
    upper bound of what the machine gives.

    Args:
        interval_s: seconds between two samples; one more is taken on entry and one on exit.
    """

    def __init__(self, *, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The largest sum seen so far; 0 before entry."""
        return self._peak_bytes

    def __enter__(self) -> MemoryMeter:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self._peak_bytes = max(self._peak_bytes, _tree_bytes())


def _tree_bytes() -> int:
    """Resident bytes of the process tree now; a process that ends meanwhile counts as nothing."""
    root = psutil.Process()
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
