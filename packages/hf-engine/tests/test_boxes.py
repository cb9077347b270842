from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_engine.resharding.boxes import Box, partition_box, split_box


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.offset, box.stop, strict=True))))


def boxes(num_dims: int, size: int = 5) -> st.SearchStrategy[Box]:
    side = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    return st.lists(side, min_size=num_dims, max_size=num_dims).map(
        lambda sides: Box(tuple(a for a, _ in sides), tuple(b - a for a, b in sides))
    )


def test_the_elements_of_a_box():
    box = Box((1, 2), (2, 3))
    assert box.stop == (3, 5)
    assert box.numel == 6
    assert Box.whole((4, 8)) == Box((0, 0), (4, 8))
    assert Box((), ()).numel == 1
    assert Box((1, 0), (0, 7)).numel == 0


@pytest.mark.parametrize(("offset", "shape"), [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))])
def test_a_malformed_box_is_refused(offset, shape):
    with pytest.raises(ValueError, match=r"dimensions|negative"):
        Box(offset, shape)


@pytest.mark.parametrize(
    ("offset", "shape"), [("ab", "cd"), (0, 1), ([0], [1]), ((0,), (1.5,)), (("a",), (1,)), ((0,), None)]
)
def test_a_box_is_of_two_tuples_of_whole_numbers(offset, shape):
    with pytest.raises(ValueError, match=re.escape(f"Box({offset!r}, {shape!r}). Use two tuples of whole numbers")):
        Box(offset, shape)


@pytest.mark.parametrize("shape", ["ab", 3, None, [1.5]])
def test_the_box_of_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"Use .*whole numbers"):
        Box.whole(shape)


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_intersection_and_containment_are_those_of_sets(pair):
    first, second = pair
    common = first.intersect(second)
    assert (elements(common) if common else set()) == elements(first) & elements(second)
    assert first.contains(second) == (elements(second) <= elements(first))


def test_slices_address_a_box_inside_its_container():
    assert Box((3, 5), (2, 1)).slices_in(Box((2, 5), (4, 3))) == (slice(1, 3), slice(0, 1))


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 40))
def test_splitting_covers_a_box_once_in_row_major_order(box, max_numel):
    parts = list(split_box(box, max_numel))
    assert all(part.numel <= max_numel for part in parts)
    assert sum(part.numel for part in parts) == box.numel
    assert set().union(*(elements(part) for part in parts)) == elements(box)
    assert parts == sorted(parts)


def test_a_box_cannot_be_split_into_nothing():
    with pytest.raises(ValueError, match="at least 1"):
        list(split_box(Box((0,), (3,)), 0))


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=4))))
def test_a_partition_is_exact(case):
    box, covers = case
    cells = partition_box(box, covers)
    assert sum(cell.numel for cell, _ in cells) == box.numel
    assert set().union(*(elements(cell) for cell, _ in cells)) == elements(box)
    for cell, indices in cells:
        for index, cover in enumerate(covers):
            common = elements(cell) & elements(cover)
            assert common == (elements(cell) if index in indices else set())


def test_neighbours_with_the_same_holders_are_joined():
    whole = Box((0, 0), (4, 4))
    left = Box((0, 0), (4, 2))
    top = Box((0, 0), (2, 4))
    assert partition_box(whole, [whole]) == [(whole, frozenset({0}))]
    assert len(partition_box(whole, [left])) == 2
    assert len(partition_box(whole, [left, top])) == 4
