"""Device memory is given up and taken again, and training goes on as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_engine.training import offload
from hf_engine.training.offload import OffloadedMemory
from hf_protocols import BackendError, ParallelSpec, Topology

VOCAB_SIZE = 128  # megatron pads to a multiple of 128
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40)


def per_parameter(backend, dtype):
    """Bytes of (states, weights) per parameter of the model on two data-parallel ranks together, as documented."""
    if backend == "fsdp":
        return 8, 4  # two moments; the weights are the masters
    if dtype == "float32":
        return 2 * 4 + 8, 2 * 4  # gradients on both ranks, two moments; whole weights on both
    return 2 * 4 + 12, 2 * 2  # masters too


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model", vocab_size=VOCAB_SIZE, tie_embeddings=False)


@pytest.fixture
def device_like(monkeypatch):
    """Moves memory of the CPU as if it were a device's."""
    monkeypatch.setattr(offload, "_is_on_host", lambda storage: False)


def test_views_survive_and_hold_the_same_bits(device_like):
    whole = torch.randn(64)
    shard, other, zeros = whole[:16], torch.randn(8), torch.ones(4)
    expected = whole.clone(), other.clone()
    memory = OffloadedMemory(lambda: [other])
    assert memory.give_up(states=[shard, whole[16:]], zeros=[zeros], weights=True) == 64 * 4 + 8 * 4 + 4 * 4
    assert [t.untyped_storage().nbytes() for t in (whole, shard, other, zeros)] == [0] * 4
    assert memory.give_up(states=[shard], zeros=[zeros], weights=True) == 0
    memory.restore()
    memory.restore()
    assert torch.equal(whole, expected[0])
    assert torch.equal(shard, expected[0][:16])
    assert torch.equal(other, expected[1])
    assert not zeros.any()
    whole[3] = 7.0
    assert shard[3] == 7.0


def build(backend, model, dtype):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    config = replace(CONFIG, dtype=dtype)
    return load_train_backend(backend).build(model, topology=topology, config=config), topology


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def train_interrupted(backend_name, model, dtype, device_like):
    """Two steps with everything offloaded in between, and two without; what was freed, and the weights of both."""
    is_on_host = offload._is_on_host
    if device_like:
        offload._is_on_host = lambda storage: False
    try:
        backend, topology = build(backend_name, model, dtype)
        rows = range(dist.get_rank(), 6, dist.get_world_size())
        batch = select_rows(build_batch(6, vocab_size=VOCAB_SIZE), rows)
        backend.train_step(batch, negative_logprobs, 10.0)
        scored = backend.compute_logprobs(batch)["logprobs"].values()
        weights = [p for t in backend.local_weights().values() for p in ([t] if isinstance(t, torch.Tensor) else t)]
        freed = [offload_states(backend, batch, scored), offload_weights(backend, batch)]
        if device_like:
            assert all(part.untyped_storage().nbytes() == 0 for part in weights)
        pointers = [part.untyped_storage()._cdata for part in weights]
        backend.reload()
        backend.reload()
        again = [p for t in backend.local_weights().values() for p in ([t] if isinstance(t, torch.Tensor) else t)]
        assert [part.untyped_storage()._cdata for part in again] == pointers
        assert torch.equal(backend.compute_logprobs(batch)["logprobs"].values(), scored)
        backend.train_step(batch, negative_logprobs, 10.0)
        interrupted = gather_weights(backend, topology)
        backend.close()
    finally:
        offload._is_on_host = is_on_host
    straight, _ = build(backend_name, model, dtype)
    for _ in range(2):
        straight.train_step(batch, negative_logprobs, 10.0)
    expected = gather_weights(straight, topology)
    straight.close()
    changed = [name for name, tensor in expected.items() if not torch.equal(interrupted[name], tensor)]
    assert not changed, changed
    return freed, sum(tensor.numel() for tensor in expected.values())


def offload_states(backend, batch, scored):
    freed = backend.offload()
    assert torch.equal(backend.compute_logprobs(batch)["logprobs"].values(), scored)
    with pytest.raises(BackendError, match=r"train_step needs the optimizer's state, .* Call reload\(\) first"):
        backend.train_step(batch, negative_logprobs, 10.0)
    with pytest.raises(BackendError, match=r"save_state needs .* Call reload\(\) first"):
        backend.save_state("unused")
    return freed


def offload_weights(backend, batch):
    freed = backend.offload(weights=True)
    assert backend.offload(weights=True) == 0
    for name, call in (
        ("scoring", lambda: backend.compute_logprobs(batch)),
        ("train_step", lambda: backend.train_step(batch, negative_logprobs, 10.0)),
        ("local_weights", backend.local_weights),
        ("export_hf", lambda: backend.export_hf("unused")),
        ("load_hf", lambda: backend.load_hf("unused")),
        ("load_state", lambda: backend.load_state("unused")),
    ):
        with pytest.raises(BackendError, match=rf"{name} needs the weights, .* Call reload\(\) first"):
            call()
    return freed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_training_goes_on_bit_by_bit(ranks2, model, backend, dtype):
    """Memory of the CPU stands for a device's."""
    results = ranks2.run(train_interrupted, backend, model, dtype, True)
    num_parameters = results[0][1]
    # Of both ranks together: padding makes the cut uneven.
    for found, each in zip(
        zip(*(freed for freed, _ in results), strict=True), per_parameter(backend, dtype), strict=True
    ):
        assert num_parameters * each <= sum(found) < 1.1 * num_parameters * each


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_on_a_cpu_nothing_is_freed_and_the_same_is_refused(ranks2, model, backend):
    for freed, _ in ranks2.run(train_interrupted, backend, model, "float32", False):
        assert freed == [0, 0]


def offload_a_frozen_model(model):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    for name in ("fsdp", "megatron"):
        backend = load_train_backend(name).build(model, topology=topology, config=CONFIG, trainable=False)
        assert backend.offload() == 0
        backend.load_hf(model)
        backend.offload(weights=True)
        with pytest.raises(BackendError, match="local_weights needs the weights"):
            backend.local_weights()
        backend.reload()
        assert backend.local_weights()
        backend.close()


def test_a_frozen_model_has_weights_to_offload_only(ranks1, model):
    ranks1.run(offload_a_frozen_model, model)
