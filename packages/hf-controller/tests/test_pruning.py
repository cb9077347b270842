"""Pruned expressions against whole ones: the wanted columns lie in the same places, and nothing else is waited for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_controller.data.algebra import Chunk, Concat, Rename, Repeat, Rows, Select, Union
from hf_controller.data.expressions import Expression, Extent, Leaf, Source
from hf_controller.data.pruning import know_columns, prune
from hf_protocols import BatchError, RowSelection

NAMES = ("a", "b", "c", "d")
NUM_ROWS = 6


@st.composite
def batches(draw: st.DrawFn, depth: int = 3) -> Expression:
    """Expressions of six rows over sources that may or may not say what they hold."""
    if depth == 0 or draw(st.booleans()):
        columns = tuple(sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1))))
        source = Source((columns,), columns=columns if draw(st.booleans()) else None)
        return Leaf(source)
    below = batches(depth=depth - 1)
    kind = draw(st.sampled_from(["rows", "halves", "union", "union", "concat", "joined", "select", "rename"]))
    batch = draw(below)
    if kind == "rows":
        return Rows(batch, RowSelection.from_rows(draw(st.permutations(range(NUM_ROWS)))))
    if kind == "halves":
        return Repeat(Chunk(batch, draw(st.integers(0, 1)), 2), 2)
    if kind == "union":
        return Union(batch, draw(below))
    if kind == "concat":
        return Concat((Chunk(batch, 0, 3), Chunk(batch, 1, 3), Chunk(batch, 2, 3)))
    if kind == "joined":
        return draw(joined(batch))
    if kind == "select":
        return Select(batch, tuple(draw(st.permutations([f"{name}?" for name in NAMES]))[:3]))
    columns = batch.columns(extents_of(batch))
    return Rename(batch, ((columns[0], "z"),)) if columns and "z" not in columns else batch


@st.composite
def joined(draw: st.DrawFn, batch: Expression) -> Expression:
    """A part of a batch, and one of another with the same columns that came about otherwise."""
    columns = batch.columns(extents_of(batch))
    sides = [columns, draw(st.permutations(columns))[: len(columns) // 2]]
    leaves = [Leaf(Source((side,), columns=side if draw(st.booleans()) else None)) for side in map(tuple, sides)]
    other = Union(*leaves) if draw(st.booleans()) else leaves[0]
    parts = [Chunk(batch, 0, 2), Chunk(other, 1, 2)]
    return Concat(tuple(draw(st.permutations(parts))))


def extents_of(batch: Expression) -> dict[Source, Extent]:
    return {source: Extent(NUM_ROWS, source.shards[0]) for source in batch.sources()}


@given(batch=batches(), data=st.data())
def test_wanted_columns_lie_where_they_lay(batch: Expression, data: st.DataObject) -> None:
    extents = extents_of(batch)
    columns = batch.columns(extents)
    wanted = data.draw(st.sets(st.sampled_from(columns), min_size=1)) if columns else set()
    pruned = prune(batch, wanted)
    assert set(pruned.sources()) <= set(batch.sources())
    assert pruned.num_rows(extents) == batch.num_rows(extents) == NUM_ROWS
    assert wanted <= set(pruned.columns(extents))
    every_row = RowSelection.range(0, NUM_ROWS)
    assert pruned.locate(every_row, sorted(wanted), extents) == batch.locate(every_row, sorted(wanted), extents)


@given(batch=batches())
def test_known_columns_are_the_columns(batch: Expression) -> None:
    known = know_columns(batch)[id(batch)]
    assert known is None or set(known) == set(batch.columns(extents_of(batch)))


def test_a_call_does_not_wait_for_what_it_does_not_read() -> None:
    prompts, responses, values = (Leaf(Source((), columns=(name,))) for name in ("prompt", "response", "values"))
    batch = Union(Union(Repeat(prompts, 2), responses), values)
    assert prune(batch, {"response"}) == responses
    assert prune(batch, {"prompt", "response"}).sources() == [prompts.source, responses.source]
    assert prune(batch, {"prompt", "values"}).sources() == [prompts.source, values.source]


def test_pruned_parts_of_a_concat_keep_the_same_columns() -> None:
    prompts, responses = (Leaf(Source((), columns=(name,))) for name in ("prompt", "response"))
    old = Leaf(Source((), columns=("prompt", "response")))
    pruned = prune(Concat((Union(prompts, responses), old)), {"response"})
    assert pruned.sources() == [responses.source, old.source]
    extents = {source: Extent(1, source.columns) for source in pruned.sources()}
    assert pruned.columns(extents) == ("response",) and pruned.num_rows(extents) == 2


def test_a_source_that_does_not_say_what_it_holds_stays() -> None:
    known, unknown = Leaf(Source((), columns=("a",))), Leaf(Source(()))
    assert prune(Union(known, unknown), {"a"}).sources() == [known.source, unknown.source]
    assert prune(Union(unknown, known), {"a"}) == known


@pytest.mark.parametrize("wanted", [{"z"}, {"z", "a"}])
def test_a_wanted_but_missing_column_is_left_to_the_reader(wanted: set[str]) -> None:
    batch = Union(Leaf(Source((("a",),), columns=("a",))), Leaf(Source((("b",),), columns=("b",))))
    assert "z" not in prune(batch, wanted).columns(extents_of(batch))


def test_a_selection_without_the_wanted_column_stays_whole() -> None:
    tree = Select(Leaf(Source((), columns=("a", "b"))), ("a",))
    assert prune(tree, {"b"}) is tree


def test_a_renamed_column_that_nobody_wants_is_not_waited_for() -> None:
    wanted, unwanted = Source((("x",),), columns=("x",)), Source((("y",),), columns=("y",))
    renamed = Rename(Union(Leaf(wanted), Leaf(unwanted)), (("y", "w"), ("x", "y")))
    assert prune(renamed, {"y"}).sources() == [wanted]
    assert prune(renamed, {"w"}).sources() == [unwanted]
    # The old name is gone: its reader gets the error, with the whole batch in view.
    assert prune(renamed, {"x"}) is renamed


@st.composite
def mistaken_batches(draw: st.DrawFn) -> Expression:
    """Known columns under a few selections and new names, some of them wrong, and what may be joined to them."""
    batch: Expression = Leaf(Source((("a", "b"),), columns=("a", "b"), maker="actor.make"))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["select", "rename", "union", "rows"]))
        if kind == "select":
            batch = Select(
                batch, tuple(draw(st.lists(st.sampled_from(["a", "b", "c", "c?"]), min_size=1, unique=True)))
            )
        elif kind == "rename":
            olds = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, unique=True))
            batch = Rename(batch, tuple((old, draw(st.sampled_from(["a", "b", "c"]))) for old in olds))
        elif kind == "union":
            batch = Union(batch, Leaf(Source((("a", "c"),), columns=("a", "c"), maker="critic.make")))
        else:
            batch = Rows(batch, RowSelection.range(0, NUM_ROWS))
    return batch


@given(batch=mistaken_batches(), wanted=st.sets(st.sampled_from(["a", "b", "c"])))
def test_pruning_finds_mistakes_in_known_but_unread_columns(batch: Expression, wanted: set[str]) -> None:
    mistake = find_mistake(batch)
    if mistake is None:
        prune(batch, wanted)
        return
    with pytest.raises(BatchError) as found:
        prune(batch, wanted)
    assert str(found.value) == mistake


def find_mistake(batch: Expression) -> str | None:
    try:
        batch.columns(extents_of(batch))
    except BatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda batch: Select(batch, ("a", "nope")), "select asks for nope; the batch has a, b"),
        (lambda batch: Rename(batch, (("nope", "c"),)), "rename asks for nope; the batch has a, b"),
        (lambda batch: Rename(batch, (("b", "a"),)), r"rename\(.*\) gives two columns one name among a, b"),
    ],
)
def test_a_mistake_in_unknown_columns_is_left_to_the_reader(mistake, message: str) -> None:
    batch = mistake(Union(Leaf(Source((("a",),))), Leaf(Source((("b",),), columns=("b",)))))
    with pytest.raises(BatchError, match=message):
        prune(batch, {"a"}).columns(extents_of(batch))
