from __future__ import annotations

import pytest
import torch

from hf_engine import LOGPROB_BOUNDS, LogprobGap, check_logprobs, find_coarsest, measure_logprob_gap
from hf_protocols import ReshardError


def jagged(*rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_the_gap_is_over_tokens_of_ragged_rows():
    gap = measure_logprob_gap(jagged([-1.0, -2.0], [-3.0]), jagged([-1.5, -2.0], [-4.0]))
    assert (gap.mean, gap.max, gap.num_tokens) == (0.5, 1.0, 3)
    assert measure_logprob_gap(torch.empty(0), torch.empty(0)).num_tokens == 0


def test_numbers_between_the_rows_do_not_count():
    sparse = torch.tensor([9.0, -1.0, -2.0, float("nan"), -3.0])
    bounds = torch.tensor([1, 4, 5])
    holes = torch.nested.nested_tensor_from_jagged(sparse, bounds, lengths=torch.tensor([2, 1]))
    assert measure_logprob_gap(holes, jagged([-1.5, -2.0], [-4.0])) == LogprobGap(mean=0.5, max=1.0, num_tokens=3)


@pytest.mark.parametrize("dtype", LOGPROB_BOUNDS)
def test_each_bound_is_inclusive_and_refuses_alone(dtype):
    mean, largest = LOGPROB_BOUNDS[dtype]
    zeros = torch.zeros(10_000, dtype=torch.float64)
    for refused, values in ((False, zeros + mean * 0.99), (True, zeros + mean * 1.01)):
        assert is_refused(values, zeros, dtype) == refused
    for refused, value in ((False, largest * 0.99), (True, largest * 1.01)):
        values = zeros.clone()
        values[7] = value
        assert is_refused(values, zeros, dtype) == refused


def is_refused(rollout, recomputed, dtype):
    """True for a refusal by the bounds; another error is raised."""
    try:
        check_logprobs(rollout, recomputed, dtype=dtype)
    except ReshardError as error:
        if "not those of the training weights" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize(("tokens", "temperature", "factor"), [(64, 0.1, 10.0), (64, 2.0, 1.0), (8, 1.0, 8.0)])
def test_the_bound_of_the_mean_depends_on_temperature_and_tokens(tokens, temperature, factor):
    bound = LOGPROB_BOUNDS["bfloat16"][0] * factor
    zeros = torch.zeros(tokens, dtype=torch.float64)
    found = check_logprobs(zeros + bound * 0.99, zeros, dtype="bfloat16", temperature=temperature)
    assert found.num_tokens == tokens
    with pytest.raises(ReshardError, match=f"bound {bound:g}"):
        check_logprobs(zeros + bound * 1.01, zeros, dtype="bfloat16", temperature=temperature)


def test_the_coarsest_dtype_has_the_largest_bounds():
    assert find_coarsest(("float32", "bfloat16", "float16")) == "bfloat16"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ReshardError, match="inf at most"):
        check_logprobs(torch.tensor([-1.0, value]), torch.tensor([-1.0, -1.0]), dtype="bfloat16")


def test_bounds_can_be_given_and_batches_must_be_one():
    check_logprobs(torch.tensor([-1.0]), torch.tensor([-2.0]), dtype="float32", bounds=(1.0, 1.0))
    with pytest.raises(ReshardError, match="2 log-probs of the sampler and 1 recomputed"):
        check_logprobs(torch.zeros(2), torch.zeros(1), dtype="float32")


NAN = float("nan")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bounds": (NAN, 1.0)}, r"bounds=\(nan, 1.0\). Use two numbers of at least 0"),
        ({"bounds": (1.0, NAN)}, r"bounds=\(1.0, nan\). Use two numbers"),
        ({"bounds": (-1.0, 1.0)}, r"bounds=\(-1.0, 1.0\). Use two numbers"),
        ({"bounds": ("a", "b")}, r"bounds=\('a', 'b'\). Use two numbers"),
        ({"bounds": ()}, r"bounds=\(\). Use two numbers"),
        ({"bounds": 3}, "bounds=3. Use two numbers"),
        ({"dtype": "float8"}, "dtype='float8' is not one of 'float64', 'float32', 'float16', 'bfloat16'"),
        ({"temperature": 0.0}, "temperature=0.0 must be a finite number above 0"),
        ({"dtype": []}, r"dtype=\[\] is not one of"),
    ],
)
def test_bounds_that_bound_nothing_are_refused(given, message):
    with pytest.raises(ReshardError, match=message):
        check_logprobs(torch.zeros(2), torch.ones(2), **{"dtype": "float32"} | given)


def test_columns_that_are_none_are_refused():
    with pytest.raises(ReshardError, match=r"rollout=\[0.0\]. Use a tensor of log-probs"):
        check_logprobs([0.0], torch.zeros(1), dtype="float32")
    with pytest.raises(ReshardError, match=r"recomputed=None. Use a tensor of log-probs"):
        measure_logprob_gap(torch.zeros(1), None)
