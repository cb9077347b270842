"""The function that computes attention: what it may leave out, and packed rows in the one that is made for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM
from transformers.integrations.flex_attention import WrappedFlexAttention

from hf_engine import TrainConfig, derive_shape, load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.models.attention import choose_attention, keep_cap
from hf_engine.models.causal_lm import load_causal_lm
from hf_engine.testing import write_tiny_family
from hf_engine.testing._cases import build_batch, rows_of
from hf_protocols import ParallelSpec, Topology
from hf_protocols.errors import BackendError, ConfigError

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=4096)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def build(model, **changes):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    return load_train_backend("fsdp").build(model, topology=topology, config=replace(CONFIG, **changes))


def load(tmp_path, family, **config):
    return AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path / family, family, **config))


@pytest.mark.parametrize(
    ("family", "keeps"), [("gemma2", True), ("gpt_oss", True), ("olmo2", False), ("gemma3_text", False)]
)
def test_shapes_say_which_families_keep_scores(tmp_path, family, keeps):
    """Those whose loaded model has no fused function."""
    directory = write_tiny_family(tmp_path / family, family)
    model, *_ = load_causal_lm(directory, torch.float32)
    assert (function_of(model) == "eager") == keeps
    assert derive_shape(read_model_directory(directory)).keeps_scores == keeps


def function_of(model):
    return model.config.get_text_config()._attn_implementation


def compare_with_flex(model):
    """Log-probs of packed rows by FlexAttention, uncompiled, are those of rows apart by transformers' choice."""
    batch = build_batch(6, vocab_size=64)
    prompts = rows_of(batch["prompt_ids"])
    batch["prompt_ids"] = torch.nested.nested_tensor([prompts[row // 3] for row in range(6)], layout=torch.jagged)
    apart, packed = (build(model, shared_prompts=each) for each in (False, True))
    choose_attention(packed._model, "flex_attention", GPU)
    lengths = set()

    def attend(query, *args, **options):
        lengths.add(query.shape[2])
        return flex_attention(query, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WrappedFlexAttention, "__call__", lambda _: attend)
        found = packed.compute_logprobs(batch)["logprobs"].values()
    longest = max(map(len, prompts[:2])) + max(map(len, rows_of(batch["response_ids"])))
    assert lengths and min(lengths) > longest
    expected = apart.compute_logprobs(batch)["logprobs"].values()
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gemma2", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("llama", "mistral", "gemma3_text", "deepseek_v3")),
    ],
)
def test_packed_rows_by_flex_attention_equal_rows_apart(ranks1, tmp_path, family):
    """Full and sliding windows, a cap on logits, and keys of another size than values."""
    ranks1.run(compare_with_flex, write_tiny_family(tmp_path, family))


def score_with(model, function):
    backend = build(model, attn_implementation=function)
    return backend.compute_logprobs(build_batch(4, vocab_size=64))["logprobs"].values()


def compare_functions(model):
    eager, sdpa = (score_with(model, function) for function in ("eager", "sdpa"))
    assert not eager.equal(sdpa)
    assert float((eager - sdpa).abs().max()) < 1e-5


def test_the_function_that_is_asked_for_is_used(ranks1, tmp_path):
    ranks1.run(compare_functions, write_tiny_family(tmp_path, "llama"))


def test_auto_keeps_what_a_function_would_leave_out(tmp_path):
    capped, other = load(tmp_path, "gemma2"), load(tmp_path, "llama")
    assert function_of(capped) == function_of(other) == "sdpa"
    for model in (capped, other):
        keep_cap(model)
        choose_attention(model, "auto", GPU)
    assert (function_of(capped), function_of(other)) == ("eager", "sdpa")


@pytest.mark.parametrize(
    ("family", "function", "device", "message"),
    [
        ("gemma2", "sdpa", GPU, "attn_implementation='sdpa': a Gemma2ForCausalLM has attn_logit_softcapping"),
        ("llama", "flex_attention", CPU, "torch's function has no backward pass on a CPU. Use 'auto'"),
        ("gpt2", "flex_attention", GPU, "transformers does not have it for a GPT2LMHeadModel. Use 'auto'"),
        ("falcon", "flex_attention", GPU, "transformers does not have it for a FalconForCausalLM. Use 'auto'"),
        ("gpt_oss", "sdpa", GPU, "transformers does not have it for a GptOssForCausalLM. Use 'auto'"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(tmp_path, family, function, device, message):
    with pytest.raises(BackendError, match=message):
        choose_attention(load(tmp_path, family), function, device)


def test_an_unknown_function_is_refused():
    with pytest.raises(ConfigError, match=r"attn_implementation='flash'\. Use auto or eager or sdpa or flex_attention"):
        replace(CONFIG, attn_implementation="flash")
