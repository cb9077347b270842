"""Trees as deep as a program's loops are long. What each operation means is tested with the expressions."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor
from hf_controller.data.algebra import Chunk, Concat, Rename, Repeat, Rows, Select, Union
from hf_controller.data.expressions import Expression, Extent, Leaf, Source
from hf_controller.data.pruning import know_columns, prune
from hf_protocols import RowSelection

DEPTH = 5000
EXTENTS = {"first": Extent(4, ("a", "b")), "other": Extent(4, ("b", "a"))}


def leaf(name: str) -> Leaf:
    return Leaf(Source([name], columns=EXTENTS[name].columns))


def extents_of(tree: Expression) -> dict[Source, Extent]:
    return {source: EXTENTS[source.shards[0]] for source in tree.sources()}


Grow = Callable[[Expression, Expression], Expression]

# How the loop goes on; then the number of rows, and where the last row of column b comes from.
LOOPS: dict[str, tuple[Grow, int, tuple[str, int]]] = {
    "concat": (lambda tree, other: Concat.over([tree, other]), 4 * (DEPTH + 1), ("other", 3)),
    "concat in concat": (lambda tree, other: Concat((tree, other)), 4 * (DEPTH + 1), ("other", 3)),
    "concat before": (lambda tree, other: Concat((other, tree)), 4 * (DEPTH + 1), ("first", 3)),
    "union": (lambda tree, other: Union(tree, Select(other, ("b",))), 4, ("other", 3)),
    "union before": (lambda tree, other: Union(Select(other, ("b",)), tree), 4, ("first", 3)),
    "rows": (lambda tree, other: Rows(tree, RowSelection.from_rows([1, 2, 3, 0])), 4, ("first", (3 + DEPTH) % 4)),
    "halves of twice": (lambda tree, other: Chunk(Repeat(tree, 2), 1, 2), 4, ("first", 3)),
    "select": (lambda tree, other: Select(tree, ("b", "z?", "a")), 4, ("first", 3)),
    "rename": (lambda tree, other: Rename(tree, (("a", "b"), ("b", "a"))), 4, ("first", 3)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_may_make_a_tree_of_any_depth(loop: str) -> None:
    grow, num_rows, (source, row) = LOOPS[loop]
    tree: Expression = leaf("first")
    other = leaf("other")
    for _ in range(DEPTH):
        tree = grow(tree, other)
    assert set(know_columns(tree)[id(tree)] or ()) == {"a", "b"}
    for each in (tree, pickle.loads(pickle.dumps(tree)), prune(tree, {"b"})):
        extents = extents_of(each)
        assert each.num_rows(extents) == num_rows
        assert "b" in each.columns(extents)
        (segment,) = each.locate(RowSelection.range(num_rows - 1, num_rows), ["b"], extents)["b"]
        assert (segment.source.shards[0], segment.column, list(segment.rows)) == (source, "b", [row])


def test_a_hundred_thousand_parts_are_one_concatenation() -> None:
    parts = [leaf("first"), leaf("other")] * 50_000
    tree = Concat.over(parts)
    assert len(tree.children()) == 100_000
    extents = extents_of(tree)
    assert tree.num_rows(extents) == 400_000
    backwards = RowSelection.from_rows(range(399_999, 399_899, -1))
    segments = tree.locate(backwards, ["a"], extents)["a"]
    assert [(each.source.shards[0], list(each.rows)) for each in segments[:2]] == [
        ("other", [3, 2, 1, 0]),
        ("first", [3, 2, 1, 0]),
    ]
    assert len(segments) == 25


def test_an_empty_selection_of_a_concat_is_of_its_first_part() -> None:
    tree = Concat((leaf("first"), leaf("other")))
    (segment,) = tree.locate(RowSelection(), ["a"], extents_of(tree))["a"]
    assert (segment.source.shards[0], list(segment.rows)) == ("first", [])


def test_rows_of_a_union_follow_from_its_left_side() -> None:
    first, other = leaf("first"), leaf("other")
    tree = Union(Repeat(Union(first, other), 2), other)
    joined = Concat((Rows(tree, RowSelection.range(0, 3)), Rename(tree, ())))
    leading = joined.leading()
    assert leading.sources() == [first.source]
    assert leading.num_rows(extents_of(leading)) == 3 + 8
    assert first.leading() is first


def test_union_counts_rows_without_waiting_for_its_right_side() -> None:
    class Unfinished:
        def wait(self, timeout_s: float | None) -> list[int]:
            raise AssertionError("waited")

    with InProcessExecutor() as executor:
        put = executor.put(TensorDict({"a": torch.zeros(4)}, batch_size=[4]))
        unfinished = Leaf(Source([None], call=Unfinished()))
        joined = put.repeat(2).union(put._with(unfinished))
        assert (joined.num_rows, joined.rows([1, 5]).num_rows) == (8, 2)
        with pytest.raises(AssertionError, match="waited"):
            joined.wait()
