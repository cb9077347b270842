from __future__ import annotations

import pytest

import hf_protocols
from hf_protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    BatchError,
    Collection,
    GenerationSpec,
    ParallelSpec,
    ProtocolError,
    Topology,
    TopologyError,
    TransferProtocol,
    compute_held_rows,
)

# pp 2, tp 2, dp 2, "contiguous": rank = 4 dp + 2 pp + tp.
EIGHT = Topology(ParallelSpec(pp_size=2, tp_size=2, dp_size=2), GenerationSpec(gen_tp_size=2), order="contiguous")


def rows(protocol: TransferProtocol, topology: Topology, num_rows: int) -> list[list[int]]:
    return [list(selection) for selection in protocol.distribute(topology, num_rows)]


def test_there_are_eight_with_the_papers_names() -> None:
    found = [value for value in vars(hf_protocols).values() if isinstance(value, TransferProtocol)]
    assert sorted(protocol.name for protocol in found) == [
        "3D_ALL_MICRO_DP",
        "3D_PP_AS_DP",
        "3D_PP_ONLY",
        "3D_PROTO",
        "ALL_TO_ALL",
        "DP_PROTO",
        "ONE_TO_ALL",
        "RANK_ZERO",
    ]


def test_one_to_all() -> None:
    assert rows(ONE_TO_ALL, EIGHT, 3) == [[0, 1, 2]] * 8
    assert ONE_TO_ALL.collect(EIGHT) == Collection(tuple(range(8)), "list")


def test_rank_zero() -> None:
    assert rows(RANK_ZERO, EIGHT, 3) == [[0, 1, 2], *[[]] * 7]
    assert RANK_ZERO.collect(EIGHT) == Collection((0,), "concat")


def test_all_to_all() -> None:
    assert rows(ALL_TO_ALL, EIGHT, 8) == [[rank] for rank in range(8)]
    assert ALL_TO_ALL.collect(EIGHT) == Collection(tuple(range(8)), "list")
    with pytest.raises(ProtocolError, match="7 items for 8 ranks"):
        ALL_TO_ALL.distribute(EIGHT, 7)


def test_dp() -> None:
    assert rows(DP, EIGHT, 10) == [[0, 1], [2, 3], [4], [5], [6], [7], [8], [9]]
    assert DP.collect(EIGHT) == Collection(tuple(range(8)), "concat")


def test_three_d() -> None:
    assert rows(THREE_D, EIGHT, 5) == [[0, 1, 2]] * 4 + [[3, 4]] * 4
    assert THREE_D.collect(EIGHT) == Collection((2, 6), "concat")
    megatron = Topology(EIGHT.train)  # rank = 4 pp + 2 dp + tp
    assert rows(THREE_D, megatron, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]] * 2
    assert THREE_D.collect(megatron) == Collection((4, 6), "concat")


def test_three_d_asks_one_context_parallel_rank() -> None:
    topology = Topology(ParallelSpec(tp_size=2, cp_size=2, dp_size=2))  # rank = 4 dp + 2 cp + tp
    assert rows(THREE_D, topology, 2) == [[0]] * 4 + [[1]] * 4
    assert THREE_D.collect(topology) == Collection((0, 4), "concat")


def test_three_d_all_micro_dp() -> None:
    # gen_tp groups (0,1) (2,3) (4,5) (6,7): pp 2 became 2 generation replicas of each training replica.
    assert rows(THREE_D_ALL_MICRO_DP, EIGHT, 5) == [[0, 1]] * 2 + [[2]] * 2 + [[3]] * 2 + [[4]] * 2
    assert THREE_D_ALL_MICRO_DP.collect(EIGHT) == Collection((0, 2, 4, 6), "concat")


def test_three_d_all_micro_dp_numbers_the_replicas_of_figure_8() -> None:
    topology = Topology(ParallelSpec.parse("1-4-2"), GenerationSpec.parse("1-2"), order="contiguous")
    # gen_tp groups (0,2) (1,3) (4,6) (5,7)
    assert rows(THREE_D_ALL_MICRO_DP, topology, 4) == [[0], [1], [0], [1], [2], [3], [2], [3]]
    assert THREE_D_ALL_MICRO_DP.collect(topology) == Collection((0, 1, 4, 5), "concat")


def test_three_d_all_micro_dp_goes_by_replica_and_not_by_rank() -> None:
    # rank = 4 pp + 2 dp + tp; replica number = dp * 2 + micro_dp, where micro_dp = pp.
    topology = Topology(EIGHT.train, EIGHT.generation, order="megatron")
    assert rows(THREE_D_ALL_MICRO_DP, topology, 4) == [[0], [0], [2], [2], [1], [1], [3], [3]]
    assert THREE_D_ALL_MICRO_DP.collect(topology) == Collection((0, 4, 2, 6), "concat")


def test_three_d_all_micro_dp_counts_context_parallel_replicas() -> None:
    # rank = 4 dp + 2 cp + tp; replica number = (dp * 2 + cp) * 2 + micro_dp, where micro_dp = tp.
    topology = Topology(ParallelSpec(tp_size=2, cp_size=2, dp_size=2), GenerationSpec())
    assert rows(THREE_D_ALL_MICRO_DP, topology, 8) == [[rank] for rank in range(8)]


def test_three_d_all_micro_dp_of_fsdp() -> None:
    topology = Topology(ParallelSpec(dp_size=4), GenerationSpec(gen_tp_size=2))
    assert rows(THREE_D_ALL_MICRO_DP, topology, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert THREE_D_ALL_MICRO_DP.collect(topology) == Collection((0, 2), "concat")


def test_three_d_all_micro_dp_needs_a_generation_layout() -> None:
    topology = Topology(ParallelSpec(dp_size=2))
    with pytest.raises(TopologyError, match="no generation layout"):
        THREE_D_ALL_MICRO_DP.distribute(topology, 4)
    with pytest.raises(TopologyError, match="no generation layout"):
        THREE_D_ALL_MICRO_DP.collect(topology)


def test_three_d_pp_only() -> None:
    assert rows(THREE_D_PP_ONLY, EIGHT, 3) == [[0, 1, 2]] * 8
    assert THREE_D_PP_ONLY.collect(EIGHT) == Collection((0, 2), "concat")


def test_three_d_pp_as_dp() -> None:
    assert rows(THREE_D_PP_AS_DP, EIGHT, 4) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert THREE_D_PP_AS_DP.collect(EIGHT) == Collection((0, 2, 4, 6), "concat")
    megatron = Topology(EIGHT.train)  # rank = 4 pp + 2 dp + tp; chunk = 2 dp + pp
    assert rows(THREE_D_PP_AS_DP, megatron, 4) == [[0], [0], [2], [2], [1], [1], [3], [3]]
    assert THREE_D_PP_AS_DP.collect(megatron) == Collection((0, 4, 2, 6), "concat")


@pytest.mark.parametrize(
    ("protocol", "chunks", "knob"),
    [
        (DP, 8, "world_size"),
        (THREE_D, 2, "dp_size"),
        (THREE_D_ALL_MICRO_DP, 4, "gen_tp_size"),
        (THREE_D_PP_AS_DP, 4, r"dp_size \* pp_size"),
    ],
)
def test_fewer_rows_than_chunks_names_both_numbers_and_the_knob(
    protocol: TransferProtocol, chunks: int, knob: str
) -> None:
    with pytest.raises(BatchError, match=rf"{chunks - 1} rows cannot be shared by {chunks} .*{knob}"):
        protocol.distribute(EIGHT, chunks - 1)


@pytest.mark.parametrize("protocol", [DP, THREE_D, THREE_D_ALL_MICRO_DP, THREE_D_PP_AS_DP])
def test_token_weights_balance_ranks_and_keep_result_order(protocol: TransferProtocol) -> None:
    weights = [1000] * 12 + [100] * 28
    plain, balanced = (protocol.distribute(EIGHT, 40, given) for given in (None, weights))

    def heaviest(split: list) -> int:
        return max(sum(weights[row] for row in rows) for rows in split)

    assert heaviest(balanced) < heaviest(plain)
    held = compute_held_rows(protocol.collect(EIGHT), balanced, 40)
    assert sorted(row for selection in held.values() for row in selection) == list(range(40))
    assert all(held[rank] == balanced[rank] for rank in held)
