"""Gradients wait for `optim_step` through what a loop may do between; the conformance suite has their other laws."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_engine.training import offload
from hf_protocols import BackendError, NonFiniteLossError, ParallelSpec, Topology

VOCAB_SIZE = 128  # megatron pads to a multiple of 128


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def step_after_offloading(backend_name, model):
    """The weights after one step on two batches, with everything offloaded between its calls, and without."""
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40)
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    first, second = (select_rows(batch, range(start + 2 * dist.get_rank(), 6, 4)) for start in (0, 1))
    found = []
    for offloads in (True, False):
        backend = load_train_backend(backend_name).build(model, topology=topology, config=config)
        backend.forward_backward(first, negative_logprobs, 10.0)
        if offloads:
            offload_all(backend, first)
        backend.train_step(second, negative_logprobs, 10.0)
        assert backend.optimizer_steps == 1 and backend.weight_changes == 1
        found.append(gather_weights(backend, topology))
    backend.forward_backward(first, negative_logprobs, 10.0)
    backend.load_hf(model)
    with pytest.raises(BackendError, match=r"optim_step: no gradients .* Call forward_backward first"):
        backend.optim_step()
    return found


def skip_steps(backend_name, model, directory):
    """Metrics of steps that are refused on all ranks for the loss of one, with the state before and after."""
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    options = {"learning_rate": 1e-2, "micro_batch_tokens": 40, "explode_above": 1e4}
    batch, build = build_batch(6, vocab_size=VOCAB_SIZE), load_train_backend(backend_name).build
    rows = select_rows(batch, range(dist.get_rank(), 6, 2))

    def scaled(factor):
        def loss_fn(outputs, micro_batch):
            loss, metrics = negative_logprobs(outputs, micro_batch)
            return loss * (factor if dist.get_rank() == 1 else 1.0), metrics

        return loss_fn

    backend = build(model, topology=topology, config=TrainConfig(**options, on_nonfinite="skip"))
    found = [backend.train_step(rows, scaled(1.0), 10.0)]
    backend.save_state(directory / "before")
    found += [backend.train_step(rows, scaled(factor), 10.0) for factor in (math.nan, math.inf, 1e6)]
    backend.save_state(directory / "after")
    found.append(backend.train_step(rows, scaled(1.0), 10.0))
    assert backend.optimizer_steps == backend.weight_changes == 2
    stopping = build(model, topology=topology, config=TrainConfig(**options))
    for factor, reason in ((math.nan, "its loss is nan, .* not finite"), (1e6, "above training.explode_above = 10000")):
        with pytest.raises(NonFiniteLossError, match=reason):
            stopping.train_step(rows, scaled(factor), 10.0)
    assert stopping.weight_changes == 0
    return found


def offload_all(backend, batch):
    """Memory of the CPU stands for a device's."""
    is_on_host, offload._is_on_host = offload._is_on_host, lambda storage: False
    try:
        assert backend.offload()
        backend.compute_logprobs(batch)
        assert backend.offload(weights=True)
        backend.reload()
    finally:
        offload._is_on_host = is_on_host


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model", vocab_size=VOCAB_SIZE, tie_embeddings=False)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_gradients_come_back_from_the_host_bit_by_bit(ranks2, model, backend):
    around, straight = ranks2.run(step_after_offloading, backend, model)[0]
    changed = [name for name, tensor in straight.items() if not torch.equal(around[name], tensor)]
    assert not changed, changed


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_step_that_is_skipped_changes_no_bit(ranks2, model, tmp_path, backend):
    for first, *skipped, last in ranks2.run(skip_steps, backend, model, tmp_path):
        assert skipped == [{"skipped_nonfinite": (1.0, 1.0)}] * 3
        assert first["skipped_nonfinite"] == last["skipped_nonfinite"] == (0.0, 1.0)
        assert math.isfinite(first["grad_norm"][0] + last["grad_norm"][0])
    before, after = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("before", "after"))
    assert len(before) == 9 and before.keys() == after.keys()
    described = [json.loads(files.pop("state.json").read_text()) for files in (before, after)]
    assert described[0] == described[1]
    assert all(path.read_bytes() == after[name].read_bytes() for name, path in before.items())
