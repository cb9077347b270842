"""Columns as estimators read them, and checks of an estimator's options. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from hf_protocols.errors import BatchError, ConfigError
from hf_protocols.validation import Checks, describe_names, show

__all__ = ["check_bound", "check_ddof", "check_finite", "check_share", "read_columns", "split_groups"]

_check = Checks(ConfigError)

_PER_TOKEN = frozenset(
    {"response_mask", "old_logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs", "values", "cost_values"}
)
_WHOLE_NUMBERS = frozenset({"group_id", "finish_reason"})


def read_columns(columns: Mapping[str, torch.Tensor], reads: Sequence[str], reader: str) -> dict[str, torch.Tensor]:
    """Returns the columns that `reads` names, checked, in float32 or wider.

    `response_mask` becomes bool [B, T]. Per-token columns become 0 where the mask is False, also in place of NaN. A NaN
    is allowed per row (not scored); an infinite number is not.

    Args:
        columns: padded tensors by name, [B] or [B, T].
        reads: names; one that ends in `?` is left out where the batch lacks it.
        reader: the estimator's name for messages.

    Raises:
        BatchError: a column is missing, has another shape, or is not finite on a trained token.
    """
    names = [name.removesuffix("?") for name in reads if not name.endswith("?") or name[:-1] in columns]
    for name in names:
        if name not in columns:
            there = describe_names(sorted(columns))
            raise BatchError(f"{reader} reads column {show(name)}, which is not among {there}. Compute it before.")
    mask = columns["response_mask"]
    if mask.dim() != 2:
        raise BatchError(f"{reader}: response_mask has shape {list(mask.shape)}, but must be [B, T]. Pad its rows.")
    mask = mask.bool()
    return {name: _read_column(name, columns[name], mask, reader) for name in names}


def _read_column(name: str, column: torch.Tensor, mask: torch.Tensor, reader: str) -> torch.Tensor:
    wanted = mask.shape if name in _PER_TOKEN else mask.shape[:1]
    if column.shape != wanted:
        given = f"has shape {list(column.shape)}, but response_mask needs {list(wanted)}"
        unit = "token" if len(wanted) == 2 else "row"
        raise BatchError(f"{reader}: {name} {given}. Give one number for each {unit}.")
    if name == "response_mask":
        return mask
    if name in _WHOLE_NUMBERS:
        if column.is_floating_point():
            raise BatchError(f"{reader}: {name} has dtype {column.dtype}, but must hold whole numbers. Give int64.")
        return column
    column = column.to(torch.promote_types(column.dtype, torch.float32))
    if name in _PER_TOKEN:
        column = column.masked_fill(~mask, 0.0)
        wrong = ~column.isfinite()
    else:
        wrong = column.isinf()
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        where = " of row ".join(f"{index}" for index in reversed(place))
        rule = "is not finite" if name in _PER_TOKEN else "is infinite"
        value = show(float(column[tuple(place)]))
        unit = "token" if len(place) == 2 else "row"
        raise BatchError(f"{reader}: {name}={value} of {unit} {where} {rule}. Find the worker that computed it.")
    return column


def split_groups(group_id: torch.Tensor) -> list[torch.Tensor]:
    """Returns the row indices of each group, int64 [n], groups in ascending order of their id.

    Rows of a group may stand anywhere in the batch.
    """
    if not len(group_id):
        return []
    _, inverse, counts = torch.unique(group_id, return_inverse=True, return_counts=True)
    return list(torch.split(torch.argsort(inverse, stable=True), counts.tolist()))


def check_share(name: str, value: object) -> None:
    """Refuses what is not a number from 0 to 1, as gamma and lambda are."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={show(value)} is not a number from 0 to 1. Give one.")


def check_bound(name: str, value: object, *, may_be_zero: bool = True, may_be_none: bool = False) -> None:
    """Refuses what is not a finite number of at least 0, or above 0; None where it `may_be_none`."""
    if not (value is None and may_be_none):
        _check.number(name, value, may_be_zero=may_be_zero)


def check_finite(name: str, value: object) -> None:
    """Refuses what is not a finite number."""
    most = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:
        raise ConfigError(f"{name}={show(value)} is not a finite number. Give one.")


def check_ddof(name: str, value: int) -> None:
    """Refuses what is neither 0 (divide by N) nor 1 (divide by N - 1)."""
    if type(value) is not int or value not in (0, 1):
        raise ConfigError(f"{name}={show(value)} is neither 0 nor 1. Give 0 to divide by N, 1 to divide by N - 1.")
