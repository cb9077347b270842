"""What both training backends refuse: losses without gradient, batches without rows, numbers out of range."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, BatchError, ParallelSpec, Topology


def topology_of_all_ranks():
    return Topology(ParallelSpec(dp_size=dist.get_world_size()))


def local_rows(num_rows):
    batch = build_batch(num_rows, vocab_size=64)
    return select_rows(batch, range(dist.get_rank(), num_rows, dist.get_world_size()))


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def train_on_losses_without_gradient(model, backend_name):
    """They are refused with what is wrong, and the next step is as if they had not been."""
    topology, batch = topology_of_all_ranks(), local_rows(4)
    config = TrainConfig(learning_rate=1e-2)
    load = load_train_backend(backend_name)
    straight, refusing = (load.build(model, topology=topology, config=config) for _ in range(2))
    straight.train_step(batch, negative_logprobs, 10.0)
    for wrong, message in (
        (lambda outputs, _: (outputs["logprobs"].sum().detach(), {}), "a loss_sum without gradient"),
        (lambda outputs, _: (outputs["logprobs"], {}), r"gave a tensor of shape \(.*\) as loss_sum"),
        (lambda outputs, _: (3.0, {}), "gave 3.0 as loss_sum"),
    ):
        with pytest.raises(BackendError, match=message):
            refusing.train_step(batch, wrong, 10.0)
    refusing.train_step(batch, negative_logprobs, 10.0)
    assert refusing.optimizer_steps == 1
    expected, found = (gather_weights(backend, topology) for backend in (straight, refusing))
    straight.close()
    refusing.close()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_loss_without_gradient_is_refused(ranks2, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(train_on_losses_without_gradient, model, backend) == [[], []]


def use_batches_without_rows(model, backend_name):
    """Nothing to score is no error; nothing to learn from is one, on every rank, and the next step is taken."""
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    batch = local_rows(4)
    scored = backend.compute_logprobs(batch[:0], entropy=True)
    assert sorted(scored.keys()) == ["entropy", "logprobs"]
    assert [len(scored), *(len(column.values()) for column in scored.values())] == [0, 0, 0]
    with pytest.raises(BatchError, match="no rows on any data-parallel rank"):
        backend.train_step(batch[:0], negative_logprobs, 10.0)
    assert backend.optimizer_steps == 0
    backend.train_step(batch if dist.get_rank() else batch[:0], negative_logprobs, 10.0)
    steps = backend.optimizer_steps
    backend.close()
    return steps


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_batches_without_rows(ranks2, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(use_batches_without_rows, model, backend) == [1, 1]


def pass_numbers_out_of_range(model, backend_name):
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    batch = local_rows(4)
    for wrong in (-1.0, "x", float("nan")):
        with pytest.raises(BackendError, match=f"learning_rate={wrong!r} must be a finite number"):
            backend.set_learning_rate(wrong)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BackendError, match=f"temperature={wrong!r} must be a finite number above 0"):
            backend.compute_logprobs(batch, temperature=wrong)
        with pytest.raises(BackendError, match=f"temperature={wrong!r} must be a finite number above 0"):
            backend.train_step(batch, negative_logprobs, 10.0, temperature=wrong)
    with pytest.raises(BackendError, match="denominator='10' must be a finite number above 0"):
        backend.train_step(batch, negative_logprobs, "10")
    backend.set_learning_rate(0.0)
    metrics = backend.train_step(batch, negative_logprobs, 10.0)
    backend.close()
    return metrics["learning_rate"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_numbers_out_of_range_are_named(ranks1, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks1.run(pass_numbers_out_of_range, model, backend) == [(0.0, 1.0)]
