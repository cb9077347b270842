"""Columns of one call: those of the method's registration, and those that its arguments declare.

A loss or an estimator of a user's own reads and writes columns that the worker's method does not know. So an argument
may have attributes `reads` and `writes`, tuples of column names. These attributes are read once, where the call is
made, and travel with the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_protocols import FROM_ARGUMENT, BatchError, MethodSpec, ProtocolError
from hf_protocols.foreign_code import raised_as
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from hf_controller.data.expressions import Expression

__all__ = ["CallColumns", "Declared", "columns_of", "find_columns"]

_check = Checks(ProtocolError)

_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set})
_ABSENT = object()


class Declared(NamedTuple):
    """Columns that an argument declares: `owner` is the name of its class."""

    owner: str
    columns: tuple[str, ...]


class CallColumns(NamedTuple):
    """The columns of one call.

    Attributes:
        reads: columns that travel, of the registration and of arguments; None for all.
        writes: columns that the method returns; None if unknown.
        readers: what each argument reads.
        writer: class of the argument that declares the returned columns; None if the registration declares them.
    """

    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    readers: tuple[Declared, ...] = ()
    writer: str | None = None

    def check(self, existing: Sequence[str], batch: Expression) -> None:
        """Refuses a batch without the columns that arguments read.

        Args:
            existing: columns of `batch`.
            batch: for the message, which says what made it.

        Raises:
            BatchError: naming the argument's class, the columns, and those that exist.
        """
        for owner, columns in self.readers:
            missing = sorted({name for name in columns if not name.endswith("?")}.difference(existing))
            if missing:
                raise BatchError(
                    f"{owner} reads {', '.join(missing)}; the batch has {', '.join(sorted(existing)) or 'no columns'}, "
                    f"made by {batch.describe_makers()}. Add the result of the call that writes it, with .union(...)"
                )


def columns_of(columns: CallColumns | None, spec: MethodSpec) -> CallColumns:
    """Returns what a call reads and writes: the columns that it carries, otherwise those of the registration."""
    if columns is not None:
        return columns
    assert spec.writes is not FROM_ARGUMENT
    return CallColumns(spec.reads, spec.writes)


def find_columns(spec: MethodSpec, arguments: Iterable[Any], what: str) -> CallColumns | None:
    """Asks the arguments of a call which columns they read and write.

    Only the arguments themselves are asked: not the items of a list or dict, nor an object that another call returns.

    Args:
        spec: the method's registration.
        arguments: positional ones and values of keywords.
        what: role.method, for messages.

    Returns:
        None if no argument declares columns that matter: the call's columns are then as registered.

    Raises:
        ProtocolError: for a declaration that is not a tuple of column names. Also if the method is registered with
            `FROM_ARGUMENT` and not exactly one argument declares `writes`.
    """
    given = [value for value in arguments if type(value) not in _PLAIN_TYPES]
    readers = tuple(_find_declared("reads", given, what))
    if spec.writes is not FROM_ARGUMENT:
        if not readers:
            return None
        writer, writes = None, spec.writes
    else:
        writer, writes = _find_writer(given, what)
    reads = spec.reads
    if reads is not None:
        reads = tuple(dict.fromkeys([*reads, *(name for each in readers for name in each.columns)]))
    return CallColumns(reads, writes, readers, writer)


def _find_writer(given: Sequence[Any], what: str) -> Declared:
    writers = _find_declared("writes", given, what)
    if len(writers) != 1:
        found = " and ".join(each.owner for each in writers) or "no argument"
        raise ProtocolError(
            f"{what} returns the columns that an argument declares, and {found} declares `writes`. "
            "Give one argument that has a tuple of column names as its attribute `writes`"
        )
    if not writers[0].columns:
        raise ProtocolError(f"{what}: {writers[0].owner}.writes=() names no column. Name those that it returns")
    return writers[0]


def _find_declared(name: str, given: Iterable[Any], what: str) -> list[Declared]:
    return [
        Declared(_name_class(value), _ask(value, name, what))
        for value in given
        # Only true attributes count: a mapping that returns a value for any attribute declares nothing.
        if getattr_static(value, name, _ABSENT) is not _ABSENT
    ]


def _ask(value: Any, name: str, what: str) -> tuple[str, ...]:
    attribute = f"{what}: {_name_class(value)}.{name}"
    with raised_as(lambda error: ProtocolError(f"{attribute} raised {type(error).__name__}: {error}")):
        columns = getattr(value, name)
    if not isinstance(columns, str | tuple | list):
        raise ProtocolError(f"{attribute}={show(columns)}. Use a tuple of column names")
    return _check.columns(attribute, columns, may_lack=name == "reads")


def _name_class(value: Any) -> str:
    return (value if isinstance(value, type) else type(value)).__name__
