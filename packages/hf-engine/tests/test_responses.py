from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from hf_engine import SamplingParams
from hf_engine.rollout.responses import build_responses, digest_request, end_of_sequence_ids, read_prompts
from hf_protocols import BackendError, BatchError, NonFiniteLossError

TWO = SamplingParams(max_new_tokens=2)


def batch_of(rows, row_ids):
    ids = torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)
    return TensorDict({"prompt_ids": ids, "row_id": row_ids}, batch_size=[len(rows)])


def read(rows, row_ids=None, sampling=TWO, ends=()):
    batch = batch_of(rows, torch.arange(len(rows)) if row_ids is None else row_ids)
    return read_prompts(batch, sampling, vocab_size=64, positions=8, ends=ends)


def test_prompts_that_fit_are_read():
    assert read([[3, 63], [0] * 6]).lengths.tolist() == [2, 6]
    assert read([[3]], torch.tensor([7], dtype=torch.int32)).lengths.tolist() == [1]


def test_requests_differ_where_their_samples_would():
    first = replace(TWO, temperature=1, top_p=1, stop_token_ids=(5, 6), stop_strings=("a", "b"))
    prompts, row_id = read([[3, 4], [5]]), torch.tensor([7, 8])
    digest = digest_request(prompts, row_id, first)
    again = replace(first, temperature=1.0, top_p=1.0, stop_token_ids=[6, 5, 5], stop_strings=["b", "a"])
    assert digest_request(read([[3, 4], [5]]), row_id.int(), again) == digest
    others = [
        (read([[3], [4, 5]]), row_id, first),
        (read([[3, 4], [6]]), row_id, first),
        (prompts, row_id + 1, first),
        *((prompts, row_id, replace(first, **{name: 2})) for name in ("temperature", "n", "min_new_tokens", "seed")),
        (prompts, row_id, replace(first, top_p=0.5)),
        (prompts, row_id, replace(first, seed=2**53 + 1)),
        (prompts, row_id, replace(first, seed=2**53)),
        (prompts, row_id, replace(first, stop_token_ids=(5,))),
    ]
    assert len({digest, *(digest_request(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[3], []], "prompt of row 1 is empty; a prompt needs at least one token"),
        ([[3], [3] * 7], r"row 1 has 7 tokens, above the model's 8 positions - max_new_tokens=2 = 6. Shorten"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(BackendError, match=message):
        read(rows)


@pytest.mark.parametrize("token", [64, 100_000, -1])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(BatchError, match=rf"row 1 of 'prompt_ids' holds the token id {token}, the model's are 0 to 63"):
        read([[3], [3, token]])


@pytest.mark.parametrize("token", [64, 1 << 70])
def test_a_stop_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(BackendError, match=rf"stop_token_ids=\(3, {token}\) holds {token}, the model's .* 0 to 63"):
        read([[3]], sampling=SamplingParams(max_new_tokens=2, stop_token_ids=(3, token)))


def test_a_minimum_length_that_leaves_no_token_is_refused():
    stops = tuple(range(64))
    assert read([[3]], sampling=SamplingParams(max_new_tokens=2, stop_token_ids=stops)).lengths.tolist() == [1]
    with pytest.raises(BackendError, match="min_new_tokens=1 and all 64 tokens in stop_token_ids: none is left"):
        read([[3]], sampling=SamplingParams(max_new_tokens=2, min_new_tokens=1, stop_token_ids=stops))


def test_the_models_own_ends_leave_no_token_either():
    stops = tuple(range(62))
    given = {"max_new_tokens": 2, "stop_token_ids": stops}
    told = "min_new_tokens=1 and all 64 tokens in stop_token_ids or the model's own eos_token_id: none is left to draw"
    with pytest.raises(BackendError, match=told):
        read([[3]], sampling=SamplingParams(**given, min_new_tokens=1), ends={61, 62, 63})
    assert len(read([[3]], sampling=SamplingParams(**given, min_new_tokens=1), ends={61, 62}).lengths) == 1
    assert len(read([[3]], sampling=SamplingParams(**given), ends={62, 63}).lengths) == 1


def test_an_end_that_the_vocabulary_lacks_is_never_drawn():
    config = SimpleNamespace(eos_token_id=5, vocab_size=64)
    assert end_of_sequence_ids(SimpleNamespace(eos_token_id=[7, 99]), config) == {7}
    assert end_of_sequence_ids(SimpleNamespace(eos_token_id=99), config) == set()
    assert end_of_sequence_ids(None, config) == {5}


@pytest.mark.parametrize(
    "row_ids",
    [torch.tensor([1.5]), torch.tensor([[1, 2]]), torch.nested.nested_tensor([torch.arange(2)], layout=torch.jagged)],
)
def test_row_ids_must_be_a_column_of_whole_numbers(row_ids):
    with pytest.raises(BatchError, match=r"the column 'row_id' is .*. Use one whole number a row"):
        read([[3]], row_ids)


@pytest.mark.parametrize(
    ("version", "cause"), [(0, ", before any update: the model's files"), (3, ": the weights have")]
)
def test_logits_that_are_not_finite_name_their_cause(version, cause):
    one, finish = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(NonFiniteLossError, match=f"row 0 are not finite at weight version {version}{cause}"):
        build_responses(one, torch.tensor([float("nan")]), one, finish, n=1, version=version)


def test_sampling_parameters_of_another_kind_are_refused():
    with pytest.raises(BackendError, match=r"sampling=\{'max_new_tokens': 2\}. Use SamplingParams"):
        read([[3]], sampling={"max_new_tokens": 2})


@pytest.mark.parametrize(
    ("sampling", "positions"),
    [
        (SamplingParams(max_new_tokens=2, n=10**9), 8),
        (SamplingParams(max_new_tokens=2, n=10**30), 8),
        (SamplingParams(max_new_tokens=10**12), None),
        (SamplingParams(max_new_tokens=10**6, n=10**6), None),
    ],
)
def test_more_samples_than_the_machine_holds_are_refused(machine_of, sampling, positions):
    machine_of(4096 << 28)
    wanted = f"2 prompts x n={sampling.n} samples of max_new_tokens={sampling.max_new_tokens} take about"
    with pytest.raises(BackendError, match=rf"{wanted} \d+ bytes, this machine has 1099511627776. Lower n or"):
        read_prompts(batch_of([[3], [3]], torch.arange(2)), sampling, vocab_size=64, positions=positions, ends=())


def test_many_samples_that_the_machine_holds_are_read(machine_of):
    machine_of(4096 << 22)
    assert len(read([[3]], sampling=SamplingParams(max_new_tokens=4, n=10**6)).lengths) == 1


@pytest.mark.parametrize(("n", "max_new_tokens"), [(10**30, 2), (1, 10**12), (1, 10**30)])
def test_samples_beyond_memory_are_refused_even_without_prompts(n, max_new_tokens):
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    batch = TensorDict({"prompt_ids": empty, "row_id": torch.zeros(0, dtype=torch.int64)}, batch_size=[0])
    sampling = SamplingParams(max_new_tokens=max_new_tokens, n=n)
    with pytest.raises(BackendError, match=f"even one prompt x n={n} samples of max_new_tokens={max_new_tokens} take"):
        read_prompts(batch, sampling, vocab_size=64, positions=None, ends=())
    assert len(read_prompts(batch, TWO, vocab_size=64, positions=8, ends=()).lengths) == 0
