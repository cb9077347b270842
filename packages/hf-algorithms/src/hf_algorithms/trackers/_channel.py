"""One tracker at work: in a thread of its own, so that a slow or failing one neither delays nor ends the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hf_algorithms.trackers._tracker import RunFacts, Status, Tracker
from hf_algorithms.url_secrets import hide_secrets
from hf_protocols.foreign_code import Caught

__all__ = ["Channel"]

_MOST_WAITING = 10_000
"""Iterations that wait for a tracker; later ones are lost to it."""


class Channel:
    """Passes a run's metrics to one tracker, in order.

    Args:
        name: of the tracker.
        tracker: begins at once.
        facts: about the run.
        note: shows the user a line; called from the channel's thread.
    """

    def __init__(self, name: str, tracker: Tracker, facts: RunFacts, note: Callable[[str], None]) -> None:
        self.name = name
        self.failure: str | None = None
        """First error of the tracker, in one line."""
        self.num_given = 0
        self.num_written = 0
        self._tracker = tracker
        self._note = note
        self._has_started = False
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, args=(facts,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Hands over the metrics of an iteration; returns at once."""
        self.num_given += 1
        with suppress(queue.Full):  # counted as given and never as written
            self._calls.put_nowait(lambda: self._log(iteration, metrics))

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Hands over the end of the run; returns at once. `join` waits for it."""
        with suppress(queue.Full):  # the tracker is stuck, and `join` will say so
            self._calls.put_nowait(lambda: self._finish(status, summary, iteration))
            self._calls.put_nowait(None)

    def join(self, timeout_s: float) -> bool:
        """Waits until the tracker has ended; False if it has not in that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, facts: RunFacts) -> None:
        self._guard(lambda: self._start(facts))
        for call in iter(self._calls.get, None):
            self._guard(call)

    def _start(self, facts: RunFacts) -> None:
        note = self._tracker.start(facts)
        self._has_started = True
        if note:
            self._note(note)

    def _log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if self.failure is None:
            self._tracker.log(iteration, metrics)
            self.num_written += 1

    def _finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        if self._has_started:  # after a failure too: what it holds is let go
            self._tracker.finish(status, summary, iteration)

    def _guard(self, call: Callable[[], None]) -> None:
        """Keeps and shows the first error."""
        with Caught(also=(SystemExit,)) as caught:
            call()
        if caught.error is not None and self.failure is None:
            text = " ".join(str(caught.error).split("\n", 1)[0].split())
            self.failure = hide_secrets(f"{type(caught.error).__name__}: {text}")
            self._note(f"warning: the tracker {self.name} failed: {self.failure}. The run goes on without it")
