"""One rank of a replica is given something else, with real engines: an error on all, and then all generate."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine_testing.train_steps import check_greedy_samples, train_step
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_prompts
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

pytestmark = pytest.mark.timeout(900)

VOCAB_SIZE, GREEDY = 64, SamplingParams(max_new_tokens=6, greedy=True)
TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
BACKENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def refuse_alone(backend, model, directory):
    """Far within the groups' deadline: mistakes that are found before the engine is asked, and then all generate."""
    rank = dist.get_rank()
    train = load_train_backend("fsdp").build(model, topology=TWO, config=TrainConfig(learning_rate=3e-2))
    rollout = load_rollout_backend(backend).build(model, topology=TWO, cache_bytes=4 << 20)
    engine = HybridEngine(train, rollout, TWO, training_weights="offload", bucket_bytes=8 << 10)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    train_step(train, TWO, vocab_size=VOCAB_SIZE)
    other = build_prompts(4, vocab_size=VOCAB_SIZE)
    other["row_id"] += 4
    shorter = SamplingParams(max_new_tokens=3, greedy=True)
    with engine.generation():
        wrong = SamplingParams(max_new_tokens=10**6) if rank else GREEDY
        with pytest.raises(BackendError, match="max_new_tokens=1000000"):
            engine.generate(prompts, wrong)
        for batch, sampling in ((prompts[:3], GREEDY), (other, GREEDY), (prompts, shorter)):
            with pytest.raises(BackendError, match=r"ranks \[1\] were given something else"):
                engine.generate(*((batch, sampling) if rank else (prompts, GREEDY)))
        responses = engine.generate(prompts, GREEDY)
    train.export_hf(directory / "exported")
    check_greedy_samples(train, AutoModelForCausalLM.from_pretrained(directory / "exported"), prompts, responses)
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_is_given_is_an_error_on_its_whole_replica(backend, model, tmp_path):
    with LocalRanks(2, timeout_s=1000) as ranks:
        ranks.run(refuse_alone, backend, model, tmp_path, deadline_s=300)
