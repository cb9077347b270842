"""Generation in another dtype than training's: the shards of float32 masters are cast on their way to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_testing.train_steps import train_step
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

VOCAB_SIZE = 64
ONE = Topology(ParallelSpec(), GenerationSpec())
ENGINES = [
    pytest.param("transformers", {}),
    pytest.param("vllm", {"cache_bytes": 16 << 20}, marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
    pytest.param(
        "sglang", {"cache_bytes": 4 << 20, "max_rows": 64}, marks=[pytest.mark.sglang, pytest.mark.timeout(900)]
    ),
]


def generate_in_bfloat16(name, options, model, directory):
    """The engine starts from other weights than those that it generates from."""
    train = load_train_backend("fsdp").build(model, topology=ONE, config=TrainConfig(learning_rate=3e-2))
    rollout = load_rollout_backend(name).build(model, topology=ONE, dtype="bfloat16", **options)
    engine = HybridEngine(train, rollout, ONE)
    assert (engine.plan.source.dtype, engine.plan.target.dtype) == ("float32", "bfloat16")
    train_step(train, ONE, vocab_size=VOCAB_SIZE)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    with engine.generation():
        responses = engine.generate(prompts, SamplingParams(max_new_tokens=8))
    train.export_hf(directory)
    engine.close()
    return [
        (prompt.tolist(), ids.tolist(), logprobs.tolist())
        for prompt, ids, logprobs in zip(
            rows_of(prompts["prompt_ids"]),
            rows_of(responses["response_ids"]),
            rows_of(responses["rollout_logprobs"]),
            strict=True,
        )
    ]


def mean_gap(samples, directory, dtype):
    """Between the engine's log-probs and those of whole forward passes of transformers in that dtype."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    gaps = []
    for prompt, ids, logprobs in samples:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps.append((torch.tensor(logprobs) - wanted).abs())
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_an_engine_in_bfloat16_generates_from_float32_masters(ranks1, name, options, tmp_path):
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=2, tie_embeddings=False)
    (samples,) = ranks1.run(generate_in_bfloat16, name, options, model, tmp_path / "trained", deadline_s=600)
    # The bounds are those that `logprob_check` says of two engines in bfloat16, and of other weights.
    assert mean_gap(samples, tmp_path / "trained", torch.bfloat16) < 0.05
    assert mean_gap(samples, tmp_path / "trained", torch.float32) > 1e-3, "this was not computed in bfloat16"
    assert mean_gap(samples, model, torch.bfloat16) > 0.5, "the step moved nothing"


def test_a_dtype_that_no_engine_has_is_refused():
    with pytest.raises(BackendError, match=r"dtype='bf16' is not one of 'float32', 'bfloat16', 'float16'"):
        load_rollout_backend("transformers").build(Path("absent"), topology=ONE, dtype="bf16")
