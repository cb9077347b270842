"""Requests for outputs: columns of k numbers for each token, and what cannot be answered."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from hf_engine.training.micro_batches import SequenceBatch
from hf_engine.training.outputs import OutputRequest, place_at
from hf_protocols.errors import BackendError, BatchError


def jagged(*rows):
    return torch.nested.nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def batch(**more):
    columns = {"prompt_ids": jagged([1], [2, 3]), "response_ids": jagged([4, 5, 6], [7])}
    return TensorDict(columns | more, batch_size=[2])


CANDIDATES = jagged([[1, 2], [3, 4], [5, 6]], [[7, 8]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_candidates_are_padded_like_the_response(dtype):
    logprobs = jagged([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], [[0.7, 0.8]])
    given = batch(candidate_ids=CANDIDATES.to(dtype), teacher=logprobs)
    sequences = SequenceBatch(given, 9, candidates=True)
    (micro_batch,) = sequences.micro_batches(100)
    order = micro_batch.rows.tolist()
    wanted = {0: [[1, 2], [3, 4], [5, 6]], 1: [[7, 8], [0, 0], [0, 0]]}
    assert micro_batch.candidate_ids.dtype == torch.int64
    assert micro_batch.candidate_ids.tolist() == [wanted[row] for row in order]
    columns = sequences.padded_columns(micro_batch)
    assert columns["candidate_ids"].tolist() == micro_batch.candidate_ids.tolist()
    assert columns["teacher"].shape == (2, 3, 2)
    assert not columns["teacher"][order.index(1), 1:].any()


def test_results_of_k_numbers_are_put_back_as_one_column():
    sequences = SequenceBatch(batch(), 9)
    parts = [(each, torch.stack([each.response_ids, -each.response_ids], -1)) for each in sequences.micro_batches(4)]
    assert len(parts) == 2
    column = sequences.jagged(parts, (2,), torch.int64)
    assert column.dtype == torch.int64
    assert [row.tolist() for row in column.unbind()] == [[[4, -4], [5, -5], [6, -6]], [[7, -7]]]


def test_without_rows_a_column_keeps_its_shape():
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    sequences = SequenceBatch(TensorDict({"prompt_ids": empty, "response_ids": empty}, batch_size=[0]), 9)
    assert sequences.jagged([], (3,), torch.int64).values().shape == (0, 3)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (None, "the batch lacks the columns \\['candidate_ids'\\]"),
        (torch.zeros(2, 3, 2, dtype=torch.int64), "is a Tensor that is not jagged. Use k token ids"),
        (jagged([1, 2, 3], [4]), "is of torch.int64 of 2 dimensions"),
        (CANDIDATES.float(), "is of torch.float32 of 3 dimensions"),
        (jagged([[1, 2]], [[3, 4]]), "row 0 of 'candidate_ids' has 1 tokens, its response 3"),
        (CANDIDATES - 3, "holds -2, which is not a token id"),
    ],
)
def test_candidates_that_are_not_ids_of_each_token_are_refused(column, says):
    given = batch() if column is None else batch(candidate_ids=column)
    with pytest.raises(BatchError, match=says):
        SequenceBatch(given, 9, candidates=True)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (OutputRequest(top_k=10), "top_k=10: the model's vocabulary has 9 tokens. Lower it"),
        (OutputRequest(top_k=-1), "top_k=-1"),
        (OutputRequest(temperature=0.0), "temperature=0.0"),
    ],
)
def test_a_request_that_no_model_answers_is_refused(request_, says):
    OutputRequest(top_k=9).check(9)
    with pytest.raises(BackendError, match=says):
        request_.check(9)


def test_outputs_are_placed_where_their_tokens_stand():
    positions, mask = torch.tensor([0, 2, 3]), torch.zeros(2, 2)
    placed = place_at(positions, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), mask.shape)
    assert placed.tolist() == [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 4.0], [5.0, 6.0]]]
    assert place_at(positions, torch.ones(3), mask.shape).tolist() == [[1.0, 0.0], [1.0, 1.0]]
