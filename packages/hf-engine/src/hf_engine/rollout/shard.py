"""A part of a parameter in the shape of the whole, for the loaders of generation engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hf_engine.resharding.boxes import Box
from hf_protocols.errors import ReshardError
from hf_protocols.validation import show

__all__ = ["ShardTensor"]


class ShardTensor(torch.Tensor):
    """A box of a parameter in the shape of the whole: what a loader cuts out of it must be exactly the box.

    An engine's loaders take whole parameters and narrow them to their rank's part. Given this, they find the part
    already cut, and a loader that wants any other part is refused: the layouts of both sides cannot differ unnoticed.
    """

    _name: str
    _whole: Box
    _box: Box
    _part: torch.Tensor
    _origin: ShardTensor | None
    _is_used: bool

    @staticmethod
    def __new__(cls: type[ShardTensor], name: str, shape: Sequence[int], box: Box, part: torch.Tensor) -> ShardTensor:
        """A whole parameter `name` of `shape`, of which `part` is at `box`."""
        shard: ShardTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        shard._name, shard._whole, shard._box, shard._part = name, Box.whole(shape), box, part
        shard._origin, shard._is_used = None, False
        return shard

    @property
    def is_used(self) -> bool:
        """True once a loader has taken the part."""
        return self._is_used

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers `narrow` with the part; an expert's matrix may be stacked alone and unstacked before."""
        kwargs = kwargs or {}
        if func is torch.Tensor.narrow:
            return args[0]._cut(*args[1:], **kwargs)
        if func is torch.Tensor.unsqueeze and args[1:] == (0,):
            return args[0]._stack_alone()
        if func is torch.Tensor.unbind and len(args) == 1 and args[0]._whole.shape[0] == 1:
            return (args[0]._unstack(),)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuses to be read as a whole that is not there."""
        args, kwargs = tree_map(partial(_read, func=func), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cut(self, dim: int, start: int, length: int) -> torch.Tensor:
        whole = self._whole
        dim %= len(whole.shape)
        if self._box == whole:  # all of it is here: the loader may take what its rank needs
            self._mark_used()
            return self._part.narrow(dim, int(start), int(length))
        wanted = Box(
            (*whole.offset[:dim], int(start), *whole.offset[dim + 1 :]),
            (*whole.shape[:dim], int(length), *whole.shape[dim + 1 :]),
        )
        if wanted != self._box and (wanted.numel or self._box.numel):
            raise ReshardError(
                f"the engine's loader takes {wanted} of {show(self._name)}, the layout says {self._box}: this model is "
                "not laid out here as the engine lays it out"
            )
        self._mark_used()
        return self._part

    def _stack_alone(self) -> ShardTensor:
        """The same with a leading dim of 1."""
        box = Box((0, *self._box.offset), (1, *self._box.shape))
        return self._derive((1, *self._whole.shape), box, self._part.unsqueeze(0))

    def _unstack(self) -> ShardTensor:
        """The same without its leading dim, which is 1."""
        return self._derive(self._whole.shape[1:], Box(self._box.offset[1:], self._box.shape[1:]), self._part[0])

    def _derive(self, shape: Sequence[int], box: Box, part: torch.Tensor) -> ShardTensor:
        derived = ShardTensor(self._name, shape, box, part)
        derived._origin = self
        return derived

    def _mark_used(self) -> None:
        self._is_used = True
        if self._origin is not None:
            self._origin._mark_used()


def _read(value: Any, *, func: Any) -> Any:
    if not isinstance(value, ShardTensor):
        return value
    if value._box != value._whole:
        raise ReshardError(
            f"the engine's loader uses {func} on the whole of {show(value._name)}, of which this rank holds a part"
        )
    value._mark_used()
    return value._part
