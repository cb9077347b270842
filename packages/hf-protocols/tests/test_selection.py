from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_protocols import BatchError, RowSelection

exact = settings(max_examples=200, derandomize=True)
row_lists = st.lists(st.integers(0, 30), max_size=40)


@exact
@given(rows=row_lists)
def test_a_selection_is_the_list_of_its_rows(rows: list[int]) -> None:
    selection = RowSelection.from_rows(rows)
    assert list(selection) == rows
    assert len(selection) == len(rows)
    assert bool(selection) == bool(rows)


@exact
@given(first=row_lists, second=row_lists)
def test_equal_rows_make_equal_selections(first: list[int], second: list[int]) -> None:
    joined = RowSelection.from_rows(first) + RowSelection.from_rows(second)
    assert joined == RowSelection.from_rows(first + second)
    assert hash(joined) == hash(RowSelection.from_rows(first + second))
    assert list(joined) == first + second


@exact
@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=40), data=st.data())
def test_take_selects_from_a_selection(rows: list[int], data) -> None:
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40))
    taken = RowSelection.from_rows(rows).take(RowSelection.from_rows(positions))
    assert list(taken) == [rows[position] for position in positions]


@exact
@given(rows=row_lists, times=st.integers(1, 4))
def test_repeat_makes_consecutive_rows_of_each(rows: list[int], times: int) -> None:
    repeated = RowSelection.from_rows(rows).repeat(times)
    assert list(repeated) == [row * times + copy for row in rows for copy in range(times)]


@exact
@given(rows=st.lists(st.integers(0, 2**40), max_size=20) | row_lists)
def test_pickling_keeps_the_rows(rows: list[int]) -> None:
    selection = RowSelection.from_rows(rows)
    assert pickle.loads(pickle.dumps(selection)) == selection


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_pickled_row_takes_at_most_four_bytes(step: int) -> None:
    selection = RowSelection.from_rows(range(0, 30_000, step))
    len(selection.take(RowSelection.range(0, 10)))  # what is remembered for speed does not travel
    assert len(pickle.dumps(selection)) <= 4 * len(selection) + 200


def test_intervals_that_touch_are_one() -> None:
    assert RowSelection(((0, 2), (2, 5), (7, 8))).intervals == ((0, 5), (7, 8))
    assert RowSelection.from_rows([3, 4, 5, 4]).intervals == ((3, 6), (4, 5))
    assert RowSelection.range(4, 4) == RowSelection() == RowSelection.from_rows([])


def test_intervals_cost_the_same_however_long() -> None:
    far = 10**15
    selection = RowSelection.range(5, far) + RowSelection.range(0, 5)
    assert len(selection) == far
    assert selection.take(RowSelection.range(far - 6, far - 3)).intervals == ((far - 1, far), (0, 2))
    assert selection.repeat(2).intervals == ((10, 2 * far), (0, 10))


@pytest.mark.parametrize("interval", [(2, 1), (3, 3), (-1, 2)])
def test_an_interval_that_holds_no_rows_is_refused(interval: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"interval .* is empty, reversed or negative; 0 <= start < stop must hold"):
        RowSelection((interval,))
    with pytest.raises(ValueError, match="interval"):
        RowSelection.from_rows([-1])


def test_positions_beyond_the_end_are_refused() -> None:
    with pytest.raises(IndexError, match="position 3 of a selection of 3 rows"):
        RowSelection.range(5, 8).take(RowSelection.range(2, 4))


def test_rows_repeat_at_least_once() -> None:
    with pytest.raises(ValueError, match=r"cannot be repeated 0 times\. Repeat them at least once"):
        RowSelection.range(0, 2).repeat(0)


@pytest.mark.parametrize("intervals", ["ab", 3, None, [1, 2], ((1,),), ((0, 1, 2),), (("a", "b"),), ((0.5, 2),)])
def test_values_that_are_not_intervals_are_refused(intervals: Any) -> None:
    with pytest.raises(BatchError, match=r"^RowSelection\(.*\). Use pairs \(start, stop\) of whole numbers"):
        RowSelection(intervals)


@pytest.mark.parametrize("rows", [3, None, ["a"], [1.5], [None]])
def test_values_that_are_not_row_numbers_are_refused(rows: Any) -> None:
    with pytest.raises(BatchError, match=r"Use (row numbers, such as|pairs)"):
        RowSelection.from_rows(rows)


class Byte:
    """A row number of one byte, as the elements of numpy's and torch's arrays of uint8 are: a sum of them wraps."""

    def __init__(self, value: int) -> None:
        self.value = value % 256

    def __index__(self) -> int:
        return self.value

    def __add__(self, other: Any) -> Byte:
        return Byte(self.value + int(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Byte:
        return Byte(self.value - int(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Byte | int) and self.value == int(other)

    def __lt__(self, other: Any) -> bool:
        return self.value < int(other)

    def __le__(self, other: Any) -> bool:
        return self.value <= int(other)

    __hash__ = None  # type: ignore[assignment]


def test_numbers_of_a_small_type_do_not_wrap() -> None:
    rows = [0, 2] * 150 + [254, 255]
    found = RowSelection.from_rows(list(map(Byte, rows)))  # type: ignore[arg-type]
    bounds: Any = ((Byte(0), Byte(200)), (Byte(0), Byte(200)))
    assert (list(found), len(found), hash(found)) == (rows, 302, hash(RowSelection.from_rows(rows)))
    assert list(found.take(RowSelection.range(299, 302)).repeat(2)) == [4, 5, 508, 509, 510, 511]
    assert RowSelection(bounds) == RowSelection(((0, 200), (0, 200)))
    assert len(RowSelection(bounds)) == 400


def test_tensors_of_row_numbers_are_taken_in_any_dtype() -> None:
    torch = pytest.importorskip("torch", reason="compares with tensors of row numbers")
    rows = [0, 2] * 100 + [126, 127]
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        found = RowSelection.from_rows(torch.tensor(rows, dtype=dtype))
        assert found.intervals == RowSelection.from_rows(rows).intervals
        assert set(map(type, found.intervals[0])) == {int}
    with pytest.raises(BatchError, match=r"from_rows\(tensor\(\[0.5000\]\)\). Use row numbers, such as \[0, 2\]"):
        RowSelection.from_rows(torch.tensor([0.5]))


def test_wrong_kinds_of_arguments_are_refused() -> None:
    rows: Any = RowSelection.range(0, 3)
    with pytest.raises(BatchError, match=r"^take: positions=\[1\]. Use a RowSelection$"):
        rows.take([1])
    with pytest.raises(BatchError, match=r"^a RowSelection \+ other=\[1\]. Use a RowSelection$"):
        rows + [1]  # noqa: RUF005 - a list is what is refused
    for times in ("2", 1.5, None):
        with pytest.raises(BatchError, match=r"^repeat: times=.*. Use a whole number$"):
            rows.repeat(times)


@pytest.mark.parametrize("mask", [[True, False], (False,), iter([True])])
def test_a_mask_is_not_a_list_of_row_numbers(mask: Any) -> None:
    with pytest.raises(BatchError, match=r"from_rows\(.*\): a mask is not a list of row numbers"):
        RowSelection.from_rows(mask)


def test_a_range_is_taken_whole() -> None:
    assert RowSelection.from_rows(range(3, 10**15)) == RowSelection.range(3, 10**15)
    assert RowSelection.from_rows(range(5, 2)) == RowSelection()


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        (((0, 2**63),), r"^interval \(0, 9223372036854775808\) ends above the largest row number 9223372036854775807"),
        (
            ((0, 2**62), (1, 2**62), (2, 2**62)),
            "^a selection of 13835058055282163709 rows is longer than 9223",
        ),
    ],
)
def test_rows_that_no_length_counts_are_refused(intervals: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        RowSelection(intervals)
