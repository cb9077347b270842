"""Whether tensors have memory of their own that can be read, or written: asked before weights move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from hf_protocols.errors import ReshardError

__all__ = ["check_readable", "check_writable"]

_Tensors = Mapping[str, Sequence[torch.Tensor]]


def check_readable(weights: _Tensors, where: str) -> None:
    """Refuses tensors without memory.

    Raises:
        ReshardError: naming those that are sparse, on the meta device, or whose storage was emptied.
    """
    _refuse(((name, _lack(part)) for name, part in _flat(weights)), where)


def check_writable(weights: _Tensors, where: str, *, are_filled: bool = True) -> None:
    """Refuses tensors that cannot each hold values of their own.

    Args:
        weights: by name.
        where: whose they are, for the message.
        are_filled: whether they have their memory now; a `ShardMover` gives them theirs on the way.

    Raises:
        ReshardError: as `check_readable`, and naming those of inference mode outside of it, those whose elements share
            memory, as expanded ones do, and those that lie in the same memory as another.
    """
    _refuse(((name, _lack(part, is_filled=are_filled) or _repeat(part)) for name, part in _flat(weights)), where)
    if are_filled:
        _refuse(_overlaps(weights), where)


def _refuse(problems: Iterable[tuple[str, str]], where: str) -> None:
    if found := [f"{name!r} {problem}" for name, problem in problems if problem]:
        raise ReshardError(f"{where} cannot be used: {'; '.join(found)}")


def _lack(tensor: torch.Tensor, *, is_filled: bool = True) -> str:
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}: give a dense tensor"
    if tensor.is_meta:
        return "is on the meta device: give it memory, as `to_empty` does"
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if is_filled and tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        return "has no memory: its storage was emptied"
    return ""


def _repeat(tensor: torch.Tensor) -> str:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made under torch.inference_mode: it cannot be written outside of it"
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return "is expanded, or overlaps itself, so that several of its elements are one: give a contiguous tensor"
        reach += (size - 1) * stride
    return ""


def _overlaps(weights: _Tensors) -> Iterator[tuple[str, str]]:
    """Tensors that begin where another does, or, both contiguous, before it ends."""
    spans = sorted(
        (str(part.device), part.data_ptr(), part.nbytes if part.is_contiguous() else 1, name)
        for name, part in _flat(weights)
        if part.numel()
    )
    for (device, start, size, name), (other_device, other_start, _, other) in pairwise(spans):
        if device == other_device and other_start < start + size:
            yield other, f"shares memory with {name!r}: give each its own"


def _flat(weights: _Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, part) for name, parts in weights.items() for part in parts)
