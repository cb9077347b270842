"""A part of a parameter in the shape of the whole, for the loaders of generation engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_engine.resharding.boxes import Box
from hf_protocols.arguments import show
from hf_protocols.errors import ReshardError

__all__ = ["Shard"]


class Shard(torch.Tensor):
    """A box of a parameter in the shape of the whole: what a loader cuts out of it must be exactly the box.

    An engine's loaders take whole parameters and narrow them to their rank's part. Given this, they find the part
    already cut, and a loader that wants any other part is refused: the layouts of both sides cannot differ unnoticed.
    """

    is_used: bool
    """Whether a loader has taken the part."""
    _name: str
    _whole: Box
    _box: Box
    _part: torch.Tensor

    @staticmethod
    def __new__(cls: type[Shard], name: str, shape: Sequence[int], box: Box, part: torch.Tensor) -> Shard:
        """A whole parameter `name` of `shape`, of which `part` is at `box`."""
        shard: Shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        shard._name, shard._whole, shard._box, shard._part = name, Box.whole(shape), box, part
        shard.is_used = False
        return shard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers `narrow` with the part, and a copy of the whole parameter where that is the part."""
        kwargs = kwargs or {}
        if func is torch.Tensor.narrow:
            return args[0]._cut(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuses to be read as a whole that is not there."""
        named = {key: _read(value, func) for key, value in (kwargs or {}).items()}
        return func(*(_read(value, func) for value in args), **named)

    def _cut(self, dim: int, start: int, length: int) -> torch.Tensor:
        whole = self._whole
        dim %= len(whole.shape)
        if self._box == whole:  # all of it is here: the loader may take what its rank needs
            self.is_used = True
            return self._part.narrow(dim, int(start), int(length))
        wanted = Box(
            (*whole.offset[:dim], int(start), *whole.offset[dim + 1 :]),
            (*whole.shape[:dim], int(length), *whole.shape[dim + 1 :]),
        )
        if wanted != self._box and (wanted.numel or self._box.numel):
            raise ReshardError(
                f"the engine's loader takes {wanted} of {show(self._name)}, the layout says {self._box}: this "
                "model is not "
                "laid out here as the engine lays it out"
            )
        self.is_used = True
        return self._part


def _read(value: Any, func: Any) -> Any:
    if not isinstance(value, Shard):
        return value
    if value._box != value._whole:
        raise ReshardError(
            f"the engine's loader uses {func} on the whole of {show(value._name)}, of which this rank holds a part"
        )
    value.is_used = True
    return value._part
