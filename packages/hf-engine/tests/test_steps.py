"""Gradients wait for `optim_step` through what a loop may do between; the conformance suite has their other laws."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.backends import _offload
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, ParallelSpec, Topology

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


def offload_all(backend, batch):
    """Memory of the CPU stands for a device's."""
    is_on_host, _offload._is_on_host = _offload._is_on_host, lambda storage: False
    try:
        assert backend.offload()
        backend.compute_logprobs(batch)
        assert backend.offload(weights=True)
        backend.reload()
    finally:
        _offload._is_on_host = is_on_host


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model", vocab_size=VOCAB_SIZE, tie_embeddings=False)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_gradients_come_back_from_the_host_bit_by_bit(ranks2, model, backend):
    around, straight = ranks2.run(step_after_offloading, backend, model)[0]
    changed = [name for name, tensor in straight.items() if not torch.equal(around[name], tensor)]
    assert not changed, changed
