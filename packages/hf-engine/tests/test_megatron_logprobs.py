from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VOCAB_SIZE, PADDED_ROWS, WIDTH = 37, 48, 8  # two ranks hold 24 and 13 real rows
NUM_CANDIDATES = 4


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return results


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, WIDTH, generator=generator)
    weight = torch.randn(PADDED_ROWS, WIDTH, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE, (3, 5), generator=generator)
    factors = torch.randn(2 + NUM_CANDIDATES, 3, 5, generator=generator)
    candidates = torch.randint(0, VOCAB_SIZE, (3, 5, NUM_CANDIDATES), generator=generator)
    candidates[..., 0] = ids  # the token itself may be among them, and one of them twice
    return hidden, weight, ids, factors, candidates


def compute(chunk_elements, entropy, temperature):
    """Values and gradients from this rank's rows, and the largest tensor on the way."""
    from hf_engine.training.megatron import _logprobs

    usual, _logprobs._CHUNK_ELEMENTS = _logprobs._CHUNK_ELEMENTS, chunk_elements
    hidden, weight, ids, factors, candidates = inputs()
    rows = PADDED_ROWS // dist.get_world_size()
    own = weight[dist.get_rank() * rows :][:rows].clone().requires_grad_()
    hidden.requires_grad_()
    with LargestTensor() as largest:
        found = _logprobs.compute_vocab_parallel_logprobs(
            hidden,
            own,
            ids,
            group=dist.distributed_c10d._get_default_group(),
            vocab_size=VOCAB_SIZE,
            temperature=temperature,
            entropy=entropy,
            candidate_ids=candidates if entropy else None,
        )
        values = flatten(*found)
        sum((factor * value).sum() for factor, value in zip(factors, values, strict=False)).backward()
    _logprobs._CHUNK_ELEMENTS = usual
    return [value.detach() for value in values], hidden.grad, own.grad, largest.numel


def flatten(logprobs, entropies, candidates):
    """The values [3, 5] that there are, one after the other."""
    return [
        logprobs,
        *([] if entropies is None else [entropies]),
        *([] if candidates is None else candidates.unbind(-1)),
    ]


def expected(entropy, temperature):
    hidden, weight, ids, factors, candidates = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    distributions = torch.distributions.Categorical(logits=hidden @ weight[:VOCAB_SIZE].T / temperature)
    more = [distributions.log_prob(each) for each in candidates.unbind(-1)]
    values = [distributions.log_prob(ids), *([distributions.entropy(), *more] if entropy else ())]
    sum((factor * value).sum() for factor, value in zip(factors, values, strict=False)).backward()
    return [value.detach() for value in values], hidden.grad, weight.grad


def check(ranks, entropy, temperature, chunk_elements):
    values, grad_hidden, grad_weight = expected(entropy, temperature)
    found = ranks.run(compute, chunk_elements, entropy, temperature)
    for own_values, own_grad_hidden, _, _ in found:
        torch.testing.assert_close(own_values, values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own_grad_hidden, grad_hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([grad for *_, grad, _ in found]), grad_weight, atol=1e-5, rtol=1e-5)
    return max(numel for *_, numel in found)


def test_logprobs_and_entropies_match_whole_vocabulary_gradients(ranks1, ranks2):
    for ranks in (ranks1, ranks2):
        check(ranks, entropy=True, temperature=1.0, chunk_elements=1 << 20)
        check(ranks, entropy=False, temperature=0.7, chunk_elements=1 << 20)


def test_logits_of_all_tokens_are_never_held(ranks1, ranks2):
    num_tokens = 15
    for ranks, rows in ((ranks1, PADDED_ROWS), (ranks2, PADDED_ROWS // 2)):
        whole = check(ranks, entropy=True, temperature=0.7, chunk_elements=1 << 20)
        chunked = check(ranks, entropy=True, temperature=0.7, chunk_elements=2 * rows)
        assert whole >= num_tokens * min(rows, VOCAB_SIZE)
        assert chunked <= PADDED_ROWS * WIDTH  # the weights themselves, not 2 x rows of logits


def find_top(k, chunk_elements):
    from hf_engine.training.megatron import _logprobs

    usual, _logprobs._CHUNK_ELEMENTS = _logprobs._CHUNK_ELEMENTS, chunk_elements
    hidden, weight, *_ = inputs()
    rows = PADDED_ROWS // dist.get_world_size()
    found = _logprobs.find_vocab_parallel_top_ids(
        hidden,
        weight[dist.get_rank() * rows :][:rows],
        k,
        group=dist.distributed_c10d._get_default_group(),
        vocab_size=VOCAB_SIZE,
    )
    _logprobs._CHUNK_ELEMENTS = usual
    return found


@pytest.mark.parametrize("k", [1, 5, 30, VOCAB_SIZE])
def test_the_likeliest_tokens_are_those_of_a_whole_vocabulary(ranks1, ranks2, k):
    """With k = 30 a rank has fewer rows than are asked for."""
    hidden, weight, *_ = inputs()
    wanted = (hidden @ weight[:VOCAB_SIZE].T).topk(k).indices
    for ranks in (ranks1, ranks2):
        for chunk_elements in (1, 1 << 20):
            for found in ranks.run(find_top, k, chunk_elements):
                assert torch.equal(found, wanted)


def test_a_candidate_outside_of_the_vocabulary_adds_nothing(ranks2):
    """Its id may be that of a row of padding."""
    for found in ranks2.run(score_strangers):
        assert found.isneginf().tolist() == [[[False, True, True]] * 5] * 3


def score_strangers():
    from hf_engine.training.megatron import _logprobs

    hidden, weight, ids, *_ = inputs()
    rows = PADDED_ROWS // dist.get_world_size()
    candidates = torch.tensor([VOCAB_SIZE - 1, VOCAB_SIZE, PADDED_ROWS + 7]).expand(3, 5, 3)
    return _logprobs.compute_vocab_parallel_logprobs(
        hidden,
        weight[dist.get_rank() * rows :][:rows],
        ids,
        group=dist.distributed_c10d._get_default_group(),
        vocab_size=VOCAB_SIZE,
        candidate_ids=candidates,
    ).candidate_logprobs


def run_python(source):
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)


def test_the_error_of_a_missing_megatron_has_the_install_command():
    finished = run_python(
        "import sys; sys.modules['megatron'] = None\n"
        "from hf_engine import available_train_backends, load_train_backend\n"
        "assert 'megatron' in available_train_backends()\n"
        "assert not [name for name in sys.modules if name.startswith('hf_engine.training.megatron')]\n"
        "load_train_backend('megatron')"
    )
    last = finished.stderr.strip().splitlines()[-1]
    assert "BackendUnavailableError: backend 'megatron' needs megatron" in last
    assert 'pip install "megatron-core' in last


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the sources stay as they are")
def test_megatron_imported_before_the_backend_is_an_error():
    finished = run_python(
        "import megatron.core\nfrom hf_engine import load_train_backend\nload_train_backend('megatron')"
    )
    assert "BackendError: megatron.core was imported in this process before the megatron backend" in finished.stderr
