from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from hf_controller.data.results import encode_batch
from hf_controller.data.transport import as_tensor
from hf_controller.executors.in_process import LocalStore
from hf_protocols import BatchError, RowSelection


def one_column(value: object, num_rows: int = 2) -> TensorDict:
    return TensorDict({"x": value}, batch_size=[num_rows])


DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "uint8", "bool", "complex64")


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_travels(name):
    store = LocalStore()
    value = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(getattr(torch, name))
    shard = encode_batch(one_column(value), store)
    back = as_tensor(store.get([shard.arrays], 1.0)[0][0], shard.columns["x"].dtype)
    assert back.dtype == value.dtype
    assert torch.equal(back.view(torch.uint8), value.view(torch.uint8))


def test_a_shard_describes_its_columns():
    store = LocalStore()
    tokens = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    values = torch.nested.nested_tensor([torch.zeros(3, 5), torch.zeros(1, 5)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.arange(2), torch.arange(2)], layout=torch.jagged)
    shard = encode_batch(
        TensorDict({"a": tokens, "b": values, "c": other, "d": torch.zeros(2, 7)}, batch_size=[2]), store
    )
    assert {name: (c.position, c.row_shape, c.lengths, c.num_bytes) for name, c in shard.columns.items()} == {
        "a": (0, (), 4, 4 * 8),
        "b": (1, (5,), 4, 4 * 5 * 4),
        "c": (2, (), 5, 4 * 8),
        "d": (3, (7,), None, 2 * 7 * 4),
    }
    assert [lengths.tolist() for lengths in store.get([shard.arrays], 1.0)[0][4:]] == [[3, 1], [2, 2]]
    assert shard.num_bytes == 32 + 80 + 32 + 56


@pytest.mark.parametrize("step", [1, 2, 3])
def test_metadata_and_lengths_take_at_most_eight_bytes_a_row(step):
    """Covers what a consumer needs before it fetches rows: the rows' places and their lengths."""
    num_rows = 3000
    tokens = torch.nested.nested_tensor([torch.arange(row % 5) for row in range(num_rows)], layout=torch.jagged)
    batch = TensorDict({"tokens": tokens, "logprobs": tokens * 0.5, "wide": torch.zeros(num_rows, 64)}, [num_rows])
    store = LocalStore()
    selection = RowSelection.from_rows(range(0, step * num_rows, step))
    shard = encode_batch(batch, store, selection=selection, input_rows=step * num_rows)
    (arrays,) = store.get([shard.arrays], 1.0)
    lengths = {column.lengths: arrays[column.lengths].nbytes for column in shard.columns.values() if column.lengths}
    metadata = len(pickle.dumps(replace(shard, arrays=None)))
    assert metadata + sum(lengths.values()) <= 8 * num_rows + 1000


def test_views_and_gradients_are_stored_as_plain_rows():
    store = LocalStore()
    base = torch.nested.nested_tensor([torch.arange(5.0), torch.arange(3.0), torch.arange(4.0)], layout=torch.jagged)
    batch = TensorDict({"x": base, "y": torch.randn(3, 4, requires_grad=True).t()[:3]}, batch_size=[3])[1:]
    shard = encode_batch(batch, store)
    ((x, y, lengths),) = store.get([shard.arrays], 1.0)
    assert x.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert lengths.tolist() == [3, 4]
    assert torch.equal(as_tensor(y), batch["y"].detach())


def test_jagged_rows_with_holes_are_stored_without_them():
    store = LocalStore()
    values, offsets, lengths = torch.arange(10), torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    shard = encode_batch(one_column(holes), store)
    assert store.get([shard.arrays], 1.0)[0][0].tolist() == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("lengths", [[3, 4], None], ids=["lengths", "offsets"])
def test_jagged_rows_beyond_the_values_are_refused(lengths):
    offsets = torch.tensor([0, 3, 5 if lengths else 7])
    given = None if lengths is None else torch.tensor(lengths)
    column = torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets, given, min_seqlen=3, max_seqlen=4)
    with pytest.raises(BatchError, match="column 'x' has rows of 7 elements together and values for 5"):
        encode_batch(one_column(column), LocalStore())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TensorDict({"y": torch.zeros(2)}, batch_size=[2]), "column 'x' is a TensorDict"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "not jagged in dim 1"),
    ],
)
def test_what_cannot_travel_is_named(value, message):
    with pytest.raises(BatchError, match=message):
        encode_batch(one_column(value), LocalStore())


def test_a_batch_has_rows():
    with pytest.raises(BatchError, match=r"got \[2, 3\]"):
        encode_batch(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]), LocalStore())


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda x: x.to_sparse(), r"column 'x' is sparse_coo. Make it dense, with .to_dense\(\)"),
        (lambda x: x.to_sparse_csr(), r"column 'x' is sparse_csr. Make it dense, with .to_dense\(\)"),
        (lambda x: x.to("meta"), "column 'x' is on the device meta and has no values. Compute it first"),
        (lambda x: x.to(torch.complex32), r"column 'x' is complex32, .*. Make it another type, with .to\(dtype\)"),
        (
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            r"column 'x' is quantized. Dequantize it, with .dequantize\(\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_shared_memory_cannot_hold_is_refused(convert, message):
    with pytest.raises(BatchError, match=f"^{message}"):
        encode_batch(TensorDict({"x": convert(torch.eye(3))}, batch_size=[3]), LocalStore())


def test_a_conjugated_view_travels_as_its_values():
    store = LocalStore()
    column = torch.tensor([1 + 2j, 3 - 1j]).conj()
    shard = encode_batch(TensorDict({"x": column}, batch_size=[2]), store)
    assert as_tensor(shard.arrays.value[0], "complex64").tolist() == [1 - 2j, 3 + 1j]


def count_metadata_bytes(num_rows):
    """Returns the bytes that a reader gets before it fetches rows that were chosen one by one: metadata and lengths."""
    rows = RowSelection.from_rows(torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).tolist())
    offsets = torch.arange(num_rows + 1)
    columns = {name: torch.nested.nested_tensor_from_jagged(torch.zeros(num_rows), offsets) for name in "abc"}
    shard = encode_batch(TensorDict(columns, batch_size=[num_rows]), LocalStore(), selection=rows, input_rows=num_rows)
    lengths = {column.lengths for column in shard.columns.values()}
    return len(pickle.dumps(replace(shard, arrays=None))) + sum(shard.arrays.value[each].nbytes for each in lengths)


@pytest.mark.parametrize("num_rows", [1024, 1_000_000])
def test_metadata_take_at_most_8_bytes_a_row(num_rows):
    few = count_metadata_bytes(8)
    assert few < 1024
    assert count_metadata_bytes(num_rows) - few <= 8 * num_rows


def test_forty_columns_cost_no_more_than_their_bytes():
    offsets = torch.arange(0, 4 * 65, 4)
    dense = {f"dense_{number}": torch.zeros(64, 4) for number in range(20)}
    jagged = {
        f"jagged_{number}": torch.nested.nested_tensor_from_jagged(torch.zeros(4 * 64), offsets) for number in range(20)
    }
    shard = encode_batch(TensorDict({**dense, **jagged}, batch_size=[64]), LocalStore())
    assert shard.num_bytes == 40 * 64 * 4 * 4
    assert sum(array.nbytes for array in shard.arrays.value) == shard.num_bytes + 64 * 4  # and the lengths, once
    assert len(pickle.dumps(replace(shard, arrays=None))) <= 40 * 64
