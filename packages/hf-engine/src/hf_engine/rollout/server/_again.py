"""A server that is gone, and is started again by its supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from hf_engine.rollout.server._connection import LostServerError
from hf_engine.rollout.server._dialect import Dialect, ServerFacts
from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = ["find_again"]

_PAUSE_S = 0.5
_CHANGEABLE = ("stamp", "cache_tokens")
"""Facts in which a server may differ from the one that it replaces."""


def find_again(
    find: Callable[[], Dialect], facts: ServerFacts, lost: LostServerError, *, restart_timeout_s: float
) -> Dialect:
    """Waits until a server of the same kind answers at the URL of one that is gone.

    Args:
        find: identifies the server at the URL.
        facts: of the server that is gone.
        lost: how its end was noticed.
        restart_timeout_s: deadline.

    Raises:
        LostServerError: if none answers in time.
        BackendError: if another one answers, such as one with another model.
    """
    stop = time.monotonic() + restart_timeout_s
    while time.monotonic() < stop:
        time.sleep(_PAUSE_S)
        found = None
        with suppress(BackendError):  # it is still starting
            found = find()
        if found is not None:
            _check_alike(facts, found.facts)
            return found
    raise LostServerError(
        f"{lost}. None was started there within rollout.options.restart_timeout_s = {restart_timeout_s:g}"
    ) from lost


def _check_alike(before: ServerFacts, now: ServerFacts) -> None:
    others = asdict(now)
    changed = [
        f"{name} = {show(others[name])}, was {show(value)}"
        for name, value in asdict(before).items()
        if name not in _CHANGEABLE and others[name] != value
    ]
    if changed:
        raise BackendError(f"{before.name} was started again as another one: {'; '.join(changed)}. Start it as before")
