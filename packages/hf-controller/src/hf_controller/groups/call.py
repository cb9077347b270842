"""A call as its ranks receive it: placeholders for batches and objects among its arguments, and checks made at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

from hf_controller.data.columns import CallColumns
from hf_controller.data.expressions import Expression, Extent
from hf_protocols import ALL_TO_ALL, BatchError, CallKind, MethodSpec, ProtocolError, Topology, TransferProtocol

__all__ = ["BatchArgument", "Call", "StoredArgument", "check_rows"]

_BATCHES = {"BatchFuture", "TensorDict", "TensorDictBase"}


@dataclass(frozen=True)
class BatchArgument:
    """Stands for a batch in a call's arguments: each rank reads its own rows of the expression."""

    expression: Expression
    """The batch; if the call declares what it reads, only these columns of it."""
    whole: bool = False
    """True if the rank takes every row, because the caller chose this batch for this rank."""


@dataclass(frozen=True)
class StoredArgument:
    """Stands for the object that another call returned: the rank looks the object up."""

    handle: Any


class Call(NamedTuple):
    """Call as one rank receives it. The executor chooses how the contents of nested handles reach the rank.

    Attributes:
        call_id: number of the call, counted by the controller.
        role: whose worker is called.
        method: its registered method.
        args: positional arguments, batches replaced by expressions.
        kwargs: keyword arguments, likewise.
        after: handles of reports of earlier calls on the pool's slots; this call waits for them.
        submit_s: when the controller made the call, in wall-clock seconds.
        timeout_s: how long a rank waits for its turn, and for inputs that did not come with the call.
        labels: what the controller said the call belongs to; the trace shows it.
        columns: what it reads and writes, where its arguments declare columns; None: as registered.
        kind: the kind that the method is registered with; the trace shows it.
    """

    call_id: int
    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    after: Sequence[Any]
    submit_s: float
    timeout_s: float
    labels: Mapping[str, Any]
    columns: CallColumns | None = None
    kind: CallKind = "function"


def check_rows(call: Call, spec: MethodSpec, topology: Topology, function: Callable[..., Any]) -> None:
    """Refuses at once what the ranks would refuse, as far as the rows are known: batches that were put.

    Raises:
        BatchError: for fewer rows than chunks, or columns that do not exist.
        ProtocolError: for rows that are not a batch, where batches are split: every rank would get all of them. Without
            a batch among the arguments these are also texts, records and columns in plain lists and dicts.
    """
    _refuse_unsplit(call, spec, topology, function)
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, BatchArgument) or value.whole:
            continue
        sources = value.expression.sources()
        if any(source.call is not None for source in sources):
            continue
        extents = {s: Extent(sum(shard.num_rows for shard in s.shards), tuple(s.shards[0].columns)) for s in sources}
        try:
            spec.protocol.distribute(topology, value.expression.num_rows(extents))
        except (BatchError, ProtocolError) as error:
            raise type(error)(f"{call.role}.{call.method}: {error}") from error


def _refuse_unsplit(call: Call, spec: MethodSpec, topology: Topology, function: Callable[..., Any]) -> None:
    if spec.protocol == ALL_TO_ALL:
        return
    given: list[tuple[int | str, Any]] = [*enumerate(call.args, 1), *call.kwargs.items()]
    has_batch = any(isinstance(value, BatchArgument) for _, value in given)
    raw = next(((name, value) for name, value in given if _is_misplaced(name, value, has_batch, function)), None)
    if raw is None or not _splits(spec.protocol, topology):
        return
    name, value = raw
    whole = "next to a batch, {'name': value} reaches every rank whole"
    if not _has_rows(value):
        whole = "what every rank needs whole goes to a method of ONE_TO_ALL, or next to a batch"
    raise ProtocolError(
        f"{call.role}.{call.method} splits rows by {spec.protocol.name} and got a {type(value).__name__} as argument "
        f"{name}, which every rank would get whole. Use TensorDict({{'name': value}}, batch_size=[rows]), texts as "
        f"token ids, to have its rows split; {whole}"
    )


def _is_misplaced(name: int | str, value: Any, has_batch: bool, function: Callable[..., Any]) -> bool:
    """True for a value where a batch belongs."""
    if value is None or isinstance(value, BatchArgument | StoredArgument):
        return False
    if _has_rows(value) or (not has_batch and _looks_like_rows(value)):
        return True
    return name in _find_batch_parameters(function)


@lru_cache(maxsize=1024)
def _find_batch_parameters(function: Callable[..., Any]) -> frozenset[int | str]:
    """Positions, from 1, and names of the parameters that are annotated as nothing but a batch."""
    try:
        parameters = list(signature(function).parameters.values())[1:]  # the first is the worker
    except ValueError:
        return frozenset()
    found: set[int | str] = set()
    for position, parameter in enumerate(parameters, 1):
        hint = parameter.annotation
        names = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
        if {part.strip().rpartition(".")[2] for part in names.split("|")} - {"None"} <= _BATCHES:
            found |= {position, parameter.name}
    return frozenset(found)


def _looks_like_rows(value: Any, depth: int = 8) -> bool:
    """True for texts, records, columns and tables of other libraries; False for settings."""
    if isinstance(value, Mapping):
        items = list(value.values())
        return any(map(_has_rows, items)) or (bool(items) and all(_is_column(item, depth) for item in items))
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return any(item is None or isinstance(item, str | bytes | Mapping | list | tuple) for item in value)
    return hasattr(value, "columns") or hasattr(value, "column_names")


def _is_column(value: Any, depth: int) -> bool:
    """True for a list, and for a dict of lists: `depth` ends a dict that holds itself."""
    return isinstance(value, list | tuple) or (
        isinstance(value, Mapping) and depth > 0 and _looks_like_rows(value, depth - 1)
    )


def _splits(protocol: TransferProtocol, topology: Topology) -> bool:
    """Returns True if ranks get different rows of a large batch."""
    num_rows = 1024 * topology.world_size
    try:
        return any(0 < len(rows) < num_rows for rows in protocol.distribute(topology, num_rows))
    except BatchError:  # so many rows cannot be distributed
        return True


def _has_rows(value: Any) -> bool:
    """Returns True for an array of at least one dimension, or a list of such arrays or of batches."""
    if isinstance(value, list | tuple):
        return any(hasattr(item, "dtype") and bool(item.shape) for item in value)
    return hasattr(value, "dtype") and bool(getattr(value, "shape", ()))
