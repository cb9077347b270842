"""HybridEngine from Megatron's layouts into weight buffers: collectives, bytes, memory, on four real processes."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_testing.shapes import tiny_shape, uniform_shape
from engine_testing.storages import watch_storages
from engine_testing.traffic import count_traffic
from engine_testing.train_steps import train_step
from engine_testing.weights import cut_weights, empty_weights, numbered_weights
from hf_engine import (
    HybridEngine,
    TrainConfig,
    generation_layout,
    load_train_backend,
    megatron_layout,
    plan_transition,
)
from hf_engine.resharding import steps
from hf_engine.resharding.execute import as_parts
from hf_engine.resharding.moving import storage_bytes
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

UNIFORM = uniform_shape()
MODELS = {
    "uniform": UNIFORM,
    "llama": tiny_shape(num_layers=4, num_kv_heads=4, num_heads=8),
    "tied": tiny_shape(num_layers=4, num_kv_heads=4, qk_norm=True, qkv_bias=True, tie_embeddings=True),
    "two groups": tiny_shape(num_layers=4, num_kv_heads=2, num_heads=8),
    "uneven stages": tiny_shape(num_layers=5, num_kv_heads=4),
    "experts": tiny_shape(num_layers=4, num_kv_heads=4, num_experts=4, num_experts_per_token=2, family="mixtral"),
}
LAYOUTS = [
    ("1-4-1", "1-2"),
    ("1-4-1", "1-1"),
    ("2-2-1", "1-2"),
    ("2-2-1", "2-1"),
    ("2-2-1", "1-1"),
    ("4-1-1", "2-1"),
    ("4-1-1", "1-1"),
    ("2-1-2", "1-1"),
    ("1-2-2", "1-1"),
    ("2-2-1", "2-2"),
]
LAYOUTS_OF = {
    "llama": LAYOUTS,
    "tied": [("1-4-1", "1-2"), ("2-2-1", "1-2"), ("2-2-1", "2-1"), ("4-1-1", "1-1")],
    "two groups": [("1-4-1", "1-2"), ("1-4-1", "1-1"), ("2-2-1", "1-2"), ("1-2-2", "1-1")],
    "uneven stages": [("2-2-1", "1-2"), ("2-2-1", "2-1"), ("4-1-1", "2-1"), ("4-1-1", "1-1"), ("2-1-2", "1-1")],
    "experts": [("1-4-1", "1-2"), ("2-2-1", "1-1"), ("4-1-1", "2-1"), ("2-2-1", "2-2")],
}
"""A plain model takes all ways; the others those on which they differ from it."""
TRAINED_LAYOUTS = [
    ("1-4-1", "1-2"),
    ("2-2-1", "1-2"),
    ("4-1-1", "1-1"),
    ("2-1-2", "2-1"),
    ("1-2-2", "1-1"),
]


class NumberedWeights:
    """A training backend's weights without a model: numbers that name their place and version."""

    def __init__(self, layout, shapes):
        self._layout, self._shapes = layout, shapes
        self._weights = empty_weights(layout, dist.get_rank())
        self.weight_changes = 0
        self.step()

    def step(self):
        self.weight_changes += 1
        self.full = numbered_weights(self._shapes, self._layout.dtype, version=self.weight_changes)
        for name, parts in cut_weights(self._layout, dist.get_rank(), self.full).items():
            for mine, values in zip(self._weights[name], parts, strict=True):
                mine.copy_(values)

    def close(self):
        self._weights = {}

    def weight_layout(self):
        return self._layout

    def local_weights(self):
        return self._weights


class Buffers:
    """A rollout backend that is nothing but its buffers."""

    def __init__(self, layout):
        self._layout = layout
        self._weights = {name: parts[0] for name, parts in empty_weights(layout, dist.get_rank()).items()}
        self._bytes = {name: tensor.nbytes for name, tensor in self._weights.items()}
        self.weight_version = 0

    def weight_layout(self):
        return self._layout

    def weight_buffers(self):
        return self._weights

    def close(self):
        self._weights = {}

    def commit_weights(self, version):
        self.weight_version = version

    def release(self):
        for tensor in self._weights.values():
            tensor.untyped_storage().resize_(0)


def build(model_name, train, generation, **options):
    model, topology = MODELS[model_name], Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
    trained = NumberedWeights(megatron_layout(model, topology), model.parameters())
    rollout = Buffers(generation_layout(model, topology))
    return trained, rollout, HybridEngine(trained, rollout, topology, **options)


def parts_of(weights):
    return [part for parts in as_parts(weights).values() for part in parts]


def assert_weights(weights, layout, full):
    expected = cut_weights(layout, dist.get_rank(), full)
    assert weights.keys() == expected.keys()
    for name, parts in as_parts(weights).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, expected[name], strict=True)), name


def enter_and_leave(cases, bucket_bytes):
    """Two transitions of every case: exact weights, counted bytes, live memory; the traffic of the last one."""
    found = []
    for case in cases:
        trained, rollout, engine = build(*case, bucket_bytes=bucket_bytes)
        source, target, rank = engine.plan.source, engine.plan.target, dist.get_rank()
        everything = [*parts_of(trained.local_weights()), *rollout.weight_buffers().values()]
        for _ in range(2):
            trained.step()
            seen = []
            observe = partial(lambda seen, tensors: seen.append(storage_bytes(tensors)), seen, everything)
            with watch_storages(observe), count_traffic() as traffic, engine.generation():
                assert_weights(rollout.weight_buffers(), target, trained.full)
                inside = storage_bytes(everything)
            assert inside == engine.memory.generation_bytes == target.held_bytes(rank), case
            assert engine.memory.host_bytes == engine.memory.training_bytes == 0, case
            assert_weights(trained.local_weights(), source, trained.full)
            assert storage_bytes(everything) == source.held_bytes(rank)
            peak = engine.memory.peak_bytes
            assert max(seen) == peak <= target.held_bytes(rank) + bucket_bytes, (case, max(seen), peak)
            assert traffic.matches(engine.plan.recv_bytes[rank]), (case, traffic)
            assert engine.last_transition.recv_bytes == engine.plan.recv_bytes[rank]
        found.append((traffic, engine.plan.recv_bytes[rank]))
    return found


def move_a_trained_model(model, layouts, dtype, bucket_bytes):
    """Peak and plan by layout; live bytes are read off storages whenever one changes, between real optimizer steps."""
    shape, config, found = ModelShape.from_config(model), TrainConfig(learning_rate=1e-2, dtype=dtype), []
    for train, generation in layouts:
        topology, rank = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation)), dist.get_rank()
        trained = load_train_backend("megatron").build(model, topology=topology, config=config)
        rollout = Buffers(generation_layout(shape, topology, dtype=dtype))
        engine = HybridEngine(trained, rollout, topology, bucket_bytes=bucket_bytes)
        planned = plan_transition(shape, topology, dtype_bytes=getattr(torch, dtype).itemsize)
        everything = [*trained._stage.parameters.values(), *rollout.weight_buffers().values()]
        for _ in range(2):
            train_step(trained, topology, vocab_size=shape.vocab_size)
            before = [part.clone() for part in parts_of(trained.local_weights())]
            seen = [storage_bytes(everything)]
            observe = partial(lambda seen, tensors: seen.append(storage_bytes(tensors)), seen, everything)
            with watch_storages(observe), engine.generation():
                assert storage_bytes(everything) == engine.memory.generation_bytes == planned.peak_param_bytes[rank]
            after = parts_of(trained.local_weights())
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), (train, generation)
            assert max(seen) == engine.memory.peak_bytes, (train, generation)
        found.append((max(seen), planned.peak_param_bytes[rank]))
        engine.close()
    return found


def give_groups_back(case):
    open_before = {*dist.distributed_c10d._world.pg_map}
    for _ in range(2):
        _, _, engine = build(*case)
        with engine.generation():
            opened = {*dist.distributed_c10d._world.pg_map} - open_before
        engine.close()
    return len(opened), {*dist.distributed_c10d._world.pg_map} == open_before


def allocate_nothing(case, bucket_bytes):
    """From the second transition on: the same communication buffers, and no tensor larger than a digest's table."""
    trained, rollout, engine = build(*case, bucket_bytes=bucket_bytes, training_weights="keep")
    buffers = [rollout.weight_buffers()[name].data_ptr() for name in rollout.weight_buffers()]
    used, sizes = [], []
    for _ in range(3):
        trained.step()
        with pointers_of_collectives() as pointers, Allocations() as allocations, engine.generation():
            pass
        used.append(pointers)
        sizes.append(max(allocations.sizes, default=0))
    assert buffers == [tensor.data_ptr() for tensor in rollout.weight_buffers().values()]
    assert used[0] and used[1] == used[2] == used[0]
    return sizes[1:]


@contextmanager
def pointers_of_collectives(real_gather=dist.all_gather_single, real_exchange=dist.batch_isend_irecv):
    pointers = []

    def gather(incoming, outgoing, **options):
        pointers.extend((incoming.data_ptr(), outgoing.data_ptr()))
        return real_gather(incoming, outgoing, **options)

    def exchange(operations):
        pointers.extend(operation.tensor.data_ptr() for operation in operations)
        return real_exchange(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", gather)
        patch.setattr(dist, "batch_isend_irecv", exchange)
        yield pointers


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operation returned and that none of its arguments had."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id_of(leaf) not in known:
                self.sizes.append(leaf.untyped_storage().nbytes())
        return result


def id_of(tensor):
    return tensor.untyped_storage()._cdata


def see_an_allocation():
    with Allocations() as allocations:
        torch.empty(1 << 16).view(2, -1).add_(1)
    return allocations.sizes


@pytest.fixture(scope="module")
def ranks4():
    with LocalRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("model", LAYOUTS_OF)
def test_real_models_arrive_in_any_generation_layout_and_return(ranks4, model):
    cases = [(model, *layout) for layout in LAYOUTS_OF[model]]
    for rank in ranks4.run(enter_and_leave, cases, 1 << 12):
        assert len(rank) == len(cases)


def enter_and_leave_by_collectives(cases, bucket_bytes):
    """As on GPUs: the all-gathers of the plan are torch.distributed's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "gathers_by_messages", lambda incoming: False)
        return enter_and_leave(cases, bucket_bytes)


@pytest.mark.parametrize(
    ("way", "bucket_bytes"),
    [
        (enter_and_leave, 1 << 15),
        (enter_and_leave_by_collectives, 1 << 24),
        pytest.param(enter_and_leave, 1 << 24, marks=pytest.mark.matrix),
        pytest.param(enter_and_leave_by_collectives, 1 << 15, marks=pytest.mark.matrix),
    ],
)
def test_equal_shards_take_one_all_gather_per_group_and_bucket(ranks4, way, bucket_bytes):
    """The collective itself, or on the host one message from each member to each other."""
    whole = 4 * UNIFORM.num_parameters
    cases = [("uniform", *layout) for layout in LAYOUTS]
    results = ranks4.run(way, cases, bucket_bytes)
    for index, (_, train, generation) in enumerate(cases):
        topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
        (size,) = {len(group) for group in topology.groups("micro_dp")}
        planned = plan_transition(UNIFORM, topology, dtype_bytes=4)
        shard = whole // (topology.train.pp_size * topology.train.tp_size)
        # Four buffers share the bucket: two rounds, each with what goes out and what comes in.
        buckets = -(-shard * size // (bucket_bytes // 4)) if size > 1 else 0
        for rank, found in enumerate(results):
            traffic, received = found[index]
            assert received == planned.recv_bytes[rank] == (size - 1) * shard
            assert traffic.num_messages == (size - 1) * buckets, (train, generation)
            if way is enter_and_leave_by_collectives:
                assert traffic.group_sizes == [size] * buckets, (train, generation)
                calls = {"_allgather_base_": buckets}
            else:
                calls = dict.fromkeys(("send", "recv_"), (size - 1) * buckets)
            if not buckets:
                calls = {}
            verdicts = {"allreduce_": 1} if buckets else {}
            assert traffic.calls == calls | verdicts, "the ranks agree before a transfer"


@pytest.mark.parametrize(
    ("vocab_size", "num_layers", "largest", "dtype", "layouts"),
    [
        pytest.param(120, 8, 3 * 96, "float32", TRAINED_LAYOUTS, marks=pytest.mark.slow),
        (120, 8, 3 * 96, "bfloat16", TRAINED_LAYOUTS[1:2]),
        (4800, 4, 4800, "float32", TRAINED_LAYOUTS[:3]),
    ],
)
def test_a_trained_model_moves_within_the_plan_and_a_bucket(
    ranks4, tmp_path, vocab_size, num_layers, largest, dtype, layouts
):
    """All storages of a real backend, padding of the vocabulary too, which megatron-core by itself makes one.

    A bucket holds the largest storage, and most of the model is the embedding where that is the largest.
    """
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": vocab_size}
    model = write_tiny_model(tmp_path, num_hidden_layers=num_layers, **sizes)
    bucket_bytes = largest * 64 * getattr(torch, dtype).itemsize
    for rank in ranks4.run(move_a_trained_model, model, layouts, dtype, bucket_bytes):
        for layout, (peak, planned) in zip(layouts, rank, strict=True):
            assert peak <= planned + bucket_bytes, (layout, peak, planned)


@pytest.mark.parametrize("num_layers", [10, 22])
def test_unequal_stages_wait_for_each_other(ranks4, tmp_path, num_layers):
    """The first two stages have a layer more than the others: the peak does not grow with the model's depth."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 120}
    model = write_tiny_model(tmp_path, num_hidden_layers=num_layers, **sizes)
    bucket_bytes = 3 * 96 * 64 * 4  # as the fused q, k, v: the largest training storage
    for ((peak, planned),) in ranks4.run(move_a_trained_model, model, [("4-1-1", "1-1")], "float32", bucket_bytes):
        assert peak <= planned + bucket_bytes


def test_a_closed_engine_gives_its_groups_back(ranks4):
    assert ranks4.run(give_groups_back, ("uniform", "1-4-1", "1-2")) == [(1, True)] * 4


@pytest.mark.parametrize("layout", LAYOUTS[:5])
@pytest.mark.parametrize("model", ["uniform", "llama"])
def test_nothing_is_allocated_after_the_first_transition(ranks4, model, layout):
    assert max(max(sizes) for sizes in ranks4.run(allocate_nothing, (model, *layout), 1 << 17)) <= 8 * 1024


def test_the_count_of_allocations_sees_one():
    assert see_an_allocation() == [4 << 16]
