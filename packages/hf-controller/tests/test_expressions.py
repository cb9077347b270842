"""The lazy algebra against the same operations on plain lists of rows."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_controller.data.algebra import Chunk, Concat, Rename, Repeat, Rows, Select, Union
from hf_controller.data.expressions import Expression, Extent, Leaf, Source
from hf_protocols import BatchError, RowSelection

Eager = list[dict[str, tuple[int, str, int]]]
"""Rows as dicts; a value says which source, column and row it comes from."""


class TreeCase:
    """A tree, what it means, and what is known of the sources below it."""

    def __init__(self, tree: Expression, rows: Eager, columns: list[str], extents: dict[Source, Extent]) -> None:
        self.tree = tree
        self.rows = rows
        self.columns = columns
        self.extents = extents


def leaf(number: int, num_rows: int, columns: list[str]) -> TreeCase:
    source = Source([number])
    rows = [{name: (number, name, row) for name in columns} for row in range(num_rows)]
    return TreeCase(Leaf(source), rows, columns, {source: Extent(num_rows, tuple(columns))})


@st.composite
def cases(draw: st.DrawFn) -> TreeCase:
    counter = iter(range(1000))
    columns = ["a", "b", "c"]
    case = leaf(next(counter), draw(st.integers(1, 9)), columns)
    for _ in range(draw(st.integers(0, 6))):
        case = draw(st.sampled_from([_rows, _chunk, _repeat, _concat, _select, _rename, _union]))(draw, case, counter)
    return case


def _rows(draw, case, counter):
    chosen = draw(st.lists(st.integers(0, len(case.rows) - 1), min_size=1, max_size=12))
    tree = Rows(case.tree, RowSelection.from_rows(chosen))
    return TreeCase(tree, [case.rows[row] for row in chosen], case.columns, case.extents)


def _chunk(draw, case, counter):
    count = draw(st.integers(1, len(case.rows)))
    index = draw(st.integers(0, count - 1))
    sizes = [len(case.rows) // count + (number < len(case.rows) % count) for number in range(count)]
    start = sum(sizes[:index])
    return TreeCase(Chunk(case.tree, index, count), case.rows[start : start + sizes[index]], case.columns, case.extents)


def _repeat(draw, case, counter):
    times = draw(st.integers(1, 3))
    rows = [row for row in case.rows for _ in range(times)]
    return TreeCase(Repeat(case.tree, times), rows, case.columns, case.extents)


def _concat(draw, case, counter):
    other = leaf(next(counter), draw(st.integers(1, 5)), case.columns)
    first, second = (case, other) if draw(st.booleans()) else (other, case)
    tree = Concat((first.tree, second.tree))
    return TreeCase(tree, first.rows + second.rows, first.columns, case.extents | other.extents)


def _select(draw, case, counter):
    chosen = draw(st.lists(st.sampled_from(case.columns), min_size=1, unique=True))
    rows = [{name: row[name] for name in chosen} for row in case.rows]
    return TreeCase(Select(case.tree, (*chosen, "absent?")), rows, chosen, case.extents)


def _rename(draw, case, counter):
    old = draw(st.sampled_from(case.columns))
    new = f"{old}{next(counter)}"
    rows = [{(new if name == old else name): value for name, value in row.items()} for row in case.rows]
    columns = [new if name == old else name for name in case.columns]
    return TreeCase(Rename(case.tree, ((old, new),)), rows, columns, case.extents)


def _union(draw, case, counter):
    number = next(counter)
    other = leaf(number, len(case.rows), [case.columns[0], f"new{number}"])
    rows = [left | right for left, right in zip(case.rows, other.rows, strict=True)]
    return TreeCase(Union(case.tree, other.tree), rows, list(rows[0]), case.extents | other.extents)


@given(cases(), st.data())
@settings(max_examples=200)
def test_a_tree_locates_the_rows_that_the_eager_operations_give(case: TreeCase, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(case.rows) - 1), max_size=12))
    assert case.tree.num_rows(case.extents) == len(case.rows)
    assert list(case.tree.columns(case.extents)) == case.columns
    assert set(case.tree.sources()) <= set(case.extents)
    located = case.tree.locate(RowSelection.from_rows(wanted), case.columns, case.extents)
    for name in case.columns:
        found = [(each.source.shards[0], each.column, row) for each in located[name] for row in each.rows]
        assert found == [case.rows[row][name] for row in wanted]


def test_columns_from_the_same_rows_share_one_selection() -> None:
    case = leaf(0, 5, ["a", "b"])
    located = Rows(case.tree, RowSelection.from_rows([3, 1])).locate(RowSelection.range(0, 2), ["a", "b"], case.extents)
    assert located["a"][0].rows is located["b"][0].rows


def test_a_column_that_is_chosen_twice_is_there_once() -> None:
    case = leaf(0, 2, ["a", "b"])
    tree = Rename(Select(case.tree, ("a", "a?")), (("a", "c"),))
    assert tree.columns(case.extents) == ("c",)


def test_trees_travel_and_keep_one_source_one() -> None:
    case = leaf(0, 3, ["a"])
    tree = Concat((case.tree, Rows(case.tree, RowSelection.range(0, 2))))
    case.tree.source.call = object()
    travelled = pickle.loads(pickle.dumps([tree, tree.parts[0]]))
    (source,) = travelled[0].sources()
    assert source is travelled[1].source
    assert source.shards == (0,)
    assert source.call is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tree: Rows(tree, RowSelection.from_rows([0, 3])), "row 3 was asked of a batch of 3 rows"),
        (lambda tree: Chunk(tree, 0, 4), "3 rows cannot be shared by 4 parts"),
        (lambda tree: Select(tree, ("a", "z")), "select asks for z; the batch has a, b"),
        (lambda tree: Rename(tree, (("z", "y"),)), "rename asks for z; the batch has a, b"),
        (lambda tree: Rename(tree, (("a", "b"),)), "two columns one name"),
        (lambda tree: Concat((tree, tree, Select(tree, ("a",)))), "only the first has b, only number 3 has no columns"),
        (lambda tree: Union(tree, Chunk(tree, 0, 3)), r"got 3 \(columns a, b\) and 1 \(columns a, b\)"),
    ],
)
def test_mistakes_are_named(make, message) -> None:
    case = leaf(0, 3, ["a", "b"])
    tree = make(case.tree)
    with pytest.raises(BatchError, match=f"{message}.*; the batch comes from executor.put$"):
        tree.locate(RowSelection.range(0, tree.num_rows(case.extents)), tree.columns(case.extents), case.extents)


def test_an_error_names_who_made_the_batch() -> None:
    sources = [Source((), maker=f"actor.m{number}") for number in range(7)]
    extents = dict.fromkeys(sources, Extent(1, ("a",)))
    some = Concat((Leaf(sources[1]), Leaf(sources[0]), Leaf(sources[1])))
    with pytest.raises(BatchError, match=r"; the batch comes from actor\.m1, actor\.m0$"):
        Select(some, ("b",)).columns(extents)
    many = pickle.loads(pickle.dumps(Concat(tuple(map(Leaf, sources)))))
    with pytest.raises(BatchError, match=r"from actor\.m0, .*, actor\.m4 and 2 more$"):
        Rows(many, RowSelection.range(0, 8)).num_rows(dict.fromkeys(many.sources(), Extent(1, ("a",))))
