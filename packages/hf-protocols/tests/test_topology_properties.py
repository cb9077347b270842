"""Laws of every topology, on topologies drawn at random."""

from __future__ import annotations

import itertools
import math
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_protocols import Axis, GenerationSpec, Topology

TRAINING_AXES = ("tp", "pp", "dp", "cp", "ep")
exact = settings(max_examples=150, derandomize=True)


@exact
@given(data=st.data())
def test_coordinates_count_ranks_as_nested_loops_do(data, topologies) -> None:
    topology = data.draw(topologies())
    train = topology.train
    sizes = {"pp": train.pp_size, "dp": train.dp_size, "cp": train.cp_size, "tp": train.tp_size}
    slowest_first = {"megatron": ("pp", "dp", "cp", "tp"), "contiguous": ("dp", "pp", "cp", "tp")}[topology.order]
    for rank, at in enumerate(itertools.product(*(range(sizes[axis]) for axis in slowest_first))):
        expected = dict(zip(slowest_first, at, strict=True))
        coordinate = topology.coordinate(rank)
        assert {axis: getattr(coordinate, axis) for axis in slowest_first} == expected
        assert topology.rank(**expected) == rank
        assert coordinate.ep == (expected["dp"] * train.cp_size + expected["cp"]) % train.ep_size
    assert rank == topology.world_size - 1


@exact
@given(data=st.data())
def test_groups_share_the_ranks_out_in_the_order_of_their_axis(data, topologies) -> None:
    topology = data.draw(topologies())
    axes = get_args(Axis) if topology.generation else TRAINING_AXES
    for axis in axes:
        groups = topology.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
        assert [min(group) for group in groups] == sorted(min(group) for group in groups)
        for group in groups:
            assert len(group) == _axis_size(topology, axis)
            assert [_position(topology, axis, rank) for rank in group] == list(range(len(group)))
            assert all(topology.group_of(axis, rank) == group for rank in group)


@exact
@given(data=st.data())
def test_groups_join_ranks_that_differ_in_nothing_else(data, topologies) -> None:
    topology = data.draw(topologies())
    for axis in ("tp", "pp", "dp", "cp"):
        for group in topology.groups(axis):
            others = [name for name in ("tp", "pp", "dp", "cp") if name != axis]
            assert len({tuple(getattr(topology.coordinate(rank), name) for name in others) for rank in group}) == 1
    for group in topology.groups("ep"):
        at = [topology.coordinate(rank) for rank in group]
        assert len({(one.pp, one.tp) for one in at}) == 1
        spread = [one.dp * topology.train.cp_size + one.cp for one in at]
        assert spread == list(range(spread[0], spread[0] + topology.train.ep_size))


@exact
@given(data=st.data())
def test_replicas_hold_each_shard_once(data, topologies) -> None:
    topology = data.draw(topologies(generates=True))
    gen = topology.generation
    shards = list(itertools.product(range(gen.gen_pp_size), range(gen.gen_tp_size)))
    replicas = topology.groups("gen_replica")
    assert len(replicas) == topology.num_gen_replicas
    for replica in replicas:
        at = [topology.coordinate(rank) for rank in replica]
        assert [(one.gen_pp, one.gen_tp) for one in at] == shards
        assert len({one.gen_replica for one in at}) == 1
    for group in topology.groups("micro_dp"):
        at = [topology.coordinate(rank) for rank in group]
        assert len({(one.gen_pp, one.gen_tp) for one in at}) == 1
        assert len({one.gen_replica for one in at}) == len(group)
    assert {topology.coordinate(rank).gen_replica for rank in range(topology.world_size)} == set(range(len(replicas)))


@exact
@given(data=st.data())
def test_nested_groups_number_a_training_replica_in_order(data, topologies) -> None:
    topology = data.draw(topologies(generates=True).filter(lambda topology: topology.is_nested))
    train, gen = topology.train, topology.generation
    micro_dp_size = train.pp_size * train.tp_size // (gen.gen_pp_size * gen.gen_tp_size)
    assert topology.micro_dp_size == micro_dp_size
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert at.gen_replica == (at.dp * train.cp_size + at.cp) * micro_dp_size + at.micro_dp
        for axis in ("micro_dp", "gen_replica", "gen_tp", "gen_pp"):
            peers = {(peer.dp, peer.cp) for peer in map(topology.coordinate, topology.group_of(axis, rank))}
            assert peers == {(at.dp, at.cp)}


@exact
@given(data=st.data())
def test_hybridflow_gathers_shards_inside_the_micro_dp_group(data, topologies, holds_training_shard) -> None:
    nested = topologies(generates=True).filter(lambda one: one.is_nested and one.grouping == "hybridflow")
    topology = data.draw(nested)
    train, gen = topology.train, topology.generation
    assert all(holds_training_shard(topology, rank) for rank in range(topology.world_size))
    for group in topology.groups("micro_dp"):
        shards = {(topology.coordinate(rank).pp, topology.coordinate(rank).tp) for rank in group}
        at = topology.coordinate(group[0])
        a, b = train.pp_size // gen.gen_pp_size, train.tp_size // gen.gen_tp_size
        whole = itertools.product(range(at.gen_pp * a, at.gen_pp * a + a), range(at.gen_tp * b, at.gen_tp * b + b))
        assert shards == set(whole)
    for group in topology.groups("gen_tp"):
        steps = {after - before for before, after in itertools.pairwise(topology.coordinate(rank).tp for rank in group)}
        assert steps <= {train.tp_size // gen.gen_tp_size}


@exact
@given(data=st.data())
def test_hybridflow_coordinates_are_quotients_and_rests(data, topologies) -> None:
    """Paper, section 5.3: a generation shard is a quotient; the rests number the micro-DP ranks, pp slower."""
    nested = topologies(generates=True).filter(lambda one: one.is_nested and one.grouping == "hybridflow")
    topology = data.draw(nested)
    pp_step = topology.train.pp_size // topology.generation.gen_pp_size
    tp_step = topology.train.tp_size // topology.generation.gen_tp_size
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert (at.gen_pp, at.gen_tp) == (at.pp // pp_step, at.tp // tp_step)
        assert at.micro_dp == (at.pp % pp_step) * tp_step + at.tp % tp_step


@exact
@given(data=st.data())
def test_vanilla_cuts_a_training_replica_into_consecutive_pieces(data, topologies) -> None:
    vanilla = topologies(generates=True).filter(lambda one: one.is_nested and one.grouping == "vanilla")
    topology = data.draw(vanilla)
    train, gen = topology.train, topology.generation
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        index = at.pp * train.tp_size + at.tp
        assert index == (at.micro_dp * gen.gen_pp_size + at.gen_pp) * gen.gen_tp_size + at.gen_tp


@exact
@given(data=st.data())
def test_unnested_sizes_use_consecutive_ranks(data, topologies) -> None:
    topology = data.draw(topologies(generates=True).filter(lambda topology: not topology.is_nested))
    size = topology.generation.replica_size
    assert topology.groups("gen_replica") == tuple(
        tuple(range(start, start + size)) for start in range(0, topology.world_size, size)
    )
    block = math.lcm(topology.train.pp_size * topology.train.tp_size, size)
    expected = [
        tuple(range(start + index, start + block, size))
        for start in range(0, topology.world_size, block)
        for index in range(size)
    ]
    assert topology.groups("micro_dp") == tuple(expected)


@exact
@given(data=st.data())
def test_groupings_agree_where_every_rank_generates_alone(data, topologies) -> None:
    topology = data.draw(topologies())
    alone = [Topology(topology.train, GenerationSpec(), topology.order, name) for name in ("hybridflow", "vanilla")]
    for axis in ("gen_tp", "gen_pp", "micro_dp", "gen_replica"):
        assert alone[0].groups(axis) == alone[1].groups(axis)


def _axis_size(topology: Topology, axis: str) -> int:
    train, gen = topology.train, topology.generation
    if axis == "gen_replica":
        return gen.replica_size
    if axis == "micro_dp":
        model = train.pp_size * train.tp_size
        return (model if topology.is_nested else math.lcm(model, gen.replica_size)) // gen.replica_size
    return getattr(gen if axis.startswith("gen") else train, f"{axis}_size")


def _position(topology: Topology, axis: str, rank: int) -> int:
    at = topology.coordinate(rank)
    if axis == "gen_replica":
        return at.gen_pp * topology.generation.gen_tp_size + at.gen_tp
    return getattr(at, axis)
