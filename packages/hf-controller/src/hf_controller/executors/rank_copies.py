"""Private state of ranks that share a process: each rank has its own random numbers and copies of objects."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_protocols.foreign_code import Caught

__all__ = ["RandomStream", "copy_object", "forget_pending_normal"]


class RandomStream:
    """Python's, torch's and numpy's global random numbers as one rank draws them.

    Args:
        device: the rank's device, whose generator belongs to the stream too.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._states: dict[str, Any] | None = None
        self._numpys: Any = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within the block the global generators continue where this rank left them; afterwards they are as before."""
        outside = self._save()
        if self._states is not None:
            _restore(self._states)
        try:
            with self._numpys_drawn():
                yield
        finally:
            self._states = self._save()
            _restore(outside)

    @contextmanager
    def _numpys_drawn(self) -> Iterator[None]:
        """Lends numpy this rank's generator: to copy states in and out would take 0.2 ms a call."""
        if "numpy" not in sys.modules:
            yield
            return
        numpys = sys.modules["numpy"].random
        generator, state = numpys.get_bit_generator(), numpys.get_state(legacy=False)
        if self._numpys is None:
            self._numpys = type(generator)()
            self._numpys.state = generator.state
        numpys.set_bit_generator(self._numpys)
        try:
            yield
        finally:
            self._numpys = numpys.get_bit_generator()
            numpys.set_bit_generator(generator)
            if state["has_gauss"]:
                numpys.set_state(state)

    def _save(self) -> dict[str, Any]:
        import torch

        states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        if self._device != "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states[self._device] = torch.cuda.get_rng_state(self._device)
        return states


def _restore(states: dict[str, Any]) -> None:
    import torch

    for name, state in states.items():
        if name == "python":
            random.setstate(state)
        elif name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)


def forget_pending_normal() -> None:
    """Drops the second of a pair of normal numbers that numpy's global generator drew in an earlier call.

    It is not part of a generator's state: a rank would have it in a process of its own only.
    """
    if "numpy" in sys.modules:
        numpys = sys.modules["numpy"].random
        numpys.set_bit_generator(numpys.get_bit_generator())


def copy_object(value: Any) -> Any:
    """A copy that shares no mutable part with `value`; raises the errors of copying and pickling it."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    with Caught():  # a tensor inside a graph can only be pickled
        return copy.deepcopy(value)
    return pickle.loads(pickle.dumps(value))
