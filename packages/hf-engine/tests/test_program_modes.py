"""Training and generation inside a program's `inference_mode()` and `no_grad()`, and with its default dtype."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_engine import HybridEngine, LoraConfig, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.models.causal_lm import load_causal_lm
from hf_engine.models.lora import add_adapters
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_engine.testing._families import write_tiny_family
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

STAGES = ("build", "generate", "score", "train", "step", "reload", "load")


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


BLOCKS = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
}
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
    for name in ("no_grad", "bfloat16", "float64"):
        assert run(name, STAGES, STAGES) == plain, name
    # What one iteration leaves must be of use in the other.
    for first, second in ((STAGES, ()), ((), STAGES), *(((stage,), ()) for stage in STAGES)):
        assert run("inference_mode", first, second) == plain, (first, second)


def step_often(kind, model, dtype):
    """Sums of the weights after more steps than a bfloat16 can count."""
    topology = Topology(ParallelSpec())
    batch = build_batch(1, vocab_size=VOCAB_SIZE, seed=0)
    config = TrainConfig(learning_rate=1e-4, betas=(0.9, 0.999))
    with default_dtype(dtype):
        train = load_train_backend(kind).build(model, topology=topology, config=config)
        for _ in range(260):
            train.forward_backward(batch, loss, 10.0)
            train.optim_step()
        weights = as_parts(train.local_weights()).values()
        found = [part.double().sum().item() for parts in weights for part in parts]
    train.close()
    return found


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_programs_dtype_does_not_count_steps(ranks1, tmp_path, kind):
    model = str(write_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=1))
    plain, found = (ranks1.run(step_often, kind, model, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert found == plain


def load_with_adapters(model, block):
    with block:
        loaded = load_causal_lm(model, torch.float32).model
        add_adapters(loaded, LoraConfig(rank=2), seed=0)
    return {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}


@pytest.mark.parametrize("family", ["gptj", "xglm", "gemma2"])
def test_a_programs_defaults_change_nothing_that_is_loaded(tmp_path, family):
    model = write_tiny_family(tmp_path, family)
    plain = load_with_adapters(model, nullcontext())
    for block in (default_dtype(torch.bfloat16), default_dtype(torch.float64), torch.device("meta")):
        found = load_with_adapters(model, block)
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def build_on_meta(kind, model):
    topology = Topology(ParallelSpec(), GenerationSpec())
    if kind == "transformers":
        build = partial(load_rollout_backend(kind).build, model, topology=topology)
    else:
        build = partial(load_train_backend(kind).build, model, topology=topology, config=TrainConfig(learning_rate=1.0))
    with torch.device("meta"), pytest.raises(BackendError, match="default device is 'meta'"):
        build()


@pytest.mark.parametrize("kind", ["fsdp", "megatron", "transformers"])
def test_a_default_device_is_refused(ranks1, model, kind):
    ranks1.run(build_on_meta, kind, model)
