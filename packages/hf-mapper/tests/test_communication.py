from __future__ import annotations

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu
from hf_mapper.simulators.communication import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    build_link,
    build_stage_link,
    expert_exchange_s,
    point_to_point_s,
    round_trip_s,
)
from hf_mapper.simulators.layouts import Layouts
from hf_protocols import ConfigError, ModelShape


def build_cluster(num_machines: int = 1) -> ClusterSpec:
    machine = MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=num_machines)
    return ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9)


def test_a_link_inside_a_machine_is_the_gpus_own() -> None:
    link = build_link(build_cluster(2), num_ranks=8, stride=1, world_size=16)
    assert link.bandwidth_bytes_per_s == pytest.approx(0.71 * 300e9)
    assert link.latency_s == 1.25e-5


@pytest.mark.parametrize(
    ("num_ranks", "stride", "crossing"),
    [(16, 1, 1), (2, 8, 8), (4, 8, 8), (8, 2, 2), (2, 64, 8)],
    ids=["all", "pairs", "quads", "every second", "far pairs"],
)
def test_groups_that_cross_together_share_the_network(num_ranks: int, stride: int, crossing: int) -> None:
    """`crossing`: how many groups leave a machine of 8, counted by hand."""
    link = build_link(build_cluster(16), num_ranks=num_ranks, stride=stride, world_size=128)
    assert link.bandwidth_bytes_per_s == pytest.approx(0.71 * 25e9 / crossing)
    assert link.latency_s == 1e-5


def test_more_ranks_than_the_machine_has_are_refused() -> None:
    alone = ClusterSpec(machines=(MachineSpec(gpu=gpu("a100-80"), num_gpus=8),))
    with pytest.raises(ConfigError, match="16 ranks do not fit the one machine of 8 devices"):
        build_link(alone, num_ranks=16, stride=1, world_size=16)


def test_collectives_cost_what_a_ring_moves() -> None:
    link = build_link(build_cluster(), num_ranks=4, stride=1, world_size=4)
    num_bytes = 1e9
    assert all_gather_s(link, num_bytes) == pytest.approx(2 * 1.25e-5 + 0.75e9 / 213e9)
    assert all_reduce_s(link, num_bytes) == pytest.approx(2 * all_gather_s(link, num_bytes))
    assert point_to_point_s(link, num_bytes) == pytest.approx(1.25e-5 + 1e9 / 213e9)
    alone = build_link(build_cluster(), num_ranks=1, stride=1, world_size=4)
    assert all_gather_s(alone, num_bytes) == all_reduce_s(alone, num_bytes) == point_to_point_s(alone, num_bytes) == 0


def test_an_exchange_gives_away_all_but_ones_own_part() -> None:
    link = build_link(build_cluster(), num_ranks=4, stride=1, world_size=4)
    assert all_to_all_s(link, 1e9) == pytest.approx(1.25e-5 + 0.75e9 / 213e9)
    alone = build_link(build_cluster(), num_ranks=1, stride=1, world_size=4)
    assert all_to_all_s(alone, 1e9) == 0


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "seconds_per_byte", "latency_s"),
    [
        (1, 1, 0.0, 0.0),
        (1, 8, 7 / 8 / (0.71 * 300e9), 1.25e-5),
        (2, 4, 3 / 4 / 2 / (0.71 * 300e9), 1.25e-5),
        (2, 8, 7 / 8 / 2 / (0.71 * 25e9 / 8), 1e-5),
    ],
    ids=["none", "a machine", "tensor groups in a machine", "two machines, whose eight ranks all send"],
)
def test_tokens_travel_to_their_experts_and_back(
    tp_size: int, ep_size: int, seconds_per_byte: float, latency_s: float
) -> None:
    """Each token goes to two experts of Mixtral in 16 bits, 4096 numbers, and comes back."""
    mixtral = ModelShape.preset("mixtral-8x7b")
    workload = WorkloadSpec(global_batch=64, prompt_tokens=8, response_tokens=8)
    layouts = Layouts(pp_size=1, tp_size=tp_size, dp_size=16 // tp_size, world_size=16, fsdp=False, ep_size=ep_size)
    found = expert_exchange_s(mixtral, build_cluster(2), layouts, workload, 1000)
    assert found == pytest.approx(2 * (latency_s + 1000 * 2 * 4096 * 2 * seconds_per_byte))


@pytest.mark.parametrize(
    ("pp_size", "tp_size", "crossing"),
    [(2, 4, None), (4, 4, 4), (2, 8, 8), (4, 2, None), (8, 2, 2)],
    ids=["in a machine", "two stages to a machine", "a stage to a machine", "four in a machine", "four to a machine"],
)
def test_a_stage_sends_over_its_slowest_hop(pp_size: int, tp_size: int, crossing: int | None) -> None:
    """`crossing`: the ranks of a machine of 8 that send to another one at once, those of its last stage."""
    layouts = Layouts(pp_size=pp_size, tp_size=tp_size, dp_size=1, world_size=pp_size * tp_size, fsdp=False)
    link = build_stage_link(build_cluster(4), layouts)
    expected = 0.71 * 300e9 if crossing is None else 0.71 * 25e9 / crossing
    assert link.bandwidth_bytes_per_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pp_size", "tp_size", "near", "far"), [(1, 8, 0, 0), (4, 2, 4, 0), (8, 2, 6, 2), (4, 8, 0, 4), (16, 2, 12, 4)]
)
def test_a_token_goes_through_every_stage_in_turn(pp_size: int, tp_size: int, near: int, far: int) -> None:
    """`near` and `far`: hops inside a machine of 8 and between two, the last back to the first stage."""
    layouts = Layouts(pp_size=pp_size, tp_size=tp_size, dp_size=1, world_size=pp_size * tp_size, fsdp=False)
    seconds = near * (1.25e-5 + 1e6 / (0.71 * 300e9)) + far * (1e-5 + 1e6 / (0.71 * 25e9 / tp_size))
    assert round_trip_s(build_cluster(4), layouts, 1e6) == pytest.approx(seconds)
