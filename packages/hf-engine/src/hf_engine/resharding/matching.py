"""Checks that tensors are a rank's boxes of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.arguments import describe_names, shorten_list, show
from hf_protocols.errors import ReshardError

__all__ = ["check_weights"]


def check_weights(
    layout: WeightLayout, rank: int, weights: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], what: str
) -> None:
    """Compares a rank's tensors with its boxes.

    Raises:
        ReshardError: naming every tensor that is missing, extra, mis-shaped or of another dtype.
    """
    where = f"the {what} tensors of rank {rank}"
    if not isinstance(weights, Mapping):
        raise ReshardError(f"{where} are {show(weights)}: give a mapping from names to tensors")
    expected = layout.boxes_of(rank)
    problems = []
    if missing := sorted(name for name in expected if name not in weights):
        problems.append(f"missing {describe_names(missing)}")
    if extra := sorted(map(str, (name for name in weights if name not in expected))):
        problems.append(f"extra {describe_names(extra)}")
    both = [name for name in expected if name in weights]
    dtype = _only_dtype([weights[name] for name in both])
    if dtype not in ("", layout.dtype):
        problems.append(
            f"all {len(both)} are {dtype}, but the layout was built for {layout.dtype}; pass "
            f"dtype={show(dtype)} to the "
            "function that built it, such as fsdp_layout(), or convert the tensors"
        )
    wrong = [_mismatch(name, weights[name], expected[name], dtype or layout.dtype) for name in both]
    problems += shorten_list([problem for problem in wrong if problem])
    if problems:
        raise ReshardError(f"{where} do not match the layout: {'; '.join(problems)}")


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
        return f"{show(name)} is {show(tensors)}: give one tensor per box"
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [box.shape for box in boxes]:
        return f"{show(name)} has shapes {shapes}, the layout says {[box.shape for box in boxes]}"
    dtypes = [str(part.dtype).removeprefix("torch.") for part in parts]
    return f"{show(name)} has dtypes {dtypes}, the layout says {dtype}" if {*dtypes} - {dtype} else ""
