"""Training and generation inside a program's `inference_mode()` and `no_grad()`."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_protocols import GenerationSpec, ParallelSpec, Topology

STAGES = ("build", "generate", "score", "train", "step", "reload")
BLOCKS = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def loss(outputs, batch):
    return -(outputs["logprobs"] * batch["response_mask"]).sum(), {}


def train_twice(kind, model, name, inside):
    """Results of two steps, with these stages inside the program's block."""
    block = {stage: BLOCKS[name] if stage in inside else nullcontext for stage in STAGES}
    size, rank = dist.get_world_size(), dist.get_rank()
    topology = Topology(ParallelSpec(dp_size=size), GenerationSpec())
    found = []
    with block["build"]():
        train = load_train_backend(kind).build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
        engine = HybridEngine(train, load_rollout_backend("transformers").build(model, topology=topology), topology)
    for seed in range(2):
        prompts = build_prompts(2, vocab_size=64, seed=seed)
        prompts["row_id"] = torch.arange(2)
        with block["generate"](), engine.generation():
            drawn = engine.generate(prompts, SamplingParams(max_new_tokens=3, greedy=True))
        batch = select_rows(build_batch(4, vocab_size=64, seed=seed), range(rank, 4, size))
        with block["score"]():
            scores = train.compute_logprobs(batch)["logprobs"]
        with block["train"]():
            train.forward_backward(batch, loss, 10.0)
        with block["step"]():
            norm, _ = train.optim_step()["grad_norm"]
        with block["reload"]():
            train.offload(weights=True)
            train.reload()
        found.append((drawn["response_ids"].values().tolist(), scores.values().tolist(), norm))
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_programs_block_changes_no_result(ranks1, ranks2, model, kind):
    cases = [("no_grad", STAGES), ("inference_mode", STAGES), *(("inference_mode", (stage,)) for stage in STAGES)]
    for ranks, chosen in ((ranks1, cases), (ranks2, cases[:3])):
        plain = ranks.run(train_twice, kind, model, "no_grad", ())
        for name, stages in chosen:
            assert ranks.run(train_twice, kind, model, name, stages) == plain, (name, stages)
