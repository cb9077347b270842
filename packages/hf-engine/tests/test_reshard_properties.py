"""Random models between random layouts and back, on real processes, against whole tensors sliced in plain torch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from engine_testing.traffic import count_traffic
from engine_testing.weights import cut_weights, empty_weights, numbered_weights
from hf_engine.resharding.execute import ReshardExecutor
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.model_layouts import generation_layout, megatron_layout
from hf_engine.resharding.moving import ShardMover, storage_bytes
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.steps import Step
from hf_engine.testing import LocalRanks
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

FAMILIES = {
    "llama": {},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "gemma": {"family": "gemma", "tie_embeddings": True},
    "mixtral": {"family": "mixtral", "num_experts": 4, "num_experts_per_token": 2},
    "qwen3_moe": {"family": "qwen3_moe", "qk_norm": True, "num_experts": 4, "num_experts_per_token": 2},
}


def random_model(rng, family):
    """Sizes that divide evenly by up to four tensor-parallel ranks, and an embedding that does not."""
    kv_heads = rng.choice([1, 2, 4])
    return ModelShape(
        name=family,
        num_layers=rng.randint(2, 4),
        hidden_size=rng.choice([5, 8, 12]),
        intermediate_size=rng.choice([4, 8, 12]),
        num_heads=rng.choice([4, 8, 12]),
        num_kv_heads=kv_heads,
        head_dim=rng.randint(1, 3),
        vocab_size=rng.choice([30, 64, 70, 130]),
        **{"tie_embeddings": rng.random() < 0.3, **FAMILIES[family]},
    )


def random_layout(rng, model, world_size, dtype):
    """Any kind of layout on some of the ranks, in any order."""
    size = rng.choice([*range(1, world_size + 1), world_size, world_size])
    kind = rng.choice(["megatron", "megatron", "generation", "generation", "fsdp", "replicated"])
    if kind == "megatron":
        layout = random_megatron(rng, model, size, dtype)
    elif kind == "generation":
        layout = random_generation(rng, model, size, dtype)
    else:
        cut = fsdp_layout if kind == "fsdp" else replicated_layout
        layout = cut(model.parameters(), range(size), dtype=dtype)
    places = rng.sample(range(world_size), size)
    return WeightLayout(
        shapes=layout.shapes, boxes={places[rank]: layout.boxes_of(rank) for rank in range(size)}, dtype=dtype
    )


def random_megatron(rng, model, size, dtype):
    pp = rng.choice([n for n in divisors(size) if n <= model.num_layers])
    tp = rng.choice([n for n in divisors(size // pp) if shares_heads(model, n)])
    dp = size // (pp * tp)
    ep = rng.choice([n for n in divisors(dp) if n == 1 or (model.num_experts and model.num_experts % n == 0)])
    topology = Topology(
        ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp, ep_size=ep), order=rng.choice(["megatron", "contiguous"])
    )
    return megatron_layout(model, topology, dtype=dtype, layers_per_stage=random_stages(rng, model.num_layers, pp))


def shares_heads(model, tp):
    """Returns True if megatron-core shards the projections over `tp` ranks: whole groups, or one over several ranks."""
    groups, rows = model.num_kv_heads, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    cuts_groups = tp % groups == model.num_heads % tp == rows % tp == model.intermediate_size % tp == 0
    return groups % tp == 0 or cuts_groups


def random_generation(rng, model, size, dtype):
    pp = rng.choice([n for n in divisors(size) if n <= model.num_layers])
    heads, kv_heads = model.num_heads, model.num_kv_heads
    sizes = [n for n in divisors(size // pp) if heads % n == model.intermediate_size % n == 0]
    tp = rng.choice([n for n in sizes if n % kv_heads == 0 or kv_heads % n == 0])
    topology = Topology(ParallelSpec(dp_size=size), GenerationSpec(gen_pp_size=pp, gen_tp_size=tp))
    return generation_layout(model, topology, dtype=dtype, layers_per_stage=random_stages(rng, model.num_layers, pp))


def random_stages(rng, num_layers, num_stages):
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return [b - a for a, b in pairwise(cuts)]


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def in_one_buffer(weights, padding):
    """The same tensors as views of one storage, as engines with flat buffers hold them."""
    parts = [part for tensors in weights.values() for part in tensors]
    if not parts:
        return weights
    flat = torch.zeros(sum(part.numel() for part in parts) + padding, dtype=parts[0].dtype)
    views, start = {}, 0
    for name, tensors in weights.items():
        views[name] = []
        for part in tensors:
            view = flat[start : start + part.numel()].view(part.shape)
            view.copy_(part)
            views[name].append(view)
            start += part.numel()
    return views


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        assert len(found[name]) == len(parts), name
        for part, wanted in zip(found[name], parts, strict=True):
            assert part.dtype == wanted.dtype
            assert torch.equal(part, wanted), name


def copy_there_and_back(source, target, full, bucket_bytes):
    rank = dist.get_rank()
    forth, back = plan_reshard(source, target), plan_reshard(target, source)
    weights, returned = empty_weights(target, rank), empty_weights(source, rank)
    held = cut_weights(source, rank, full)
    for plan, origin, destination in ((forth, held, weights), (back, weights, returned)):
        executor = ReshardExecutor(plan, bucket_bytes=bucket_bytes)
        planned = plan.recv_bytes.get(rank, 0)  # a rank that neither layout names takes part in nothing
        with count_traffic() as traffic:
            assert executor.run(origin, destination).recv_bytes == planned
        assert traffic.matches(planned), (traffic, planned)
    assert_same(weights, cut_weights(target, rank, full))
    assert_same(held, cut_weights(source, rank, full))
    assert_same(returned, cut_weights(source, rank, full))


class GivenUpError(BaseException):
    """An interrupt: an error would end the process groups."""


def give_up_midway(run, num_rounds):
    """All ranks are interrupted alike after some rounds, with nothing on its way any more."""
    begun = []

    def start(self, *args, real=Step.start):
        if len(begun) == num_rounds:
            raise GivenUpError
        begun.append(real(self, *args))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "start", start)
        with pytest.raises(GivenUpError):
            run()
    for work in begun[-1] if begun else ():  # the rounds before were waited for
        work.wait()


def move_there_and_back(source, target, models, bucket_bytes, storage, rng):
    """Twice, with other weights: the shard lies in the generation tensors, its own storages are empty, it returns.

    It also returns from a way that ended in the middle, wherever it was by then.
    """
    rank = dist.get_rank()
    plan = plan_reshard(source, target)
    train = empty_weights(source, rank)
    if storage != "own":
        train = in_one_buffer(train, padding=3 if storage == "padded" else 0)
    generation = empty_weights(target, rank)
    executor = ReshardExecutor(plan, bucket_bytes=bucket_bytes)
    mover = ShardMover(plan, rank, train, generation)
    for full in models:
        mover.restore()
        assert storage_bytes(t for parts in generation.values() for t in parts) == 0
        expected = cut_weights(source, rank, full)
        for name, parts in train.items():
            for part, values in zip(parts, expected[name], strict=True):
                part.copy_(values)
        if full is models[0] and executor._steps:
            num_rounds = rng.randrange(len(executor._steps))
            give_up_midway(lambda: executor.run(train, generation, version=1, mover=mover), num_rounds)
            mover.restore()
            assert_same(train, expected)
        executor.run(train, generation, version=1, mover=mover)
        assert storage_bytes(t for parts in train.values() for t in parts) == 0
        assert_same(generation, cut_weights(target, rank, full))
        mover.restore()
        assert_same(train, expected)


def reshard_cases(family, seed, num_cases):
    """Every rank draws the same cases; a failure names its own."""
    rng = random.Random(f"{family} {seed}")
    for number in range(num_cases):
        model = random_model(rng, family)
        dtype = rng.choice(["float32", "float32", "bfloat16", "float64"])
        source, target = (random_layout(rng, model, dist.get_world_size(), dtype) for _ in range(2))
        bucket_bytes = rng.choice([512, 4096, 1 << 20])
        storage = rng.choice(["own", "flat", "padded"])
        models = [numbered_weights(model.parameters(), dtype, version=version) for version in (number, number + 1)]
        try:
            copy_there_and_back(source, target, models[0], bucket_bytes)
            move_there_and_back(source, target, models, bucket_bytes, storage, rng)
        except Exception as error:
            error.add_note(f"case {number} of {family}: {model}, {dtype}, {bucket_bytes=}, {storage=}")
            raise
    return num_cases


def cast_cases(family, num_cases):
    """Float32 masters to weights of 16 bits: every element is the master's, rounded once."""
    rng = random.Random(family)
    rank = dist.get_rank()
    for _ in range(num_cases):
        model = random_model(rng, family)
        full = numbered_weights(model.parameters())
        source = random_layout(rng, model, dist.get_world_size(), "float32")
        target = random_layout(rng, model, dist.get_world_size(), "bfloat16")
        weights = empty_weights(target, rank)
        ReshardExecutor(plan_reshard(source, target), bucket_bytes=4096).run(cut_weights(source, rank, full), weights)
        assert_same(weights, cut_weights(target, rank, full))


@pytest.fixture(scope="module")
def ranks4():
    with LocalRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_reshard_between_random_layouts_and_back(ranks4, family):
    assert ranks4.run(reshard_cases, family, 0, 4) == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_models_reshard_between_random_layouts_and_back(ranks4, family):
    assert ranks4.run(reshard_cases, family, 1, 20, deadline_s=800) == [20] * 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_masters_are_rounded_once_between_random_layouts(ranks4, family):
    ranks4.run(cast_cases, family, 6)
