from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_engine.training import token_logprobs
from hf_engine.training.token_logprobs import compute_token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 24])
def test_logprobs_entropy_and_gradients_are_those_of_log_softmax(monkeypatch, temperature, dtype, chunk_elements):
    monkeypatch.setattr(token_logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (torch.randn(3, 4, 11) * 4).to(dtype).requires_grad_()
    ids = torch.randint(0, 11, (3, 4))
    logprobs, entropy, _ = compute_token_logprobs(logits, ids, temperature=temperature, entropy=True)
    other = logits.detach().clone().requires_grad_()
    expected = (other.float() / temperature).log_softmax(-1)
    chosen = expected.gather(-1, ids[..., None])[..., 0]
    uncertainty = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(logprobs, chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, uncertainty, atol=1e-5, rtol=1e-5)
    (logprobs.sum() + entropy.square().sum()).backward()
    (chosen.sum() + uncertainty.square().sum()).backward()
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-4, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)


def test_entropy_is_computed_only_when_it_is_asked_for():
    logprobs, entropy, candidates = compute_token_logprobs(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64))
    assert entropy is None
    assert candidates is None
    torch.testing.assert_close(logprobs, torch.full((1, 2), 0.25).log())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_keeps_only_logits_in_their_own_dtype(monkeypatch, dtype, entropy):
    monkeypatch.setattr(token_logprobs, "_CHUNK_ELEMENTS", 64 * 100)
    logits = torch.randn(4, 32, 100).to(dtype).requires_grad_()
    ids = torch.randint(0, 100, (4, 32))
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_token_logprobs(logits, ids, temperature=0.7, entropy=entropy)
    assert sum(saved.values()) <= logits.nbytes + ids.nbytes + 2 * 4 * ids.numel()


def test_entropies_are_those_of_categorical_in_float64():
    logits = torch.randn(40, 23, dtype=torch.float64) * 5
    ids = torch.zeros(40, dtype=torch.int64)
    for temperature in (1.0, 0.6):
        found = compute_token_logprobs(logits, ids, temperature=temperature, entropy=True)
        wanted = torch.distributions.Categorical(logits=logits / temperature)
        torch.testing.assert_close(found.entropy, wanted.entropy(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found.logprobs, wanted.log_prob(ids), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk_elements", [1, 1 << 24])
def test_gradients_are_those_of_finite_differences(monkeypatch, chunk_elements):
    monkeypatch.setattr(token_logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    ids, candidates = torch.tensor([0, 5, 2, 2]), torch.tensor([[0, 1], [2, 3], [2, 5], [4, 1]])

    def compute(given):
        # The function's backward pass writes over what it saved: each call has logits of its own.
        found = compute_token_logprobs(given * 1.0, ids, temperature=0.7, entropy=True, candidate_ids=candidates)
        return found.logprobs, found.entropy, found.candidate_logprobs

    def compute_one(given, number):
        return compute(given)[number]

    assert torch.autograd.gradcheck(compute, logits, atol=1e-6)
    for number in range(3):  # alone, the gradients of the others are absent
        assert torch.autograd.gradcheck(compute_one, (logits, number), atol=1e-6)


def test_a_logit_of_minus_infinity_has_probability_zero():
    logits = torch.randn(3, 5)
    wanted = compute_token_logprobs(logits, torch.zeros(3, dtype=torch.int64), entropy=True)
    masked = torch.cat([logits, torch.full((3, 1), -torch.inf)], dim=1).requires_grad_()
    found = compute_token_logprobs(masked, torch.zeros(3, dtype=torch.int64), entropy=True)
    torch.testing.assert_close(found.entropy, wanted.entropy)
    (found.entropy.sum() + found.logprobs.sum()).backward()
    assert masked.grad.isfinite().all()
    assert not masked.grad[:, -1].any()


def test_a_candidate_outside_of_the_vocabulary_adds_nothing():
    logits = torch.randn(2, 4).requires_grad_()
    candidates = torch.tensor([[1, 4], [9, 0]])
    found = compute_token_logprobs(logits, torch.tensor([3, 3]), candidate_ids=candidates).candidate_logprobs
    expected = logits.detach().log_softmax(-1)
    assert found[0].tolist() == [pytest.approx(float(expected[0, 1])), -float("inf")]
    assert found[1].tolist() == [-float("inf"), pytest.approx(float(expected[1, 0]))]
    found[found.isfinite()].sum().backward()
    wanted = torch.zeros(2, 4)
    wanted[0, 1] = wanted[1, 0] = 1.0
    torch.testing.assert_close(logits.grad, wanted - expected.exp())


def test_an_entropy_that_is_only_reported_has_no_backward_pass():
    """The largest tensors of a backward pass are as many with and without the entropy."""
    ids = torch.zeros(64, dtype=torch.int64)

    def count(entropy):
        logits = torch.randn(64, 100).requires_grad_()
        found = compute_token_logprobs(logits, ids, entropy=entropy)
        with CountLargeResults(logits.numel()) as counter:
            found.logprobs.sum().backward()
        return counter.number

    assert count(True) == count(False)


class CountLargeResults(TorchDispatchMode):
    def __init__(self, numel):
        super().__init__()
        self.numel, self.number = numel, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.number += isinstance(result, torch.Tensor) and result.numel() >= self.numel
        return result
