"""One more position in each row that has room, against rows that are taken one by one."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.workers.critic import add_positions, find_room, split_positions

_LENGTHS = [3, 0, 5, 1, 4]


def make_batch(form: str) -> TensorDict:
    """Three columns whose rows follow one another (packed), have holes between them (narrowed), or are dense."""
    flat = (torch.arange(20), torch.rand(20, generator=torch.Generator().manual_seed(3)) < 0.4, torch.arange(20.0))
    lengths = torch.tensor(_LENGTHS)
    packed = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    narrowed = torch.tensor([2, 6, 7, 13, 15, 20])
    make = {
        "packed": lambda values: torch.nested.nested_tensor_from_jagged(values[:13], packed),
        "narrowed": lambda values: torch.nested.nested_tensor_from_jagged(values, narrowed, lengths),
        "dense": lambda values: values.view(5, 4),
    }[form]
    names = ("response_ids", "response_mask", "returns")
    return TensorDict({name: make(values) for name, values in zip(names, flat, strict=True)}, batch_size=[5])


def list_rows(column: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in column.unbind()]


@pytest.mark.parametrize("form", ["packed", "narrowed", "dense"])
def test_rows_with_room_gain_one_trained_token(form: str) -> None:
    batch = make_batch(form)
    has_room = torch.tensor([True, False, True, False, True])
    last = torch.tensor([7.0, 8.0, 9.0, 10.0, 11.0], dtype=torch.float64)
    found = add_positions(batch, has_room, {"returns": last})
    for name, value in (("response_ids", [0] * 5), ("response_mask", [True] * 5), ("returns", last.tolist())):
        before = list_rows(batch[name])
        wanted = [row + [value[place]] * bool(has_room[place]) for place, row in enumerate(before)]
        assert list_rows(found[name]) == wanted
        assert found[name].dtype is batch[name].dtype
        assert list_rows(batch[name]) == before, "the batch itself is as it was"
    assert found["response_ids"].offsets() is found["returns"].offsets(), "aligned, for torch and for backends"


@pytest.mark.parametrize("form", ["packed", "narrowed", "dense"])
def test_room_is_where_a_short_row_has_a_trained_token(form: str) -> None:
    batch = make_batch(form)
    masks = list_rows(batch["response_mask"])
    assert any(map(any, masks))
    for most in range(7):
        wanted = [len(row) < most and any(row) for row in masks]
        assert find_room(batch, most).tolist() == wanted


@pytest.mark.parametrize("form", ["packed", "narrowed"])
def test_positions_are_split_off_again(form: str) -> None:
    column = make_batch(form)["returns"]
    has_room = torch.tensor([True, False, False, True, True])
    kept, last = split_positions(column, has_room)
    rows = list_rows(column)
    assert list_rows(kept) == [row[:-1] if room else row for row, room in zip(rows, has_room.tolist(), strict=True)]
    for number, row, room in zip(last.tolist(), rows, has_room.tolist(), strict=True):
        assert number == row[-1] if room else math.isnan(number)


def test_columns_of_other_rows_are_each_extended_as_they_lie() -> None:
    """Values may have other rows than their mask: an error of the caller, which the backend names."""
    batch = make_batch("packed")
    batch["returns"] = make_batch("dense")["returns"]
    found = add_positions(batch, torch.ones(5, dtype=torch.bool), {"returns": torch.zeros(5)})
    assert [len(row) for row in list_rows(found["returns"])] == [5] * 5
    assert [len(row) for row in list_rows(found["response_ids"])] == [length + 1 for length in _LENGTHS]


def test_equal_rows_in_more_values_get_their_own_numbers() -> None:
    """A column narrowed to rows that begin as the ids' do, with values after the last of them."""
    offsets = torch.tensor([0, 2, 4])
    batch = TensorDict(
        {
            "response_ids": torch.nested.nested_tensor_from_jagged(torch.arange(4), offsets),
            "response_mask": torch.nested.nested_tensor_from_jagged(torch.ones(4, dtype=torch.bool), offsets),
            "returns": torch.nested.nested_tensor_from_jagged(
                torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0, 200.0]), offsets, lengths=torch.tensor([2, 2])
            ),
        },
        batch_size=[2],
    )
    found = add_positions(batch, torch.ones(2, dtype=torch.bool), {"returns": torch.tensor([8.0, 9.0])})
    assert list_rows(found["returns"]) == [[0.0, 1.0, 8.0], [2.0, 3.0, 9.0]]
    assert list_rows(found["response_ids"]) == [[0, 1, 0], [2, 3, 0]]


def test_no_rows_stay_no_rows() -> None:
    offsets = torch.zeros(1, dtype=torch.int64)
    columns = {name: torch.nested.nested_tensor_from_jagged(torch.zeros(0), offsets) for name in ("ids", "mask")}
    batch = TensorDict({f"response_{name}": column for name, column in columns.items()}, batch_size=[0])
    none = torch.zeros(0, dtype=torch.bool)
    assert find_room(batch, 3).tolist() == []
    assert len(add_positions(batch, none)["response_ids"].values()) == 0
    kept, last = split_positions(columns["ids"], none)
    assert (len(kept.values()), len(last)) == (0, 0)
