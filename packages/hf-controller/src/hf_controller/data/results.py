"""Results of methods: checked against their registration, and stored as shards that others can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_controller.data.columns import CallColumns
from hf_controller.data.transport import Column, ObjectStore, Shard
from hf_controller.failures import Failure
from hf_protocols import BatchError, MethodSpec, ProtocolError, RowSelection
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["Metrics", "Outcome", "Value", "encode_batch", "publish"]

_check = Checks(BatchError)


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
    """Stores a method's result.

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
            f"{what} is registered with returns='batch' and returned a {type(returned).__name__}. "
            "Return a TensorDict, or register it with returns='metrics' or returns='object'"
        )
    if columns.writes is not None and set(returned.keys()) != set(columns.writes):
        said = f"is registered with writes={list(columns.writes)}"
        if columns.writer is not None:
            said = f"got {columns.writer}.writes={list(columns.writes)}"
        raise BatchError(f"{what} {said} and returned the columns {sorted(map(str, returned.keys()))}. Make both agree")
    follows = selection if spec.rows != "unknown" else None
    shard = encode_batch(returned, store, selection=follows, input_rows=input_rows if follows is not None else 0)
    if follows is not None:
        _check_rows(shard.num_rows, len(follows), spec, what)
    return shard


def encode_batch(
    batch: TensorDict, store: ObjectStore, *, selection: RowSelection | None = None, input_rows: int = 0
) -> Shard:
    """Puts the columns of `batch` (batch_size [B]) into `store`.

    Raises:
        BatchError: for a batch_size that is not one number, a column that is not a dense or jagged tensor, or a
            column's name that ends in `?`.
    """
    from tensordict import TensorDictBase

    if not isinstance(batch, TensorDictBase):
        raise BatchError(f"a batch is a TensorDict with batch_size [rows], got a {type(batch).__name__}")
    if len(batch.batch_size) != 1:
        raise BatchError(f"a batch has batch_size [rows], got {list(batch.batch_size)}. Flatten or unsqueeze it first")
    arrays: list[torch.Tensor] = []
    lengths: dict[str, torch.Tensor] = {}
    names = [str(name) for name in batch.keys()]  # noqa: SIM118 - a TensorDict iterates its rows
    _check.columns("a batch's columns", names, may_lack=False)
    for name in names:
        values, row_lengths = _split_jagged(name, _get_column(batch, name))
        arrays.append(values)
        if row_lengths is not None:
            lengths[name] = row_lengths
    positions = {name: _append_once(arrays, row_lengths, len(names)) for name, row_lengths in lengths.items()}
    columns = {
        name: Column(
            position=position,
            dtype=str(values.dtype).removeprefix("torch."),
            row_shape=tuple(values.shape[1:]),
            lengths=positions.get(name),
            num_bytes=values.numel() * values.element_size(),
        )
        for position, (name, values) in enumerate(zip(names, arrays, strict=False))
    }
    return Shard(
        num_rows=int(batch.batch_size[0]),
        columns=columns,
        arrays=store.put([_as_array(values) for values in arrays]),
        origin=store.origin,
        selection=selection,
        input_rows=input_rows,
    )


def _get_column(batch: TensorDict, name: str) -> Any:
    try:
        return batch.get(name)
    except RuntimeError as error:  # a lazy stack of rows of different shapes
        raise BatchError(
            f"column {name} has rows of different shapes, which make no tensor. Use rows of different lengths as a "
            "jagged nested tensor"
        ) from error


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
            f"{what} is registered with rows='same', got {num_inputs} rows and returned {num_rows}. "
            "Return one row for each, or register it with rows='times' or rows='unknown'"
        )
    if spec.rows == "times" and (num_rows % num_inputs if num_inputs else num_rows):
        raise BatchError(
            f"{what} is registered with rows='times', got {num_inputs} rows and returned {num_rows}, which is not a "
            "multiple. Return equally many rows for each, or register it with rows='unknown'"
        )


def _split_jagged(name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values on the host, contiguous, and the int32 lengths of a jagged column."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise BatchError(
            f"column {show(name)} is a {type(value).__name__}; a batch has tensors only. "
            "Encode text as a jagged uint8 column, and flatten nested TensorDicts"
        )
    if not value.is_nested:
        _check_storable(name, value)
        return value.detach().cpu().resolve_conj().resolve_neg().contiguous(), None
    if value.layout is not torch.jagged or getattr(value, "_ragged_idx", 1) != 1:
        raise BatchError(
            f"column {show(name)} is a nested tensor that is not jagged in dim 1. "
            "Make it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    jagged: Any = value  # torch answers for it in Python, call by call
    packed = jagged.values().detach()
    _check_storable(name, packed)
    offsets, lengths = jagged.offsets().cpu(), jagged.lengths()
    if lengths is None:
        lengths = offsets.diff()
        packed = packed[int(offsets[0]) : int(offsets[-1])]
    else:
        bounds = zip(offsets.tolist(), lengths.tolist(), strict=False)
        packed = torch.cat([packed[:0], *(packed[start : start + length] for start, length in bounds)])
    if int(lengths.sum()) != len(packed):
        raise BatchError(
            f"column {show(name)} has rows of {int(lengths.sum())} elements together and values for {len(packed)}. "
            "Use offsets and lengths that lie inside the values"
        )
    return packed.cpu().resolve_conj().resolve_neg().contiguous(), lengths.cpu().to(torch.int32)


def _check_storable(name: str, value: torch.Tensor) -> None:
    """Refuses what are not values of a type in one piece of memory."""
    import torch

    if value.is_meta:
        raise BatchError(f"column {show(name)} is on the device meta and has no values. Compute it first")
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise BatchError(f"column {show(name)} is {layout}. Make it dense, with .to_dense()")
    if value.is_quantized:
        raise BatchError(f"column {show(name)} is quantized. Dequantize it, with .dequantize()")
    if value.dtype is torch.complex32:
        raise BatchError(f"column {show(name)} is complex32, which numpy lacks. Make it another type, with .to(dtype)")


def _append_once(arrays: list[torch.Tensor], row_lengths: torch.Tensor, begin: int) -> int:
    """Position of `row_lengths` among the arrays from `begin` on, appended if it is not there."""
    import torch

    for position in range(begin, len(arrays)):
        if torch.equal(row_lengths, arrays[position]):
            return position
    arrays.append(row_lengths)
    return len(arrays) - 1


def _as_array(values: torch.Tensor) -> Any:
    """A numpy view of the same memory; types that numpy lacks are seen as bit patterns of the same width."""
    import torch

    try:
        return values.numpy()
    except TypeError:
        return values.view({1: torch.uint8, 2: torch.int16}[values.element_size()]).numpy()
