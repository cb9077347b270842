"""Samples that share the keys and values of their prompt, against samples that have a copy each."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.rollout.transformers import _backend, _cache
from hf_engine.rollout.transformers._cache import (
    SHARING_FAMILIES,
    SharedPromptCache,
    SharedPromptLayer,
    StaticLayer,
    build_cache,
    prompts_shared,
)
from hf_engine.rollout.transformers._decoding import close_ranks
from hf_engine.testing import TINY_FAMILIES, write_tiny_family
from hf_protocols import GenerationSpec, ParallelSpec, Topology

PROMPTS = [7, 3, 9]
"""Tokens of each prompt."""


def build_batch(vocab_size: int) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, vocab_size, (length,), generator=generator) for length in PROMPTS]
    columns = {
        "prompt_ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "row_id": torch.arange(len(rows)),
    }
    return TensorDict(columns, batch_size=[len(rows)])


def draw(model, monkeypatch, least: int):
    """Samples, and the caches that they were drawn with."""
    monkeypatch.setattr(_cache, "LEAST_SHARED_BYTES", least)
    caches = []

    def build(*arguments, **options):
        caches.append(build_cache(*arguments, **options))
        return caches[-1]

    monkeypatch.setattr(_backend, "build_cache", build)
    backend = load_rollout_backend("transformers").build(model, topology=Topology(ParallelSpec(), GenerationSpec()))
    # Half of all tokens end a sample, so that groups lose some of theirs, and some all.
    stops = tuple(range(0, 64, 2))
    sampling = SamplingParams(n=5, max_new_tokens=8, min_new_tokens=1, stop_token_ids=stops, seed=3)
    found = backend.generate(build_batch(64), sampling)
    backend.close()
    return found, caches


@pytest.mark.parametrize(
    ("family", "keys"), [*((name, {}) for name in sorted(TINY_FAMILIES)), ("mistral", {"sliding_window": None})]
)
def test_samples_are_those_of_separate_copies(tmp_path, monkeypatch, family, keys):
    """Log-probs to float32 rounding; a family that is not listed, or has windows, has copies in any case."""
    model = write_tiny_family(tmp_path, family, **keys)
    config = AutoConfig.from_pretrained(model)
    model_type = config.get_text_config().model_type
    apart, copied = draw(model, monkeypatch, 1_000_000_000)
    together, shared = draw(model, monkeypatch, 1)
    sees_all = {type(layer) for layer in DynamicCache(config=config).layers} == {DynamicLayer}
    assert [type(each) is SharedPromptCache for each in shared] == [model_type in SHARING_FAMILIES and sees_all]
    assert not isinstance(copied[0], SharedPromptCache)
    assert torch.equal(together["response_ids"].values(), apart["response_ids"].values())
    assert torch.equal(together["finish_reason"], apart["finish_reason"])
    torch.testing.assert_close(
        together["rollout_logprobs"].values(), apart["rollout_logprobs"].values(), rtol=1e-5, atol=1e-5
    )
    lengths = apart["response_ids"].offsets().diff()
    assert len(lengths.unique()) > 1, "samples end at different tokens"


def test_every_listed_family_is_tested(tmp_path):
    types = {
        AutoConfig.from_pretrained(write_tiny_family(tmp_path / name, name)).get_text_config().model_type
        for name in TINY_FAMILIES
    }
    assert types >= SHARING_FAMILIES


def test_few_shared_bytes_and_16_bits_have_copies(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, "llama"), dtype=torch.float32)
    least = _cache.LEAST_SHARED_BYTES * model.config.num_hidden_layers
    for shared, is_shared in ((least, True), (least - 1, False), (0, False)):
        cache = build_cache(model, 80, shared_bytes=shared)
        assert isinstance(cache, SharedPromptCache) is is_shared
        assert isinstance(cache, DynamicCache)
    assert not isinstance(build_cache(model.bfloat16(), 80, shared_bytes=least), SharedPromptCache)


def test_bytes_count_each_sample_after_the_first_of_a_prompt(tmp_path, monkeypatch):
    """Two prompts, the longer one of 9 tokens, four samples each: six copies in three layers of two heads of 8."""
    path = write_tiny_family(tmp_path, "llama", num_hidden_layers=3, num_key_value_heads=2, head_dim=8)
    found = []

    def build(model, capacity, *, shared_bytes):
        found.append(shared_bytes)
        return build_cache(model, capacity, shared_bytes=shared_bytes)

    monkeypatch.setattr(_backend, "build_cache", build)
    backend = load_rollout_backend("transformers").build(path, topology=Topology(ParallelSpec(), GenerationSpec()))
    rows = [torch.arange(4), torch.arange(9)]
    columns = {"prompt_ids": torch.nested.nested_tensor(rows, layout=torch.jagged), "row_id": torch.arange(2)}
    for n in (4, 1):
        backend.generate(TensorDict(columns, batch_size=[2]), SamplingParams(n=n, max_new_tokens=2))
    backend.close()
    assert found == [2 * 3 * 9 * 3 * 2 * 2 * 8 * 4, 0]


def test_another_model_keeps_its_attention_meanwhile(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, "llama"), dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        cache = build_cache(model, 100, shared_bytes=1_000_000_000)
        assert isinstance(cache, SharedPromptCache)
        with prompts_shared(cache):
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_stay_are_those_that_run_and_few_move(seed):
    generator = torch.Generator().manual_seed(seed)
    alive = torch.rand(12, generator=generator) < torch.rand(1, generator=generator)
    order = close_ranks(alive)
    assert sorted(order.tolist()) == alive.nonzero().flatten().tolist()
    count = len(order)
    moved = [row for place, row in enumerate(order.tolist()) if row != place]
    assert len(moved) == int((~alive[:count]).sum()), "no more than there are free places"


@pytest.mark.parametrize("kind", [StaticLayer, SharedPromptLayer])
def test_buffers_hold_the_rows_that_were_kept(kind):
    """Rows of samples with two tokens of their own, chosen twice, against indexing what was written."""
    layer = kind(8)
    prompt = torch.randn(2, 3, 4, 5)  # two prompts of four tokens
    layer.update(prompt, -prompt)
    layer.batch_repeat_interleave(4)
    drawn = torch.randn(8, 3, 2, 5)
    keys, values = layer.update(drawn, -drawn)
    expected = drawn if kind is SharedPromptLayer else torch.cat([prompt.repeat_interleave(4, 0), drawn], 2)
    assert torch.equal(keys, expected)
    for indices in (torch.tensor([0, 7, 2, 3, 6, 5]), torch.tensor([1, 3, 4])):
        layer.batch_select_indices(indices)
        expected = expected[indices]
        assert torch.equal(layer.keys, expected) and torch.equal(layer.values, -expected)
    step = torch.randn(3, 3, 1, 5)
    keys, values = layer.update(step, -step)
    assert torch.equal(keys, torch.cat([expected, step], 2)) and torch.equal(values, -keys)
