"""Private state of ranks that share a process: each has its own random numbers, torch modes and copies of objects."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from numpy.random import mtrand

from hf_protocols.foreign_code import Caught

__all__ = ["RandomStream", "TorchModes", "copy_object"]


class RandomStream:
    """Python's, torch's and numpy's global random numbers as one rank draws them.

    Args:
        device: the rank's device, whose generator belongs to the stream too.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._states: dict[str, Any] | None = None
        self._of_numpy: _NumpyRandom | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within the block the global generators continue where this rank left them; afterwards they are as before."""
        outside, numpy_outside = self._save(), _NumpyRandom.current()
        if self._states is not None:
            _restore(self._states)
        (self._of_numpy or numpy_outside.copy()).lend()
        try:
            yield
        finally:
            self._states, self._of_numpy = self._save(), _NumpyRandom.current()
            _restore(outside)
            numpy_outside.lend()

    def _save(self) -> dict[str, Any]:
        import torch

        states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        if self._device != "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states[self._device] = torch.cuda.get_rng_state(self._device)
        return states


class TorchModes:
    """Torch's modes as one rank has them: those of a process that has just started, and then as its methods left them.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: str) -> None:
        self._kind = device.partition(":")[0]
        self._has_gradients = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block nothing is known of the program's `inference_mode`, `no_grad` and `autocast`."""
        import torch

        off = torch.autocast("cpu", enabled=False), torch.autocast(self._kind, enabled=False)
        with torch.inference_mode(False), off[0], off[1], torch.set_grad_enabled(self._has_gradients):
            try:
                yield
            finally:
                self._has_gradients = torch.is_grad_enabled()


class _NumpyRandom(NamedTuple):
    """Numpy's global random numbers: a bit generator is lent, because copies of its state take 0.1 ms a call."""

    bit_generator: Any
    state: dict[str, Any] | None
    """Its state with the second of two normal numbers drawn together, which no bit generator has; None without one."""

    @classmethod
    def current(cls) -> _NumpyRandom:
        state = mtrand.get_state(legacy=False)
        return cls(mtrand.get_bit_generator(), state if state["has_gauss"] else None)

    def copy(self) -> _NumpyRandom:
        return _NumpyRandom(copy.deepcopy(self.bit_generator), self.state)

    def lend(self) -> None:
        """Has numpy draw from this generator."""
        mtrand.set_bit_generator(self.bit_generator)
        if self.state is not None:
            mtrand.set_state(self.state)


def _restore(states: dict[str, Any]) -> None:
    import torch

    for name, state in states.items():
        if name == "python":
            random.setstate(state)
        elif name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)


def copy_object(value: Any) -> Any:
    """A copy that shares no mutable part with `value`; raises the errors of copying and pickling it."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    with Caught():  # a tensor inside a graph can only be pickled
        return copy.deepcopy(value)
    return pickle.loads(pickle.dumps(value))
