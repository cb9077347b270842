"""Training and generation inside a program's `inference_mode()` and `no_grad()`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_protocols import GenerationSpec, ParallelSpec, Topology

STAGES = ("build", "generate", "score", "train", "step", "reload", "load")
BLOCKS = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
VOCAB_SIZE = 63
"""An odd number: of two ranks one holds padding."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))


def loss(outputs, batch):
    return -(outputs["logprobs"] * batch["response_mask"]).sum(), {}


def train_twice(kind, model, sizes, name, *inside):
    """Results of two iterations, each with these stages inside the program's block."""
    topology = Topology(ParallelSpec(**sizes), GenerationSpec())
    rows = range(dist.get_rank() if "dp_size" in sizes else 0, 4, sizes.get("dp_size", 1))
    found = []
    with BLOCKS[name]() if "build" in inside[0] else nullcontext():
        train = load_train_backend(kind).build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
        engine = HybridEngine(train, load_rollout_backend("transformers").build(model, topology=topology), topology)
    for seed, stages in enumerate(inside):
        block = {stage: BLOCKS[name] if stage in stages else nullcontext for stage in STAGES}
        prompts = build_prompts(2, vocab_size=VOCAB_SIZE, seed=seed)
        prompts["row_id"] = torch.arange(2)
        with block["generate"](), engine.generation():
            drawn = engine.generate(prompts, SamplingParams(max_new_tokens=3, greedy=True))
        batch = select_rows(build_batch(4, vocab_size=VOCAB_SIZE, seed=seed), rows)
        for _ in range(2):
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
        with block["load"]():
            train.load_hf(model)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("fsdp", {}), ("fsdp", {"dp_size": 2}), ("megatron", {"dp_size": 2}), ("megatron", {"tp_size": 2})],
    ids=["fsdp", "fsdp-dp2", "megatron-dp2", "megatron-tp2"],
)
def test_a_programs_block_changes_no_result(ranks1, ranks2, model, kind, sizes):
    run = partial((ranks2 if sizes else ranks1).run, train_twice, kind, model, sizes)
    plain = run("no_grad", (), ())
    assert run("no_grad", STAGES, STAGES) == plain
    # What one iteration leaves must be of use in the other.
    for first, second in ((STAGES, ()), ((), STAGES), *(((stage,), ()) for stage in STAGES)):
        assert run("inference_mode", first, second) == plain, (first, second)
