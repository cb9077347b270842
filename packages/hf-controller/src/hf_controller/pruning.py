"""Cut away the parts of a batch that a call does not read, so that the call does not wait for them.

A reward reads the responses; that values were joined to the same batch must not make it wait for the critic. What a
call returns is known before it ran where its method was registered with ``writes``.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from hf_controller.expressions import Chunk, Concat, Expression, Leaf, Rename, Repeat, Rows, Select, Union

__all__ = ["known_columns", "prune"]


def known_columns(expression: Expression) -> frozenset[str] | None:
    """Columns of a batch whose calls need not have run; None where a method does not say what it writes."""
    match expression:
        case Leaf(source):
            return None if source.columns is None else frozenset(source.columns)
        case Rows(batch) | Chunk(batch) | Repeat(batch) | Concat(batch):
            return known_columns(batch)
        case Select(batch, chosen):
            below = known_columns(batch)
            return None if below is None else below & {name.removesuffix("?") for name in chosen}
        case Rename(batch, names):
            below = known_columns(batch)
            return None if below is None else frozenset(dict(names).get(name, name) for name in below)
        case Union(left, right):
            sides = known_columns(left), known_columns(right)
            return None if sides[0] is None or sides[1] is None else sides[0] | sides[1]
    return None


def prune(expression: Expression, wanted: Set[str]) -> Expression:
    """An expression with the same rows, and of its columns at least those in ``wanted``.

    One side of a union goes where the other has all that is wanted; that both sides have equally many rows is then
    checked by the call that reads both.
    """
    match expression:
        case Rows(batch) | Chunk(batch) | Repeat(batch):
            return replace(expression, batch=prune(batch, wanted))
        case Concat(first, second):
            return Concat(prune(first, wanted), prune(second, wanted))
        case Select(batch, chosen):
            if not wanted <= {name.removesuffix("?") for name in chosen}:
                return expression  # whoever reads it says what is missing, and what is there
            kept = tuple(name for name in chosen if name.removesuffix("?") in wanted)
            return Select(prune(batch, {name.removesuffix("?") for name in kept}), kept)
        case Rename(batch, names):
            old_names = {new: old for old, new in names}
            below = prune(batch, {old_names.get(name, name) for name in wanted} | {old for old, _ in names})
            return Rename(below, names)
        case Union(left, right):
            return _prune_union(left, right, wanted)
    return expression


def _prune_union(left: Expression, right: Expression, wanted: Set[str]) -> Expression:
    from_right = known_columns(right)
    if from_right is None:
        return Union(prune(left, wanted), prune(right, wanted))
    if not wanted & from_right:
        return prune(left, wanted)
    if wanted <= from_right:
        return prune(right, wanted)
    return Union(prune(left, wanted - from_right), prune(right, wanted & from_right))
