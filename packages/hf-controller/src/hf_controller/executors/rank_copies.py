"""Private state of ranks that share a process: each has its own random numbers, torch modes and copies of objects."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.random import mtrand

from hf_protocols.foreign_code import Caught

if TYPE_CHECKING:
    import torch

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
    """Torch's modes and defaults on one rank: as in a new process at first, and then as the rank's methods left them.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: str) -> None:
        self._kinds = {"cpu", device.partition(":")[0]}
        self._has_gradients = True
        self._dtype: torch.dtype | None = None
        self._default_device: torch.device | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the block without the program's `inference_mode`, `no_grad`, `autocast`, default dtype and device."""
        import torch

        with _without_autocast(self._kinds), torch.inference_mode(False), torch.set_grad_enabled(self._has_gradients):
            dtype, modes = torch.get_default_dtype(), _FunctionModes.take()
            try:
                modes.put_back(with_devices=False)
                torch.set_default_dtype(self._dtype or torch.float32)
                if self._default_device is not None:
                    torch.set_default_device(self._default_device)
                yield
            finally:
                self._has_gradients, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
                self._default_device = _FunctionModes.take().default_device
                torch.set_default_dtype(dtype)
                modes.put_back(with_devices=True)


class _FunctionModes(NamedTuple):
    """Modes of torch's functions; a default device is one, set for all that follows or in a block.

    Torch cannot set it inside of another such block, so the program's modes are removed first and restored unchanged.
    """

    modes: list[Any]
    """The last one first."""
    of_default: Any
    """The mode of `torch.set_default_device`; None without one."""
    current: Any
    """The device of the last of these modes, as torch's compiler reads it."""

    @classmethod
    def take(cls) -> _FunctionModes:
        """Takes the modes away: torch makes tensors on the host."""
        import torch
        from torch.utils import _device

        overrides: Any = torch.overrides
        modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        taken = cls(modes, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = _device.CURRENT_DEVICE = None
        return taken

    @property
    def default_device(self) -> torch.device | None:
        """The device of `torch.set_default_device`; None without one."""
        return None if self.of_default is None else self.of_default.device

    def put_back(self, *, with_devices: bool) -> None:
        """Puts the modes back. Without `with_devices`, leaves out those that set a device."""
        import torch
        from torch.utils import _device

        overrides: Any = torch.overrides
        for mode in reversed(self.modes):
            if with_devices or not isinstance(mode, _device.DeviceContext):
                overrides._push_mode(mode)
        if with_devices:
            torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = self.of_default, self.current


@contextmanager
def _without_autocast(kinds: Collection[str]) -> Iterator[None]:
    """Leaves the program's blocks of autocast, so that a method's own is the outermost.

    Torch keeps the weights that it casts until the outermost block ends, even if that one is off or of another kind of
    device: a method that trains inside of it would go on with the weights of its first step.
    """
    import torch

    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if not depth:
        yield
        return
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    has_cache = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    for kind in kinds:
        _set_autocast(kind, is_on=False, dtype=torch.bfloat16 if kind == "cpu" else torch.float16)
    torch.set_autocast_cache_enabled(True)
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(has_cache)
        for kind, (is_on, dtype) in before.items():
            _set_autocast(kind, is_on=is_on, dtype=dtype)


def _set_autocast(kind: str, *, is_on: bool, dtype: torch.dtype) -> None:
    import torch

    torch.set_autocast_enabled(kind, is_on)
    torch.set_autocast_dtype(kind, dtype)


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
    with Caught():
        return copy.deepcopy(value)
    with Caught():  # a module is what it was: there is one in a process
        return copy.deepcopy(value, {id(module): module for module in list(sys.modules.values())})
    # A tensor inside a graph can only be pickled.
    return pickle.loads(pickle.dumps(value))
