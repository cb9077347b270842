"""Columns that are known before any call ran, and expressions without the columns that a call does not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from hf_controller.data.algebra import Concat, Rename, Select, Union
from hf_controller.data.expressions import Expression, Leaf

__all__ = ["know_columns", "prune"]

_Known = tuple[str, ...] | None
"""Columns of a node; None where a call behind it does not say what it writes."""


def know_columns(expression: Expression) -> dict[int, _Known]:
    """Returns each node's columns by its id, before calls have run; None where a method does not say what it writes.

    Raises:
        BatchError: for columns that are chosen, renamed or joined and do not fit.
    """
    return expression.fold(_know)


def _know(node: Expression, below: Sequence[_Known]) -> _Known:
    if isinstance(node, Leaf):
        return node.source.columns
    known = [columns for columns in below if columns is not None]
    if len(known) == len(below):
        return node.columns_over(known)
    return known[0] if known and isinstance(node, Concat) else None  # its parts have the same columns


class _Task(NamedTuple):
    """A node, and which of its columns are wanted."""

    node: Expression
    wanted: frozenset[str]

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        return id(self.node), self.wanted


class _Cut(NamedTuple):
    """A pruned node: the tasks for its children, and the function that builds the node over their results."""

    below: Sequence[_Task]
    build: Callable[[Sequence[Expression]], Expression]


def prune(expression: Expression, reads: Collection[str], known: Mapping[int, _Known] | None = None) -> Expression:
    """Returns an expression with the same rows and at least the columns that a call reads; it waits for no others.

    For example, a reward reads the responses: it must not wait for the critic because values were joined to the same
    batch.

    A name that ends in `?` is optional for the call, so it is not looked for where it is known to be absent.

    One side of a union is dropped if the other has every wanted column; only a call that reads both sides then checks
    that they have equally many rows. If it is unknown whether columns exist, a choice or renaming of them stays as it
    is.

    Args:
        expression: the batch.
        reads: the columns that a call reads.
        known: result of `know_columns(expression)`; None: it is computed here.

    Raises:
        BatchError: for known columns that are chosen, renamed or joined and do not fit.
    """
    if isinstance(expression, Leaf):
        return expression
    known = know_columns(expression) if known is None else known
    there = known[id(expression)]
    absent = set() if there is None else {name for name in reads if name.endswith("?") and name[:-1] not in there}
    first = _Task(expression, _bare([name for name in reads if name not in absent]))
    pruned: dict[tuple[int, frozenset[str]], Expression] = {}
    stack = [first]
    while stack:
        below, build = _cut(stack[-1], known)
        missing = [task for task in below if task.key not in pruned]
        if missing:
            stack += missing
        else:
            pruned[stack.pop().key] = build([pruned[task.key] for task in below])
    return pruned[first.key]


def _cut(task: _Task, known: Mapping[int, _Known]) -> _Cut:
    node, wanted = task
    if known[id(node)] is None and isinstance(node, Select | Rename):
        return _Cut([], lambda _: node)  # its reader says whether its columns exist
    match node:
        case Select(batch, chosen):
            if not wanted <= _bare(chosen):
                return _Cut([], lambda _: node)  # its reader says what is missing, and what is there
            kept = tuple(name for name in chosen if name.removesuffix("?") in wanted)
            return _Cut([_Task(batch, _bare(kept))], lambda below: Select(below[0], kept))
        case Rename(batch, names):
            return _cut_rename(node, batch, names, wanted)
        case Union():
            return _cut_union(node, wanted, known[id(node.right)])
        case Concat():
            return _cut_concat(node, wanted)
    return _Cut([_Task(child, wanted) for child in node.children()], lambda below: _put_over(node, below))


def _cut_rename(rename: Rename, batch: Expression, names: Sequence[tuple[str, str]], wanted: frozenset[str]) -> _Cut:
    kept = tuple((old, new) for old, new in names if new in wanted)
    old_names = {new: old for old, new in kept}
    if wanted & (dict(names).keys() - old_names.keys()):
        return _Cut([], lambda _: rename)  # a name that is gone: its reader says so
    own = frozenset(old_names.get(name, name) for name in wanted)
    # Alone, so that no other column has a new name already.
    columns = tuple(f"{name}?" for name in sorted(own))
    return _Cut([_Task(batch, own)], lambda below: Rename(Select(below[0], columns), kept))


def _cut_union(union: Union, wanted: frozenset[str], from_right: _Known) -> _Cut:
    left, right = wanted, wanted
    if from_right is not None:
        left, right = wanted.difference(from_right), wanted.intersection(from_right)
        if not left or not right:
            return _Cut([_Task(union.right if right else union.left, wanted)], lambda below: below[0])
    return _Cut([_Task(union.left, left), _Task(union.right, right)], lambda below: _put_over(union, below))


def _cut_concat(concat: Concat, wanted: frozenset[str]) -> _Cut:
    # Pruning may remove more columns from one part than from another, but all parts must have the same columns.
    columns = tuple(f"{name}?" for name in sorted(wanted))
    return _Cut(
        [_Task(part, wanted) for part in concat.parts],
        lambda below: Concat.over([part if isinstance(part, Concat) else Select(part, columns) for part in below]),
    )


def _put_over(node: Expression, below: Sequence[Expression]) -> Expression:
    return type(node).over(below, *node.parameters()) if below else node


def _bare(names: Sequence[str]) -> frozenset[str]:
    """The names without the mark of those that may be missing."""
    return frozenset(name.removesuffix("?") for name in names)
