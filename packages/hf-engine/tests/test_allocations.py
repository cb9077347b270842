"""Memory that real transitions take, step by step, as torch's allocators report it to the profiler."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_engine import HybridEngine, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

LIMIT = 64 << 10
"""Smaller tensors are sums and checksums."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def taken_bytes(act):
    """Counts the allocations of `act` above the limit by size, on this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    events = profiler.profiler.kineto_results.events()
    return Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > LIMIT)


def enter_and_leave(model, backend, sizes, training_weights):
    """Returns allocations of the second to fourth transition, and the sizes of this rank's shards above the limit."""
    topology = Topology(ParallelSpec.parse(sizes), GenerationSpec())
    train = load_train_backend(backend).build(model, topology=topology, config=TrainConfig(learning_rate=1e-3))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology, bucket_bytes=1 << 19, training_weights=training_weights)

    def there_and_back():
        with torch.no_grad():
            for parts in as_parts(train.local_weights()).values():
                for part in parts:
                    part.add_(1.0)
        train._weight_changes += 1
        with engine.generation():
            pass

    there_and_back()
    taken = [taken_bytes(there_and_back) for _ in range(3)]
    received, host_bytes = engine.last_transition.recv_bytes, engine.memory.host_bytes
    shards = Counter(storages_of(train.local_weights()))
    with engine.generation():
        shards += Counter(storages_of(rollout.weight_buffers()))
    engine.close()
    assert received > 10 * LIMIT
    return taken, shards, host_bytes


def storages_of(weights):
    storages = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for parts in as_parts(weights).values()
        for part in parts
    }
    return [size for size in storages.values() if size > LIMIT]


CASES = [("fsdp", "1-1-2"), ("megatron", "1-2-1")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {rows: write_tiny_model(folder / str(rows), vocab_size=rows, **SIZES) for rows in (511, 512)}


@pytest.mark.parametrize(("backend", "sizes"), CASES)
def test_weights_that_are_kept_are_sent_again_without_new_memory(ranks2, models, backend, sizes):
    for taken, _, host_bytes in ranks2.run(enter_and_leave, models[512], backend, sizes, "keep"):
        assert taken == [Counter()] * 3
        assert host_bytes == 0


@pytest.mark.parametrize(("backend", "sizes"), CASES)
def test_moved_weights_take_only_the_memory_of_their_new_place(ranks2, models, backend, sizes):
    """Every generation tensor on the way there, every training storage on the way back; each was freed before."""
    for taken, shards, host_bytes in ranks2.run(enter_and_leave, models[512], backend, sizes, "move"):
        assert sum(shards.values()) > 10
        assert taken == [shards] * 3
        assert host_bytes == 0


def test_padding_alone_waits_on_the_host(ranks2, models):
    """511 rows are 256 and 255 and one of padding, which no generation shard holds: that row waits on the host."""
    (_, _, without), (taken, shards, padded) = ranks2.run(enter_and_leave, models[511], "fsdp", "1-1-2", "move")
    assert taken == [shards] * 3
    assert (without, padded) == (0, SIZES["hidden_size"] * 4)


def test_the_count_sees_a_tensor_and_a_storage_that_grows():
    tensor = torch.empty(0)
    sizes = taken_bytes(lambda: (torch.empty(LIMIT), tensor.untyped_storage().resize_(2 * LIMIT)))
    assert sizes == {4 * LIMIT: 1, 2 * LIMIT: 1}
