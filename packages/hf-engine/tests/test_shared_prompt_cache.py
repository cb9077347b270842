"""Samples that share the keys and values of their prompt, against samples that have a copy each."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.rollout.transformers import _backend, _cache
from hf_engine.rollout.transformers._cache import SHARING_FAMILIES, SharedPromptCache, build_cache, prompts_shared
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
    monkeypatch.setattr(_cache, "LEAST_PROMPT", least)
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
    apart, copied = draw(model, monkeypatch, 1_000_000)
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


def test_short_prompts_one_sample_and_16_bits_have_copies(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, "llama"), dtype=torch.float32)
    for width, samples, is_shared in ((64, 2, True), (63, 2, False), (64, 1, False)):
        cache = build_cache(model, 80, width=width, num_samples=samples)
        assert isinstance(cache, SharedPromptCache) is is_shared
        assert isinstance(cache, DynamicCache)
    assert not isinstance(build_cache(model.bfloat16(), 80, width=64, num_samples=2), SharedPromptCache)


def test_another_model_keeps_its_attention_meanwhile(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, "llama"), dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        cache = build_cache(model, 100, width=64, num_samples=2)
        assert isinstance(cache, SharedPromptCache)
        with prompts_shared(cache):
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
