"""A pass that fails on one rank ends the others at once, which say who failed and why.

The deadline of the collectives is longer than that of the run: a rank that waits for it fails the test.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_engine import TrainConfig, load_train_backend
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, ParallelSpec, Topology

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def out_of_memory(*_):
    raise MemoryError("no more memory")


def fail_in_backward(number, calls, module, inputs, output):
    """Lets the backward pass fail at the output of one module."""
    calls.append(module)
    if len(calls) == number:
        output.register_hook(out_of_memory)


def fail_in_forward(number, calls, module, inputs, output):
    calls.append(module)
    if len(calls) == number:
        out_of_memory()


FAILING = {"forward": fail_in_forward, "backward": fail_in_backward}


def fail_on_rank_1(failing, call, message):
    """Every rank raises: the one that fails its own error, the others one that names it."""
    calls = []
    hook = register_module_forward_hook(partial(FAILING[failing], 12, calls))
    try:
        if dist.get_rank() != 1:
            hook.remove()
            with pytest.raises(BackendError, match=message):
                call()
            return
        with pytest.raises(MemoryError, match="no more memory") as failed:
            call()
        assert "the other ranks were told" in "".join(failed.value.__notes__)
    finally:
        hook.remove()


def fail_in_a_pass(model, backend_name, sizes, shard, method, failing):
    topology = Topology(ParallelSpec.parse(sizes))
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=24, shard=shard)
    backend = load_train_backend(backend_name).build(model, topology=topology, config=config)
    dp = topology.coordinate(dist.get_rank()).dp
    batch = select_rows(build_batch(16, vocab_size=64), range(8 * dp, 8 * dp + 8))
    backend.train_step(batch, negative_logprobs, 10.0)
    before = {name: [part.clone() for part in parts] for name, parts in as_parts(backend.local_weights()).items()}
    calls = {
        "train_step": partial(backend.train_step, batch, negative_logprobs, 10.0),
        "scoring": partial(backend.compute_logprobs, batch),
    }
    reason = r"MemoryError: no more memory"
    outcome = {"train_step": "no rank took optimizer step 2", "scoring": "no rank has its outputs"}[method]
    ended = f"rank {dist.get_rank()}: rank 1 failed: {reason}; {outcome}(.|\n)*start the ranks again"
    fail_on_rank_1(failing, calls[method], f"{method} ended on {ended}")
    assert backend.optimizer_steps == 1
    for name, parts in as_parts(backend.local_weights()).items():
        assert all(torch.equal(part, old) for part, old in zip(parts, before[name], strict=True)), name
    with pytest.raises(BackendError, match=f"scoring ended on {ended}"):
        backend.compute_logprobs(batch)
    backend.close()
    return True


@pytest.mark.parametrize(
    ("backend", "sizes", "shard", "method", "failing"),
    [
        ("fsdp", "1-1-2", "layer", "train_step", "forward"),
        ("fsdp", "1-1-2", "layer", "train_step", "backward"),
        ("fsdp", "1-1-2", "root", "train_step", "backward"),
        ("fsdp", "1-1-2", "layer", "scoring", "forward"),
        ("megatron", "1-2-1", "root", "train_step", "forward"),
        ("megatron", "1-2-1", "root", "train_step", "backward"),
        ("megatron", "2-1-1", "root", "train_step", "forward"),
        ("megatron", "2-1-1", "root", "train_step", "backward"),
        ("megatron", "1-1-2", "root", "train_step", "backward"),
        ("megatron", "2-1-1", "root", "scoring", "forward"),
        pytest.param("megatron", "2-2-1", "root", "train_step", "forward", marks=pytest.mark.slow),
        pytest.param("megatron", "2-2-1", "root", "scoring", "forward", marks=pytest.mark.slow),
        pytest.param("megatron", "1-2-2", "root", "train_step", "backward", marks=pytest.mark.slow),
    ],
)
def test_a_pass_that_fails_on_one_rank_ends_all(tmp_path, backend, sizes, shard, method, failing):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    world_size = Topology(ParallelSpec.parse(sizes)).world_size
    with LocalRanks(world_size, timeout_s=600) as ranks:
        arguments = (model, backend, sizes, shard, method, failing)
        assert ranks.run(fail_in_a_pass, *arguments, deadline_s=100.0) == [True] * world_size


def step_and_score(backend, batch):
    backend.train_step(batch, negative_logprobs, 10.0)
    backend.compute_logprobs(batch)


def fail_in_the_step(model, backend_name, sizes):
    """Rank 1 fails where others may be through with theirs, which then learn it from what they call next."""
    topology = Topology(ParallelSpec.parse(sizes))
    config = TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(model, topology=topology, config=config)
    batch = build_batch(4, vocab_size=64)
    hook = register_optimizer_step_pre_hook(out_of_memory) if dist.get_rank() == 1 else None
    reason = "rank 1 failed: MemoryError: no more memory; other ranks may have taken optimizer step 1"
    with pytest.raises((MemoryError, BackendError), match=reason if hook is None else "no more memory"):
        step_and_score(backend, batch)
    if hook is not None:
        hook.remove()
    backend.close()
    return True


@pytest.mark.parametrize(("backend", "sizes"), [("fsdp", "1-1-2"), ("megatron", "1-1-2")])
def test_a_step_that_fails_on_one_rank_ends_all(tmp_path, backend, sizes):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    with LocalRanks(2, timeout_s=600) as ranks:
        assert ranks.run(fail_in_the_step, model, backend, sizes, deadline_s=100.0) == [True, True]
