"""The groups of the paper's examples, and what no topology can be made of."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest

from hf_protocols import Axis, GenerationSpec, ParallelSpec, Topology, TopologyError


def layout(train: str, generation: str, order: str = "contiguous", grouping: str = "hybridflow") -> Topology:
    return Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation), order, grouping)


def from_one(*groups: str) -> tuple[tuple[int, ...], ...]:
    """Groups as the paper prints them, "13" for ranks 1 and 3, counted from 1."""
    return tuple(tuple(int(rank) - 1 for rank in group) for group in groups)


# ------------------------------------------------------------------------------------------------- the paper's examples


def test_figure_8_groups() -> None:
    topology = layout("1-4-2", "1-2")
    assert topology.groups("tp") == from_one("1234", "5678")
    assert topology.groups("dp") == from_one("15", "26", "37", "48")
    assert topology.groups("gen_tp") == from_one("13", "24", "57", "68")
    assert topology.groups("micro_dp") == from_one("12", "34", "56", "78")
    assert topology.micro_dp_size == 2
    assert topology.num_gen_replicas == 4


def test_figure_8_groups_of_hybridflow_v(holds_training_shard: Callable[[Topology, int], bool]) -> None:
    topology = layout("1-4-2", "1-2", grouping="vanilla")
    assert topology.groups("gen_tp") == from_one("12", "34", "56", "78")
    assert topology.groups("micro_dp") == from_one("13", "24", "57", "68")
    apart = [rank + 1 for rank in range(8) if not holds_training_shard(topology, rank)]
    assert apart == [2, 3, 6, 7]


def test_figure_7_groups() -> None:
    topology = layout("1-2-2", "1-1")
    assert topology.groups("micro_dp") == ((0, 1), (2, 3))
    assert topology.groups("gen_tp") == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("train", "generation", "axis", "groups"),
    [
        ("2-4-1", "1-2", "gen_tp", ("13", "24", "57", "68")),
        ("2-4-1", "1-2", "micro_dp", ("1256", "3478")),
        ("4-2-1", "2-1", "gen_pp", ("15", "26", "37", "48")),
        ("4-2-1", "2-1", "micro_dp", ("1234", "5678")),
    ],
)
@pytest.mark.parametrize("order", ["contiguous", "megatron"])
def test_groups_where_both_sizes_shrink(
    train: str, generation: str, axis: Axis, groups: tuple[str, ...], order: str
) -> None:
    assert layout(train, generation, order).groups(axis) == from_one(*groups)


def test_megatron_order_spreads_a_replica_over_the_ranks() -> None:
    topology = layout("2-2-2", "1-2", "megatron")
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("micro_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_fsdp_replicas_are_consecutive() -> None:
    topology = layout("1-1-8", "1-2", "megatron")
    assert not topology.is_nested
    assert topology.groups("gen_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("micro_dp") == tuple((rank,) for rank in range(8))


def test_unnested_sizes_share_blocks_of_the_lcm() -> None:
    topology = layout("1-2-6", "1-3", "megatron")
    assert topology.groups("gen_tp") == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    assert topology.groups("micro_dp") == ((0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11))


def test_context_parallel_ranks_become_replicas_of_their_own() -> None:
    train = ParallelSpec(tp_size=2, cp_size=2)
    topology = Topology(train, GenerationSpec(gen_tp_size=2))
    assert topology.groups("cp") == ((0, 2), (1, 3))
    assert topology.groups("gen_replica") == ((0, 1), (2, 3))
    assert topology.micro_dp_size == 1


def test_expert_groups_are_consecutive_data_and_context_ranks() -> None:
    topology = Topology(ParallelSpec(tp_size=2, dp_size=2, cp_size=2, ep_size=2))
    assert topology.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    whole = Topology(ParallelSpec(tp_size=2, dp_size=2, cp_size=2, ep_size=4))
    assert whole.groups("ep") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_the_defaults_are_megatron_and_hybridflow() -> None:
    train, generation = ParallelSpec.parse("2-4-2"), GenerationSpec.parse("1-2")
    default = Topology(train, generation)
    assert default == Topology(train, generation, order="megatron", grouping="hybridflow")
    assert default != Topology(train, generation, order="contiguous")
    assert default != Topology(train, generation, grouping="vanilla")


# ------------------------------------------------------------------------------------------------- specs and errors


def test_specs_parse_what_the_paper_writes() -> None:
    assert ParallelSpec.parse("1-8-2") == ParallelSpec(pp_size=1, tp_size=8, dp_size=2)
    assert str(ParallelSpec.parse("1-8-2")) == "1-8-2" and str(GenerationSpec.parse("1-2")) == "1-2"
    assert str(ParallelSpec(tp_size=2, dp_size=4, cp_size=2, ep_size=8)) == "1-2-4 cp 2 ep 8"
    assert ParallelSpec.parse("1-8-2").world_size == 16
    assert ParallelSpec(pp_size=2, tp_size=2, dp_size=2, cp_size=3, ep_size=6).world_size == 24
    assert GenerationSpec.parse("2-4") == GenerationSpec(gen_pp_size=2, gen_tp_size=4)
    assert GenerationSpec.parse("2-4").replica_size == 8


@pytest.mark.parametrize("text", ["", "1-8", "1-8-2-4", "1-x-2", "1--2", "-1-8-2", "1.0-8-2", "1-8-\u00b2"])
def test_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="pp-tp-dp"):
        ParallelSpec.parse(text)
    with pytest.raises(TopologyError, match="pp-tp"):
        GenerationSpec.parse(text + "-" + text)


def test_what_is_not_text_is_refused() -> None:
    for parse, form in ((ParallelSpec.parse, "pp-tp-dp, such as 1-8-2"), (GenerationSpec.parse, "pp-tp, such as 1-2")):
        with pytest.raises(TopologyError, match=f"^3 is not of the form {form}$"):
            parse(3)


def test_a_topology_is_made_of_specs() -> None:
    for train in ("1-2-2", None, GenerationSpec()):
        with pytest.raises(TopologyError, match=f"^train={re.escape(repr(train))}. Use a ParallelSpec, such as "):
            Topology(train)
    for generation in ("1-2", ParallelSpec()):
        with pytest.raises(TopologyError, match=f"^generation={re.escape(repr(generation))}. Use a GenerationSpec"):
            Topology(ParallelSpec(), generation)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_a_size_is_a_whole_number_of_at_least_one(size: object) -> None:
    with pytest.raises(TopologyError, match=r"tp_size=.*at least 1"):
        ParallelSpec(tp_size=size)
    with pytest.raises(TopologyError, match=r"gen_tp_size=.*at least 1"):
        GenerationSpec(gen_tp_size=size)


def test_experts_must_divide_the_data_and_context_ranks() -> None:
    with pytest.raises(TopologyError, match=r"ep_size=4 does not divide dp_size \* cp_size = 3 \* 2"):
        ParallelSpec(dp_size=3, cp_size=2, ep_size=4)


def test_replicas_must_divide_the_ranks() -> None:
    with pytest.raises(TopologyError, match=r"8 ranks cannot be split .* 1 \* 3 = 3 ranks. Choose sizes"):
        layout("1-4-2", "1-3")


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(TopologyError, match=r"order='row' is not one of 'megatron', 'contiguous'"):
        Topology(ParallelSpec(), order="row")
    with pytest.raises(TopologyError, match=r"grouping='flow' is not one of 'hybridflow', 'vanilla'"):
        Topology(ParallelSpec(), grouping="flow")
    with pytest.raises(TopologyError, match=r"axis='sp' is not one of 'tp', 'pp'"):
        Topology(ParallelSpec()).groups("sp")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_topology_is_refused(rank: int) -> None:
    topology = layout("1-4-2", "1-2")
    with pytest.raises(TopologyError, match=f"rank {rank} is not among the 8 ranks"):
        topology.coordinate(rank)
    with pytest.raises(TopologyError, match=f"rank {rank} is not among"):
        topology.group_of("tp", rank)


def test_a_coordinate_outside_its_axis_is_refused() -> None:
    with pytest.raises(TopologyError, match="tp=4 is not among the tp_size=4"):
        layout("1-4-2", "1-2").rank(tp=4)


@pytest.mark.parametrize("axis", ["gen_tp", "gen_pp", "micro_dp", "gen_replica"])
def test_generation_axes_need_a_generation_layout(axis: Axis) -> None:
    topology = Topology(ParallelSpec(tp_size=2))
    assert topology.coordinate(1).gen_replica is None
    with pytest.raises(TopologyError, match="no generation layout"):
        topology.groups(axis)
    with pytest.raises(TopologyError, match="no generation layout"):
        _ = topology.num_gen_replicas


def test_a_pickled_topology_carries_its_sizes_alone() -> None:
    topology = Topology(ParallelSpec(tp_size=8, dp_size=128), GenerationSpec(gen_tp_size=2))
    topology.groups("micro_dp")
    text = pickle.dumps(topology)
    assert len(text) < 1000
    assert pickle.loads(text) == topology
    assert hash(pickle.loads(text)) == hash(topology)


@pytest.mark.parametrize("wrong", [1.0, "1", None])
def test_ranks_and_coordinates_are_whole_numbers(wrong: object) -> None:
    topology = Topology(ParallelSpec(tp_size=2))
    with pytest.raises(TopologyError, match=r"^rank=.*. Use a whole number"):
        topology.coordinate(wrong)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=r"^tp=.*. Use a whole number"):
        topology.rank(tp=wrong)  # type: ignore[arg-type]


def test_a_truth_value_is_not_a_rank() -> None:
    with pytest.raises(TopologyError, match=r"rank=True. Use a whole number"):
        Topology(ParallelSpec(dp_size=2)).coordinate(True)


def test_a_size_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"^'1-1-9{60,80}\.\.\. is not of the form pp-tp-dp, such as 1-8-2$"):
        ParallelSpec.parse("1-1-" + "9" * 5000)
