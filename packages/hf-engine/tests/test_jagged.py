from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from hf_engine.backends.jagged import Ragged, read_ids, require_columns, to_jagged
from hf_protocols import BatchError


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_rows_are_padded_on_either_side(dtype):
    column = torch.nested.nested_tensor([torch.ones(n, dtype=dtype) for n in (2, 0, 3)], layout=torch.jagged)
    right, right_mask = Ragged(column).pad_right(torch.tensor([2, 0, 1]), 4)
    left, left_mask = Ragged(column).pad_left(torch.tensor([2, 0, 1]), 4)
    assert right_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert left_mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert right.dtype == left.dtype == dtype
    assert torch.equal(right.bool(), right_mask)
    assert torch.equal(left.bool(), left_mask)


def test_a_column_without_a_single_token():
    column = to_jagged(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    padded, mask = Ragged(column).pad_right(torch.arange(2), 1)
    assert padded.tolist() == [[0], [0]]
    assert not mask.any()


def test_columns_over_shared_offsets_are_aligned():
    offsets = torch.tensor([0, 1, 3])
    first, second = (to_jagged(values, offsets) for values in (torch.ones(3), torch.arange(3.0)))
    assert [row.tolist() for row in (first + second).unbind()] == [[1.0], [2.0, 3.0]]
    assert first.to_padded_tensor(0).shape == (2, 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "the column 'ids' is of shape \\(2, 3\\), not jagged. Use rows without padding"),
        ([[1.0], [2.0]], "is of torch.float32. Use token ids of torch.int64"),
        ([[True], [False]], "is of torch.bool. Use token ids"),
        ([[1, 2], [3, 10]], "row 1 of 'ids' holds the token id 10, the model's are 0 to 9"),
        ([[1, -1], [3]], "row 0 of 'ids' holds the token id -1"),
    ],
)
def test_columns_without_token_ids_are_refused(rows, message):
    column = torch.zeros(2, 3, dtype=torch.int64)
    if rows is not None:
        column = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    with pytest.raises(BatchError, match=message):
        read_ids(TensorDict({"ids": column}, batch_size=[2]), "ids", 10)


def test_values_between_rows_are_not_tokens():
    column = torch.nested.nested_tensor_from_jagged(
        torch.tensor([99, 1, 2, 99, 3]), offsets=torch.tensor([1, 4, 5]), lengths=torch.tensor([2, 1])
    )
    assert read_ids(TensorDict({"ids": column}, batch_size=[2]), "ids", 10).lengths.tolist() == [2, 1]


def test_values_that_are_not_batches_are_refused():
    with pytest.raises(BatchError, match=r"batch=None. Use a TensorDict with the columns \['ids'\]"):
        require_columns(None, ("ids",))


def test_missing_columns_are_named():
    with pytest.raises(BatchError, match=r"lacks the columns \['row_id'\]; it has \['prompt_ids'\]"):
        require_columns(TensorDict({"prompt_ids": torch.zeros(2)}, batch_size=[2]), ("prompt_ids", "row_id"))
