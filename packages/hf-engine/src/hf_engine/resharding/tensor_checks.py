"""Checks of a rank's tensors before weights move: they are its boxes of a layout, in memory that can be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.errors import ReshardError
from hf_protocols.validation import describe_names, shorten_list, show

__all__ = ["check_readable", "check_resizable", "check_weights", "check_writable"]

_Tensors = Mapping[str, Sequence[torch.Tensor]]


def check_weights(
    layout: WeightLayout, rank: int, weights: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], what: str
) -> None:
    """Compares a rank's tensors with its boxes.

    Raises:
        ReshardError: naming every tensor that is missing, extra, mis-shaped or of another dtype.
    """
    where = f"the {what} tensors of rank {rank}"
    if not isinstance(weights, Mapping):
        raise ReshardError(f"{where} are {show(weights)}. Use a mapping from names to tensors")
    expected = layout.boxes_of(rank)
    if _fit(weights, expected, getattr(torch, layout.dtype)):
        return
    problems = []
    if missing := sorted(name for name in expected if name not in weights):
        problems.append(f"missing {describe_names(missing)}")
    if extra := sorted(map(str, (name for name in weights if name not in expected))):
        problems.append(f"extra {describe_names(extra)}")
    both = [name for name in expected if name in weights]
    dtype = _only_dtype([weights[name] for name in both])
    remedy = ""
    if dtype not in ("", layout.dtype):
        problems.append(f"all {len(both)} are {dtype}, but the layout was built for {layout.dtype}")
        remedy = (
            f". Pass dtype={show(dtype)} to the function that built it, such as fsdp_layout(), or convert the tensors"
        )
    wrong = [_mismatch(name, weights[name], expected[name], dtype or layout.dtype) for name in both]
    problems += shorten_list([problem for problem in wrong if problem])
    if problems:
        raise ReshardError(f"{where} do not match the layout: {'; '.join(problems)}{remedy}")


def _fit(weights: Mapping[str, object], expected: Mapping[str, Sequence[Box]], dtype: torch.dtype) -> bool:
    """Returns True if each parameter's tensors have the shapes of its boxes and the dtype."""
    if weights.keys() != expected.keys():
        return False
    for name, boxes in expected.items():
        tensors = weights[name]
        parts = tensors if isinstance(tensors, list | tuple) else [tensors]
        if len(parts) != len(boxes):
            return False
        for part, box in zip(parts, boxes, strict=True):
            if not isinstance(part, torch.Tensor) or part.dtype != dtype or part.shape != box.shape:
                return False
    return True


def _only_dtype(weights: Sequence[object]) -> str:
    """The dtype of all tensors; empty if they have several, or something is not a tensor."""
    parts = [part for each in weights for part in (each if isinstance(each, list | tuple) else [each])]
    dtypes = {str(getattr(part, "dtype", "")).removeprefix("torch.") for part in parts}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _mismatch(name: str, tensors: object, boxes: Sequence[Box], dtype: str) -> str:
    """Describes the mistake in a parameter's tensors; empty without one."""
    given = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    parts = [part for part in given if isinstance(part, torch.Tensor)]
    if len(parts) < len(given):
        return f"{show(name)} has {show(tensors)} in place of one tensor per box"
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [box.shape for box in boxes]:
        return f"{show(name)} has shapes {shapes}, the layout says {[box.shape for box in boxes]}"
    dtypes = [str(part.dtype).removeprefix("torch.") for part in parts]
    return f"{show(name)} has dtypes {dtypes}, the layout says {dtype}" if {*dtypes} - {dtype} else ""


def check_readable(weights: _Tensors, where: str) -> None:
    """Refuses tensors without memory.

    Raises:
        ReshardError: naming those that are sparse, on the meta device, or whose storage was emptied.
    """
    _refuse(((name, _lack(part)) for name, part in _flat(weights)), where)


def check_resizable(tensors: Mapping[str, Sequence[torch.Tensor]], where: str) -> None:
    """Refuses tensors whose memory cannot be freed and taken again.

    Raises:
        ReshardError: naming what is not a tensor, and those whose memory is another library's, a file's or shared.
    """
    for name, parts in tensors.items():
        if not isinstance(parts, Sequence):
            raise ReshardError(f"{where}: {show(name)} is {show(parts)}. Use a list of tensors")
        for part in parts:
            if not isinstance(part, torch.Tensor):
                raise ReshardError(f"{where}: {show(name)} is {show(part)}. Use tensors")
            if not part.untyped_storage().resizable():
                raise ReshardError(
                    f"{where}: the memory of {show(name)} cannot be freed, as it is not torch's own (numpy's, a "
                    'file\'s or shared). Clone it, or build the HybridEngine with training_weights="keep"'
                )


def check_writable(weights: _Tensors, where: str, *, are_filled: bool = True) -> None:
    """Refuses tensors that cannot each hold values of their own.

    Args:
        weights: by name.
        where: whose they are, for the message.
        are_filled: whether they have their memory now; a `ShardMover` gives them theirs on the way.

    Raises:
        ReshardError: as `check_readable`. Also for tensors of inference mode outside of that mode, tensors whose
            elements share memory, as expanded ones do, and tensors that lie in the same memory as another.
    """
    _refuse(((name, _lack(part, is_filled=are_filled) or _repeat(part)) for name, part in _flat(weights)), where)
    if are_filled:
        _refuse(_overlaps(weights), where)


def _refuse(problems: Iterable[tuple[str, str]], where: str) -> None:
    if found := [f"{show(name)} {problem}" for name, problem in problems if problem]:
        raise ReshardError(f"{where} cannot be used: {'; '.join(shorten_list(found))}")


def _lack(tensor: torch.Tensor, *, is_filled: bool = True) -> str:
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}, not dense"
    if tensor.is_meta:
        return "is on the meta device and has no memory, which `to_empty` gives"
    if is_filled and tensor.numel():
        needed = (tensor.storage_offset() + _reach(tensor)) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            return "has no memory: its storage was emptied"
    return ""


def _reach(tensor: torch.Tensor) -> int:
    """Elements of its storage from its first element to its last one, if it has any."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _repeat(tensor: torch.Tensor) -> str:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made under torch.inference_mode: it cannot be written outside of it"
    if tensor.numel() and tensor.is_contiguous():
        return ""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return "is expanded, or overlaps itself, so that several of its elements are one, and not contiguous"
        reach += (size - 1) * stride
    return ""


class _MemorySpan(NamedTuple):
    """Bytes of a device from a tensor's first element to its last one; others' elements may lie in between."""

    device: str
    start: int
    stop: int
    name: str
    part: torch.Tensor


def _overlaps(weights: _Tensors) -> Iterator[tuple[str, str]]:
    """Tensors that hold an element of another's."""
    spans = [_span(name, part) for name, part in _flat(weights) if part.numel()]
    together: list[_MemorySpan] = []
    stop = 0
    for span in sorted(spans, key=lambda span: span[:4]):
        if together and (span.device != together[0].device or span.start >= stop):
            yield from _shared(together)
            together, stop = [], 0
        together.append(span)
        stop = max(stop, span.stop)
    yield from _shared(together)


def _span(name: str, part: torch.Tensor) -> _MemorySpan:
    start = part.data_ptr()
    return _MemorySpan(str(part.device), start, start + _reach(part) * part.element_size(), name, part)


def _shared(spans: Sequence[_MemorySpan]) -> Iterator[tuple[str, str]]:
    """The same among tensors whose spans overlap: columns of one matrix share no element."""
    if len(spans) < 2:
        return
    found = [
        (second.name, f"shares memory with {show(first.name)} and needs its own")
        for first, second in pairwise(spans)
        if first.start == second.start
        or (first.part.is_contiguous() and second.part.is_contiguous() and second.start < first.stop)
    ]
    yield from found
    if found or all(span.part.is_contiguous() for span in spans):
        return
    base = spans[0].start
    unit = gcd(*(span.part.element_size() for span in spans), *(span.start - base for span in spans))
    taken = torch.zeros((max(span.stop for span in spans) - base) // unit, dtype=torch.bool, device="cpu")
    for index, span in enumerate(spans):
        units = span.part.element_size() // unit
        strides = [stride * units for stride in span.part.stride()]
        own = taken.as_strided((*span.part.shape, units), (*strides, 1), (span.start - base) // unit)
        if own.any():
            others = ", ".join(sorted({repr(other.name) for other in spans[:index]}))
            yield span.name, f"shares memory with {others} and needs its own"
        own.fill_(True)


def _flat(weights: _Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, part) for name, parts in weights.items() for part in parts)
