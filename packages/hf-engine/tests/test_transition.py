"""Planned transitions against the paper's Table 2, and against element-wise brute force."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np
import pytest

from engine_testing.shapes import tiny_shape, uniform_shape
from hf_engine.resharding.model_layouts import generation_layout, megatron_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.transition import plan_transition, training_layout
from hf_protocols._presets import PRESETS
from hf_protocols.errors import ReshardError, TopologyError
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology
from hf_protocols.transition import compute_transition_cost

UNIFORM = uniform_shape()


def nest_on(num_ranks):
    """All sizes that nest."""
    return [
        (pp, tp, num_ranks // (pp * tp), gen_pp, gen_tp)
        for pp, tp in product(range(1, num_ranks + 1), repeat=2)
        if num_ranks % (pp * tp) == 0
        for gen_pp, gen_tp in product(range(1, pp + 1), range(1, tp + 1))
        if pp % gen_pp == 0 and tp % gen_tp == 0
    ]


NESTED = [sizes for num_ranks in range(1, 65) for sizes in nest_on(num_ranks)[:: 1 if num_ranks <= 16 else 7]]
"""All sizes on up to 16 ranks, and a seventh of those on 17 to 64."""
SOME_NESTED = [sizes for sizes in NESTED if max(sizes[:3]) <= 16 and sizes[2] in (1, 3, 4)]


def topology_of(pp, tp, dp, gen_pp, gen_tp, order="megatron"):
    return Topology(
        ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp), GenerationSpec(gen_pp_size=gen_pp, gen_tp_size=gen_tp), order
    )


def uniform_for(sizes):
    """Returns the smallest uniform model that every way of sharding divides evenly."""
    pp, tp, dp, _, _ = sizes
    return uniform_shape(num_layers=pp, size=pp * tp * dp)


# A fifth of the sizes in every run, the others where tests may take minutes.
OFTEN, SELDOM = NESTED[::5], [sizes for number, sizes in enumerate(NESTED) if number % 5]
CASES = [
    pytest.param("megatron", OFTEN, id="megatron"),
    pytest.param("contiguous", [sizes for sizes in OFTEN if sizes in SOME_NESTED], id="contiguous"),
    pytest.param("megatron", SELDOM, id="megatron, others", marks=pytest.mark.slow),
    pytest.param(
        "contiguous",
        [sizes for sizes in SELDOM if sizes in SOME_NESTED],
        id="contiguous, others",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("method", ["hybridflow", "hybridflow-v", "ds-chat"])
@pytest.mark.parametrize(("order", "cases"), CASES)
def test_uniform_models_cost_exactly_table_2_on_every_rank(method, order, cases):
    among_some = {*SOME_NESTED}
    for sizes in cases:
        topology, model = topology_of(*sizes, order), uniform_for(sizes)
        whole = 2 * model.num_parameters
        cost = compute_transition_cost(whole, topology, method)
        planned = plan_transition(model, topology, method)
        assert planned.parameter_bytes == whole
        assert set(planned.recv_bytes.values()) == {cost.recv_bytes}, sizes
        assert set(planned.peak_param_bytes.values()) == {cost.peak_param_bytes}, sizes
        assert sum(planned.send_bytes.values()) == sum(planned.recv_bytes.values())
        # Vanilla groups may happen to hold some ranks' training shards: there the paper's row is a bound.
        held = [method == "hybridflow-v" and shard_is_inside(topology, rank) for rank in range(topology.world_size)]
        redundant = {rank: 0 if inside else cost.redundant_bytes for rank, inside in enumerate(held)}
        assert planned.redundant_bytes_by_rank == redundant, sizes
        assert planned.redundant_bytes == max(redundant.values())
        if (method, order) == ("hybridflow", "megatron") and sizes in among_some:
            check_that_senders_are_level_and_groups_are_the_micro_dp_groups(planned, topology)


def check_that_senders_are_level_and_groups_are_the_micro_dp_groups(planned, topology):
    assert len(set(planned.send_bytes.values())) == 1, topology
    expected = sorted(group for group in topology.groups("micro_dp") if len(group) > 1)
    assert [exchange.ranks for exchange in planned.exchanges] == [tuple(sorted(group)) for group in expected]
    assert all(exchange.peer_bytes == 0 for exchange in planned.exchanges)


def shard_is_inside(topology, rank):
    """Returns True if a rank's vanilla generation shard has its training shard, by cells of a pp x tp grid."""
    train, generation = topology.train, topology.generation
    at = topology.coordinate(rank)
    index = at.pp * train.tp_size + at.tp
    at_tp, at_pp = index % generation.gen_tp_size, index // generation.gen_tp_size % generation.gen_pp_size
    stages, columns = train.pp_size // generation.gen_pp_size, train.tp_size // generation.gen_tp_size
    return at.pp // stages == at_pp and at.tp // columns == at_tp


def test_cases_have_all_world_sizes_and_more_than_powers_of_two():
    assert {(3, 1, 1, 3, 1), (1, 6, 2, 1, 3), (12, 5, 1, 6, 5), (2, 2, 15, 1, 1), (1, 1, 64, 1, 1)} <= set(NESTED)
    assert {pp * tp * dp for pp, tp, dp, _, _ in NESTED} == set(range(1, 65))
    assert {2, 3, 4, 5, 6, 12, 16} <= {size for sizes in SOME_NESTED for size in sizes}


@pytest.mark.parametrize(
    ("preset", "train", "generation"),
    [
        ("llama-2-7b", "1-8-2", "1-2"),
        ("llama-2-13b", "1-8-2", "1-4"),
        ("codellama-34b", "2-8-2", "1-8"),
        ("llama-2-70b", "4-8-2", "1-8"),
        ("llama-3-8b", "2-4-2", "1-2"),
    ],
)
def test_published_models_are_within_a_thousandth_of_the_formula(preset, train, generation):
    model = ModelShape.preset(preset)
    topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
    planned = plan_transition(model, topology)
    cost = compute_transition_cost(planned.parameter_bytes, topology)
    mean = sum(planned.recv_bytes.values()) / topology.world_size
    assert mean == pytest.approx(cost.recv_bytes, rel=1e-3)
    assert planned.redundant_bytes == 0
    for rank in range(topology.world_size):
        assert planned.recv_bytes[rank] == brute_force_recv(planned.plan, rank)


def every_preset():
    """Yields whole models; of those with thousands of parameters six layers, and the whole in the slow lane."""
    for name in PRESETS:
        model = ModelShape.preset(name)
        if len(model.parameters()) < 2000:
            yield pytest.param(model, id=name)
        else:
            yield pytest.param(replace(model, num_layers=6), id=f"{name}, 6 layers")
            yield pytest.param(model, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize("model", list(every_preset()))
def test_every_preset_comes_within_a_thousandth_of_the_formula(model):
    """Norms and routers are replicated, end stages unequal; M counts a tied embedding as often as it is stored."""
    layouts = [("1-2-2", "1-1"), ("2-2-1", "1-2")] + [("2-2-1", "2-1")] * model.tie_embeddings
    for train, generation in layouts:
        topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
        planned = plan_transition(model, topology)
        assert planned.parameter_bytes == 2 * model.num_parameters
        trained, generated = (stored_bytes(model, int(sizes[0])) for sizes in (train, generation))
        mean = sum(planned.recv_bytes.values()) / topology.world_size
        expected = generated / topology.generation.replica_size - trained / (topology.world_size / int(train[4]))
        assert mean == pytest.approx(expected, rel=1e-3), (train, generation)
        if trained == generated:
            assert expected == compute_transition_cost(trained, topology).recv_bytes
        assert planned.redundant_bytes == 0
        assert all(planned.recv_bytes[rank] == brute_force_recv(planned.plan, rank) for rank in planned.plan.ranks)


def stored_bytes(model, num_stages):
    """Returns the bytes of one model split into stages: the first and the last have an embedding each, tied or not."""
    second = model.vocab_size * model.hidden_size if model.tie_embeddings and num_stages > 1 else 0
    return 2 * (model.num_parameters + second)


def brute_force_recv(plan, rank):
    """Returns the bytes that a rank needs minus those it holds, by corners of boxes alone."""
    source, needed = plan.source.boxes_of(rank), 0
    for name, wanted in plan.target.boxes_of(rank).items():
        for box in wanted:
            needed += prod(box.shape)
            for held in source.get(name, ()):
                corners = zip(box.offset, box.shape, held.offset, held.shape, strict=True)
                needed -= prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in corners)
    return needed * 2


SMALL_HEADS = tiny_shape(num_layers=4, num_heads=8, num_kv_heads=8, head_dim=2, vocab_size=64)
SMALL = tiny_shape(num_layers=3, hidden_size=12, intermediate_size=20, head_dim=3, tie_embeddings=True)


@pytest.mark.parametrize(
    ("train", "generation", "sharding"),
    [
        ("1-1-4", "1-2", "fsdp"),
        ("1-1-6", "1-2", "fsdp"),
        ("1-1-4", "1-4", "fsdp"),
        ("1-1-3", "3-1", "fsdp"),
        ("1-1-4", "1-4", "megatron"),
        ("1-4-1", "1-2", "megatron"),
        ("1-4-1", "1-4", "megatron"),
        ("3-1-2", "1-2", "megatron"),
        ("1-2-2", "1-4", "megatron"),
        ("3-2-1", "1-2", "megatron"),
        ("2-2-1", "1-1", "megatron"),
    ],
)
def test_any_layout_is_exact_element_by_element(train, generation, sharding):
    """Marks every element in numpy: received once and only if needed and not held; peak is the union."""
    topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
    planned = plan_transition(SMALL, topology, dtype_bytes=4, sharding=sharding)
    for rank in range(topology.world_size):
        need = elements(planned.generation, rank)
        have = elements(planned.plan.source, rank)
        got = {name: np.zeros(shape, dtype=int) for name, shape in SMALL.parameters().items()}
        for message in planned.plan.messages:
            if rank in message.destinations:
                got[message.name][box_slices(message.box)] += 1
        assert all(np.array_equal(got[name], need[name] & ~have[name]) for name in got)
        assert planned.recv_bytes[rank] == 4 * sum(int(part.sum()) for part in got.values())
        union = sum(int((need[name] | have[name]).sum()) for name in need)
        assert planned.peak_param_bytes[rank] == 4 * union
        outside = sum(int((have[name] & ~need[name]).sum()) for name in need)
        assert planned.redundant_bytes_by_rank[rank] == 4 * outside
    assert planned.redundant_bytes == max(planned.redundant_bytes_by_rank.values())


def box_slices(box):
    return tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))


def elements(layout, rank):
    marks = {name: np.zeros(shape, dtype=bool) for name, shape in layout.shapes.items()}
    for name, boxes in layout.boxes_of(rank).items():
        for box in boxes:
            marks[name][box_slices(box)] = True
    return marks


def test_figure_8_moves_a_quarter_and_vanilla_three_quarters():
    topology = topology_of(1, 4, 2, 1, 2)
    whole = Fraction(2 * UNIFORM.num_parameters)
    assert plan_transition(UNIFORM, topology).recv_bytes[0] == whole / 4
    vanilla = plan_transition(UNIFORM, topology, "hybridflow-v")
    assert vanilla.recv_bytes[0] == whole * 3 / 4
    assert [rank for rank, extra in vanilla.redundant_bytes_by_rank.items() if extra] == [1, 2, 5, 6]


@pytest.mark.parametrize(("sizes", "generation"), [((2, 2, 1), "1-2"), ((1, 4, 1), "1-1"), ((1, 1, 2), "1-2")])
@pytest.mark.parametrize("order", ["megatron", "contiguous"])
def test_context_parallel_ranks_are_further_replicas(sizes, generation, order):
    """Every rank needs, holds and gets what it would in a topology of its own context-parallel coordinate."""
    pp, tp, dp = sizes
    generation = GenerationSpec.parse(generation)
    topology = Topology(ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp, cp_size=2), generation, order)
    alone = Topology(ParallelSpec(pp_size=pp, tp_size=tp, dp_size=2 * dp), generation, order)
    planned, expected = (plan_transition(SMALL_HEADS, each) for each in (topology, alone))
    assert planned.redundant_bytes == expected.redundant_bytes
    for name in ("recv_bytes", "kept_bytes", "peak_param_bytes"):
        assert sorted(getattr(planned, name).values()) == sorted(getattr(expected, name).values()), name
    for rank in range(topology.world_size):
        assert planned.recv_bytes[rank] == brute_force_recv(planned.plan, rank)
        have, need = elements(planned.plan.source, rank), elements(planned.generation, rank)
        at = topology.coordinate(rank)
        twins = [r for r in range(topology.world_size) if topology.coordinate(r).pp == at.pp]
        twins = [r for r in twins if topology.coordinate(r).tp == at.tp]
        assert len(twins) == 2 * dp
        for twin in twins:
            same = elements(planned.plan.source, twin)
            assert all(np.array_equal(have[name], same[name]) for name in have)
        assert 2 * sum(int((need[name] & ~have[name]).sum()) for name in need) == planned.recv_bytes[rank]
    if topology.is_nested:
        assert set(planned.groups) == {tuple(sorted(g)) for g in topology.groups("micro_dp") if len(g) > 1}


def test_a_plan_says_who_exchanges_what():
    planned = plan_transition(SMALL_HEADS, topology_of(1, 4, 2, 1, 2))
    assert planned.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    received = dict.fromkeys(range(8), 0)
    for message in planned.messages:
        assert message.source not in message.destinations
        for rank in message.destinations:
            assert {message.source, rank} in [set(group) for group in planned.groups]
            received[rank] += 2 * prod(message.box.shape)
    assert planned.recv_bytes == received


def test_near_senders_come_first():
    """1-2-4 -> 1-4 lacks pieces that a rank of every machine of two holds; level senders alone would be far ones."""
    topology = topology_of(1, 2, 4, 1, 4)

    def senders_and_receivers(**options):
        messages = plan_transition(SMALL_HEADS, topology, **options).plan.messages
        return [(message.source, rank) for message in messages for rank in message.destinations]

    assert {sender // 2 == rank // 2 for sender, rank in senders_and_receivers(ranks_per_machine=2)} == {True}
    assert {sender // 2 == rank // 2 for sender, rank in senders_and_receivers(ranks_per_machine=1)} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "'hybridflow', 'hybridflow-v', 'ds-chat'"),
        ({"sharding": "zero"}, "'megatron', 'fsdp'"),
        ({"dtype_bytes": 3}, "2, 4, 8"),
        ({"sharding": "fsdp"}, "Use 1-1-4"),
    ],
)
def test_what_is_not_defined_is_refused(arguments, message):
    with pytest.raises(ReshardError, match=message):
        plan_transition(SMALL, topology_of(1, 2, 2, 1, 1), **arguments)


def test_hybridflow_v_needs_a_training_replica():
    with pytest.raises(ReshardError, match="Use hybridflow or ds-chat"):
        plan_transition(SMALL, topology_of(1, 1, 4, 1, 2), "hybridflow-v")
    with pytest.raises(TopologyError, match="GenerationSpec"):
        plan_transition(SMALL, Topology(ParallelSpec(dp_size=2)))
    experts = Topology(ParallelSpec(dp_size=2, ep_size=2), GenerationSpec())
    for sharding, message in (
        ("megatron", "or for a dense model ep_size=1"),
        ("fsdp", "Use 1-1-2 with ep_size=1, or"),
    ):
        with pytest.raises(ReshardError, match=message):
            plan_transition(SMALL, experts, "hybridflow-v", sharding=sharding)


def test_wrong_kinds_are_named():
    topology = topology_of(1, 2, 1, 1, 1)
    for given, message in (
        (("llama-2-7b", topology), "model='llama-2-7b'. Use a ModelShape, such as ModelShape.preset"),
        ((UNIFORM, "1-2-1"), "topology='1-2-1'. Use a Topology"),
        ((UNIFORM, topology, ["hybridflow"]), r"method=\['hybridflow'\] is not one of 'hybridflow'"),
    ):
        with pytest.raises(ReshardError, match=message):
            plan_transition(*given)
    for given, message in (
        ({"ranks_per_machine": 0}, "ranks_per_machine=0 must be a whole number of at least 1"),
        ({"ranks_per_machine": 8.0}, "ranks_per_machine=8.0 must be"),
        ({"dtype_bytes": [2]}, r"dtype_bytes=\[2\] is not one of 2, 4, 8"),
        ({"sharding": "fsdq"}, "sharding='fsdq' is not one of 'megatron', 'fsdp'"),
    ):
        with pytest.raises(ReshardError, match=message):
            plan_transition(UNIFORM, topology, **given)
    with pytest.raises(ReshardError, match=r"sharding='fsdq' is not one of"):
        training_layout(UNIFORM, topology, "fsdq")
    for layout in (megatron_layout, generation_layout):
        with pytest.raises(ReshardError, match=r"model=None. Use a ModelShape"):
            layout(None, topology)
    with pytest.raises(ReshardError, match=r"source='a'. Use a WeightLayout"):
        plan_reshard("a", training_layout(UNIFORM, topology, "megatron"))


@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"cp_size": 2, "dp_size": 1}])
def test_methods_that_a_parallelism_has_no_place_in_say_so(sizes):
    topology = Topology(ParallelSpec(**{"dp_size": 2} | sizes), GenerationSpec())
    with pytest.raises(ReshardError, match=r"FSDP shards over data-parallel ranks.* [ce]p_size=2.*. Use 1-1-2"):
        plan_transition(UNIFORM, topology, sharding="fsdp")


def test_hybridflow_v_refuses_replicas_with_some_of_the_experts():
    topology = Topology(ParallelSpec(dp_size=2, ep_size=2), GenerationSpec())
    with pytest.raises(ReshardError, match=r"hybridflow-v gathers inside a training replica.* ep_size=2 hold some"):
        plan_transition(uniform_shape(), topology, "hybridflow-v")
