from __future__ import annotations

import pytest
import torch

from hf_engine.backends import _token_logprobs
from hf_engine.backends._token_logprobs import compute_token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 24])
def test_logprobs_entropy_and_gradients_are_those_of_log_softmax(monkeypatch, temperature, dtype, chunk_elements):
    monkeypatch.setattr(_token_logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (torch.randn(3, 4, 11) * 4).to(dtype).requires_grad_()
    ids = torch.randint(0, 11, (3, 4))
    logprobs, entropy = compute_token_logprobs(logits, ids, temperature=temperature, entropy=True)
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
    logprobs, entropy = compute_token_logprobs(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64))
    assert entropy is None
    torch.testing.assert_close(logprobs, torch.full((1, 2), 0.25).log())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_for_the_backward_pass_is_the_logits_in_their_own_dtype(monkeypatch, dtype, entropy):
    monkeypatch.setattr(_token_logprobs, "_CHUNK_ELEMENTS", 64 * 100)
    logits = torch.randn(4, 32, 100).to(dtype).requires_grad_()
    ids = torch.randint(0, 100, (4, 32))
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_token_logprobs(logits, ids, temperature=0.7, entropy=entropy)
    assert sum(saved.values()) <= logits.nbytes + ids.nbytes + 2 * 4 * ids.numel()
