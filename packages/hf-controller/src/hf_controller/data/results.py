"""Results of methods, checked against their registration and made ready to travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_controller.data.columns import CallColumns
from hf_controller.data.transport import ObjectStore, Shard, encode_batch
from hf_controller.failures import Failure
from hf_protocols import BatchError, MethodSpec, ProtocolError, RowSelection
from hf_protocols.validation import show

__all__ = ["Metrics", "Outcome", "Value", "publish"]


@dataclass(frozen=True)
class Metrics:
    """(sum, count) by name, of one rank."""

    sums: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Value:
    """An object that a method returned."""

    value: Any


Outcome = Shard | Metrics | Value | Failure | None
"""Result of a call on one rank; None on a rank that is not collected."""


def publish(
    returned: Any,
    spec: MethodSpec,
    columns: CallColumns,
    store: ObjectStore,
    *,
    what: str,
    selection: RowSelection | None,
    input_rows: int,
) -> Shard | Metrics | Value:
    """Store a method's result.

    Args:
        returned: what the method returned.
        spec: its registration.
        columns: of the call.
        store: takes the columns.
        what: role.method, for messages.
        selection: the input rows that the method was given, None without a batch argument.
        input_rows: rows of the whole input.

    Raises:
        ProtocolError: if the result is of another kind than registered.
        BatchError: if its rows or columns are not as registered.
    """
    if spec.returns == "object":
        return Value(returned)
    if spec.returns == "metrics":
        return Metrics(_check_metrics(returned, what))
    from tensordict import TensorDictBase

    if not isinstance(returned, TensorDictBase):
        raise ProtocolError(
            f"{what} is registered with returns='batch' and returned a {type(returned).__name__}: "
            "return a TensorDict, or register it with returns='metrics' or returns='object'"
        )
    if columns.writes is not None and set(returned.keys()) != set(columns.writes):
        said = f"is registered with writes={list(columns.writes)}"
        if columns.writer is not None:
            said = f"got {columns.writer}.writes={list(columns.writes)}"
        raise BatchError(f"{what} {said} and returned the columns {sorted(map(str, returned.keys()))}: make both agree")
    follows = selection if spec.rows != "unknown" else None
    shard = encode_batch(returned, store, selection=follows, input_rows=input_rows if follows is not None else 0)
    if follows is not None:
        _check_rows(shard.num_rows, len(follows), spec, what)
    return shard


def _check_metrics(returned: Any, what: str) -> dict[str, tuple[float, float]]:
    try:
        return {str(name): (_as_number(value), _as_number(count)) for name, (value, count) in returned.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{what} is registered with returns='metrics', that is a dict of name to (sum, count), "
            f"and returned {show(returned)}"
        ) from error


def _as_number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{show(value)} is not a number")
    return float(value)


def _check_rows(num_rows: int, num_inputs: int, spec: MethodSpec, what: str) -> None:
    if spec.rows == "same" and num_rows != num_inputs:
        raise BatchError(
            f"{what} is registered with rows='same', got {num_inputs} rows and returned {num_rows}: "
            "return one row for each, or register it with rows='times' or rows='unknown'"
        )
    if spec.rows == "times" and (num_inputs == 0 or num_rows % num_inputs):
        raise BatchError(
            f"{what} is registered with rows='times', got {num_inputs} rows and returned {num_rows}, which is not a "
            "multiple: return equally many rows for each, or register it with rows='unknown'"
        )
