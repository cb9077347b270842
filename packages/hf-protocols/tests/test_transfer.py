from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_protocols import (
    DP,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    BatchError,
    Collection,
    ParallelSpec,
    PerRank,
    Piece,
    ProtocolError,
    Route,
    RowSelection,
    Topology,
    TransferProtocol,
    compute_held_rows,
    route,
    split_rows,
)

exact = settings(max_examples=200, derandomize=True)


# ------------------------------------------------------------------------------------------------------------ splitting


@exact
@given(num_chunks=st.integers(1, 20), more=st.integers(0, 60))
def test_chunks_are_consecutive_and_larger_first(num_chunks: int, more: int) -> None:
    num_rows = num_chunks + more
    chunks = split_rows(num_rows, num_chunks)
    assert [row for chunk in chunks for row in chunk] == list(range(num_rows))
    sizes = [len(chunk) for chunk in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert all(len(chunk.intervals) == 1 for chunk in chunks)


@exact
@given(
    weights=st.lists(st.integers(0, 4000) | st.floats(0, 1e6), min_size=1, max_size=40),
    num_chunks=st.integers(1, 12),
)
def test_weights_never_make_the_heaviest_chunk_heavier(weights: list[float], num_chunks: int) -> None:
    num_chunks = min(num_chunks, len(weights))
    plain, balanced = split_rows(len(weights), num_chunks), split_rows(len(weights), num_chunks, weights)
    assert [len(chunk) for chunk in balanced] == [len(chunk) for chunk in plain]
    assert sorted(row for chunk in balanced for row in chunk) == list(range(len(weights)))
    assert all(list(chunk) == sorted(chunk) for chunk in balanced)
    assert _heaviest(balanced, weights) <= _heaviest(plain, weights)
    assert balanced == split_rows(len(weights), num_chunks, weights)


def test_weights_even_out_a_tenfold_skew() -> None:
    weights = [2000] * 8 + [200] * 24
    plain, balanced = split_rows(32, 4), split_rows(32, 4, weights)
    assert _heaviest(plain, weights) == 16_000
    assert _heaviest(balanced, weights) == sum(weights) / 4 == 5200


def test_equal_weights_leave_the_rows_where_they_are() -> None:
    assert split_rows(10, 3, [7] * 10) == split_rows(10, 3)
    assert split_rows(10, 3, [0.0] * 10) == split_rows(10, 3)


def test_too_few_rows_are_refused_with_both_numbers_and_the_knob() -> None:
    message = r"3 rows cannot be shared by 4 ranks \(dp_size\).*at least 4 rows, or fewer ranks \(dp_size\)"
    with pytest.raises(BatchError, match=message):
        split_rows(3, 4, what="ranks (dp_size)")
    with pytest.raises(BatchError, match="5 rows cannot be split into 0 chunks"):
        split_rows(5, 0)


@pytest.mark.parametrize(
    "weights", [[], [1, 2], [1, 2, 3, 4], [1, -1, 1], [1, math.nan, 1], [1, math.inf, 1], [1e308] * 3]
)
def test_weights_are_one_finite_number_for_each_row(weights: list[float]) -> None:
    with pytest.raises(BatchError, match=r"one finite number >= 0 for each of the 3 rows"):
        split_rows(3, 2, weights)


def _heaviest(chunks: Sequence[RowSelection], weights: Sequence[float]) -> float:
    return max(math.fsum(weights[row] for row in chunk) for chunk in chunks)


# ------------------------------------------------------------------------------------------------------ who holds what


@exact
@given(data=st.data(), num_rows=st.integers(1, 40), times=st.integers(1, 3))
def test_shares_of_the_input_keep_its_order(data, num_rows: int, times: int) -> None:
    shares = _draw_holdings(data, num_rows)
    held = compute_held_rows(
        Collection(tuple(shares)), [shares[rank] for rank in sorted(shares)], num_rows, times=times
    )
    assert {rank: list(rows) for rank, rows in held.items()} == {
        rank: [row * times + copy for row in rows for copy in range(times)] for rank, rows in shares.items()
    }


def test_copies_of_the_input_follow_one_another() -> None:
    everything = [RowSelection.range(0, 3)] * 4
    assert compute_held_rows(Collection((2, 0)), everything, 3) == {
        2: RowSelection.range(0, 3),
        0: RowSelection.range(3, 6),
    }
    assert compute_held_rows(Collection((2, 0)), everything, 3, times=2) == {
        2: RowSelection.range(0, 6),
        0: RowSelection.range(6, 12),
    }


@pytest.mark.parametrize(
    "selections",
    [
        [[0, 1], [1, 2]],  # row 1 twice
        [[0], [2]],  # row 1 never
        [[1, 2], []],  # row 0 never
        [[0, 1, 2], [0, 1, 2]],
        [[0, 2, 1, 1], []],
    ],
)
def test_uneven_results_follow_in_collected_order(selections: list[list[int]]) -> None:
    held = compute_held_rows(Collection((0, 1)), [RowSelection.from_rows(rows) for rows in selections], 3)
    first = len(selections[0])
    assert held == {
        0: RowSelection.range(0, first),
        1: RowSelection.range(first, first + len(selections[1])),
    }


def test_a_rank_without_rows_gets_an_empty_selection() -> None:
    held = compute_held_rows(Collection((0, 1)), [RowSelection.range(0, 3), RowSelection()], 3)
    assert held == {0: RowSelection.range(0, 3), 1: RowSelection()}
    assert compute_held_rows(Collection((0,)), [RowSelection()], 0) == {0: RowSelection()}


# ------------------------------------------------------------------------------------------------------------ routing


@exact
@given(data=st.data(), num_rows=st.integers(1, 60))
def test_route_finds_what_a_look_up_row_by_row_finds(data, num_rows: int) -> None:
    held = _draw_holdings(data, num_rows)
    rows = st.lists(st.integers(0, num_rows - 1), max_size=80) | st.permutations(range(num_rows))
    wanted = data.draw(st.lists(rows, max_size=4))
    _check_route(held, [RowSelection.from_rows(one) for one in wanted])


@exact
@given(data=st.data(), num_rows=st.integers(1, 60), gap=st.integers(0, 500))
def test_route_finds_rows_in_long_intervals(data, num_rows: int, gap: int) -> None:
    """Stretched so that few long intervals are held, with rows between them that nobody holds."""
    length = 10
    held = {
        rank: RowSelection(tuple((row * (length + gap), row * (length + gap) + length) for row in rows))
        for rank, rows in _draw_holdings(data, num_rows).items()
    }
    rows = sorted(row for selection in held.values() for row in selection)
    wanted = data.draw(st.lists(st.lists(st.sampled_from(rows), max_size=60) | st.just(rows), max_size=3))
    _check_route(held, [RowSelection.from_rows(one) for one in wanted])


SPLITTING = (DP, THREE_D, THREE_D_ALL_MICRO_DP, THREE_D_PP_AS_DP)
WHOLE = (ONE_TO_ALL, RANK_ZERO, THREE_D_PP_ONLY)


@exact
@given(data=st.data(), extra=st.integers(0, 30), seed=st.integers(0, 2**32))
def test_rows_reach_the_consumers_ranks_once(data, topologies, extra: int, seed: int) -> None:
    """Any two groups and protocols, with token weights on either side or none: rows carry their logical number."""
    producers, consumers = data.draw(topologies(generates=True)), data.draw(topologies(generates=True))
    gives, takes = data.draw(st.sampled_from(SPLITTING)), data.draw(st.sampled_from((*SPLITTING, *WHOLE)))
    num_rows = max(producers.world_size, consumers.world_size) + extra
    rng = random.Random(seed)
    weights = [[rng.randint(1, 4000) for _ in range(num_rows)] if data.draw(st.booleans()) else None for _ in range(2)]
    made = gives.distribute(
        producers, num_rows, weights[0]
    )  # an identity worker: rank r has the rows that it was given
    held = compute_held_rows(gives.collect(producers), made, num_rows)
    wanted = takes.distribute(consumers, num_rows, weights[1])
    found = route(held, wanted)
    contents = {rank: list(made[rank]) for rank in held}
    received = [[contents[piece.producer][row] for piece in pieces for row in piece.rows] for pieces in found.pieces]
    assert received == [list(rows) for rows in wanted]
    assert found.bytes_moved(row_bytes=6) == 6 * sum(map(len, received))
    # Replicas apart, every row reaches the consumers exactly once.
    shares = {tuple(rows) for rows in received if rows}
    assert sorted(itertools.chain(*shares)) == list(range(num_rows))


def test_route_of_the_papers_three_to_two_example() -> None:
    """Section 4.1, Figure 5b: an actor of 1-2-3 feeds a critic of 2-1-2; the borders of the chunks do not meet."""
    actor = Topology(ParallelSpec.parse("1-2-3"))
    critic = Topology(ParallelSpec.parse("2-1-2"))
    collection = THREE_D.collect(actor)
    held = compute_held_rows(collection, THREE_D.distribute(actor, 6), 6)
    assert held == {0: RowSelection.range(0, 2), 2: RowSelection.range(2, 4), 4: RowSelection.range(4, 6)}
    found = route(held, THREE_D.distribute(critic, 6))
    first = (Piece(0, RowSelection.range(0, 2)), Piece(2, RowSelection.range(0, 1)))
    second = (Piece(2, RowSelection.range(1, 2)), Piece(4, RowSelection.range(0, 2)))
    assert found == Route((first, second, first, second))
    assert found.bytes_moved(10) == 120


def test_route_of_aligned_groups_is_one_piece_each() -> None:
    held = dict(enumerate(split_rows(12, 4)))
    found = route(held, split_rows(12, 4))
    assert found.pieces == tuple((Piece(rank, RowSelection.range(0, 3)),) for rank in range(4))


def test_a_row_may_be_wanted_twice_and_by_nobody() -> None:
    held = {7: RowSelection.from_rows([2, 0, 1])}
    found = route(held, [RowSelection.from_rows([1, 1, 2]), RowSelection()])
    assert found.pieces == ((Piece(7, RowSelection.from_rows([2, 2, 0])),), ())
    assert route({}, []) == Route(())


def test_route_costs_intervals_and_not_rows() -> None:
    far = 10**15  # row by row this would never end
    held = {0: RowSelection.range(far // 2, far), 1: RowSelection.range(0, far // 2)}
    found = route(held, split_rows(far, 3))
    assert found.bytes_moved(1) == far
    assert [piece.producer for pieces in found.pieces for piece in pieces] == [1, 1, 0, 0]


def test_route_of_many_scattered_rows() -> None:
    rng = random.Random(0)

    def shuffle(num_ranks: int) -> list[RowSelection]:
        rows = RowSelection.from_rows(rng.sample(range(5000), 5000))
        return [rows.take(chunk) for chunk in split_rows(5000, num_ranks)]

    _check_route(dict(enumerate(shuffle(8))), shuffle(7))


# Few rows in one piece are looked up in a table, long intervals by bisection: both refuse the same things.
shapes = pytest.mark.parametrize("length", [1, 1000], ids=["scattered", "intervals"])


@shapes
def test_a_row_held_twice_is_refused(length: int) -> None:
    held = {3: RowSelection.range(0, 2 * length), 5: RowSelection.range(length, 3 * length)}
    with pytest.raises(ProtocolError, match=f"row {length} is held twice, by producer ranks 3 and 5"):
        route(held, [])
    with pytest.raises(ProtocolError, match="row 0 is held twice, by producer ranks 4 and 4"):
        route({4: RowSelection(((0, length), (0, length)))}, [])


@shapes
@pytest.mark.parametrize("row", [0, 5, 9, 10**6])
def test_a_row_that_nobody_holds_is_refused(length: int, row: int) -> None:
    held = {0: RowSelection.range(length, 5 * length), 1: RowSelection.range(6 * length, 9 * length)}
    with pytest.raises(ProtocolError, match=f"row {row * length} is wanted by a consumer and held by no producer"):
        route(held, [RowSelection.range(length, length + 1), RowSelection.range(row * length, row * length + 1)])
    with pytest.raises(ProtocolError, match=f"row {5 * length} is wanted"):
        route(held, [RowSelection.range(length, 9 * length)])


def test_nothing_held_serves_nobody() -> None:
    with pytest.raises(ProtocolError, match="row 0 is wanted"):
        route({}, [RowSelection.range(0, 1)])
    with pytest.raises(ProtocolError, match="row 4 is wanted"):
        route({0: RowSelection()}, [RowSelection.range(4, 5)])


def _draw_holdings(data, num_rows: int) -> dict[int, RowSelection]:
    """The rows in any order, split among ranks 0, 1, ...; some ranks may stay empty."""
    order = data.draw(st.just(list(range(num_rows))) | st.permutations(range(num_rows)))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=6)))
    borders = list(zip([0, *cuts], [*cuts, num_rows], strict=True))
    ranks = data.draw(st.permutations(range(len(borders))))
    return {rank: RowSelection.from_rows(order[start:stop]) for rank, (start, stop) in zip(ranks, borders, strict=True)}


def _check_route(held: Mapping[int, RowSelection], wanted: Sequence[RowSelection]) -> None:
    place = {row: (rank, local) for rank, rows in held.items() for local, row in enumerate(rows)}
    found = route(held, wanted)
    assert found == route(held, wanted)
    assert len(found.pieces) == len(wanted)
    for pieces, rows in zip(found.pieces, wanted, strict=True):
        assert [(piece.producer, local) for piece in pieces for local in piece.rows] == [place[row] for row in rows]
        producers = [piece.producer for piece in pieces]
        assert all(before != after for before, after in itertools.pairwise(producers))
    assert found.bytes_moved(3) == 3 * sum(map(len, wanted))


# ------------------------------------------------------------------------------------------------------- small values


def test_a_protocol_shows_its_name() -> None:
    assert repr(THREE_D) == "TransferProtocol('3D_PROTO')"
    mine = TransferProtocol(name="mine", distribute=THREE_D.distribute, collect=THREE_D.collect)
    assert mine != THREE_D


def test_per_rank_holds_its_items() -> None:
    assert PerRank(["a", "b"]).items == ["a", "b"]
    for items in (3, None, {"a": 1}):
        with pytest.raises(ProtocolError, match=f"^PerRank's items={items!r}. Use a list with one item"):
            PerRank(items)


def test_a_piece_names_its_fields() -> None:
    piece = Piece(producer=2, rows=RowSelection.range(0, 3))
    assert (piece.producer, len(piece.rows)) == (2, 3)


@pytest.mark.parametrize("wrong", [6.0, "6", True, None, -1])
def test_rows_to_split_are_counted(wrong: object) -> None:
    with pytest.raises(BatchError, match=r"^num_rows=.* must be a whole number of at least 0"):
        split_rows(wrong, 2)  # type: ignore[arg-type]
    if wrong not in (True, -1):
        with pytest.raises(BatchError, match=r"^chunks=.*. Use a whole number of them"):
            split_rows(6, wrong)  # type: ignore[arg-type]


def test_a_word_is_not_a_list_of_items() -> None:
    with pytest.raises(ProtocolError, match=r"^PerRank's items='abc'. Use a list with one item for each rank"):
        PerRank("abc")


ROWS = RowSelection.range(0, 3)


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        (None, [ROWS], "route: held=None. Use a mapping of producer ranks to RowSelections"),
        ([ROWS], [ROWS], "route: held=.*. Use a mapping of producer ranks to RowSelections"),
        ({0: [1]}, [ROWS], r"route: held\[0\]=\[1\]. Use a RowSelection"),
        ({0: ROWS}, None, "route: wanted=None. Use a list of RowSelections"),
        ({0: ROWS}, ROWS, "route: wanted=.*. Use a list of RowSelections"),
        ({0: ROWS}, [[1]], r"route: wanted\[0\]=\[1\]. Use a RowSelection"),
    ],
)
def test_route_refuses_other_kinds(held: Any, wanted: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{message}"):
        route(held, wanted)


def test_rows_go_to_ranks_that_are_called() -> None:
    spread = TransferProtocol("spread", DP.distribute, RANK_ZERO.collect, called="collected")
    with pytest.raises(ProtocolError, match=r"'spread' with 4 rows: rank 1 gets row \[2\], and is not called"):
        spread.distribute(Topology(ParallelSpec(dp_size=2)), 4)
    with pytest.raises(ProtocolError, match=r"called='some'. Use"):
        TransferProtocol("wrong", DP.distribute, DP.collect, called="some")


# ------------------------------------------------------------------------------------------------ sizes before the rows

HUGE = 10**12


class Untouched(Sequence[float]):
    """Weights whose number may be asked, and nothing else."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a row was looked at")


def far(topology: Topology, num_rows: int, weights: object = None) -> list[RowSelection]:
    return [RowSelection.range(0, HUGE)] * topology.world_size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_rows(HUGE, HUGE), rf"^{HUGE} chunks are more than 1048576\. Use fewer$"),
        (lambda: split_rows(2**70, 4), f"^num_rows={2**70} must be at most 9223372036854775807$"),
        (lambda: split_rows(8, 2, Untouched()), "^weights=.*. Use one finite number >= 0 for each of the 8 rows$"),
        (lambda: split_rows(HUGE, 2, [1.0, 2.0]), rf"^weights=\[1.0, 2.0\]. Use one .* of the {HUGE} rows$"),
        (lambda: DP.distribute(Topology(ParallelSpec(dp_size=2)), 8, Untouched()), "^weights=.* each of the 8 rows$"),
        (lambda: ONE_TO_ALL.distribute(Topology(ParallelSpec(dp_size=2)), 4, [1.0]), "^weights=.* of the 4 rows$"),
        (lambda: RANK_ZERO.distribute(Topology(ParallelSpec(dp_size=2)), -1), "^num_rows=-1 must be a whole number"),
        (lambda: route({0: RowSelection.from_rows([0, 2])}, [RowSelection.range(4, HUGE)]), "^row 4 is wanted by"),
        (lambda: route({0: RowSelection.from_rows([0, 2])}, [RowSelection(((0, 1), (9, HUGE)))]), "^row 9 is wanted"),
        (lambda: route({0: RowSelection(((0, 10**5),) * 10**5)}, []), "^row 0 is held twice, by producer ranks 0 and"),
        (
            lambda: TransferProtocol("far", far, lambda _: Collection((0,))).distribute(Topology(ParallelSpec()), 5),
            r"rank 0 gets row \[5\], which does not exist$",
        ),
        (
            lambda: compute_held_rows(Collection((0, 5)), [RowSelection.range(0, 3)], 3),
            r"^the collected ranks \(0, 5\) need a selection each, got 1",
        ),
        (lambda: compute_held_rows(Collection((0,)), None, 3), "^selections=None. Use a RowSelection for each rank"),  # type: ignore[arg-type]
        (lambda: compute_held_rows(Collection((0,)), [[1]], 3), r"^selections\[0\]=\[1\]. Use a RowSelection"),  # type: ignore[list-item]
        (lambda: compute_held_rows(None, [RowSelection()], 3), "^collection=None. Use what a protocol"),  # type: ignore[arg-type]
        (
            lambda: compute_held_rows(Collection((0,)), [RowSelection.range(0, 10)], 3),
            r"^selections\[0\] has row 9, num_rows=3\. Use rows of the input",
        ),
        (lambda: split_rows(3, -(10**5000)), r"^3 rows cannot be split into \(int that cannot be shown\) chunks"),
        (lambda: split_rows(3, 2, {1, 2, 3}), r"^weights=\{1, 2, 3\}. Use one finite number"),  # type: ignore[arg-type]
        (lambda: split_rows(3, 2, {0: 1, 1: 2, 2: 3}), r"^weights=\{0: 1, 1: 2, 2: 3\}. Use one"),  # type: ignore[arg-type]
        (lambda: split_rows(3, 2, b"abc"), "^weights=b'abc'. Use one finite number"),
        (lambda: RowSelection.range(0, 10).repeat(-(10**5000)), r"^rows cannot be repeated \(int that cannot"),
        (lambda: compute_held_rows(Collection((0,)), [RowSelection()], 3, times=0), "^times=0 must be a whole number"),
    ],
)  # fmt: skip
def test_sizes_are_refused_before_any_row(call: Any, message: str) -> None:
    with pytest.raises((BatchError, ProtocolError), match=message):
        call()


def test_huge_sizes_that_fit_cost_no_rows() -> None:
    topology = Topology(ParallelSpec(dp_size=4))
    chunks = DP.distribute(topology, HUGE)
    assert [len(chunk) for chunk in chunks] == [HUGE // 4] * 4
    pieces = route(dict(enumerate(chunks)), [RowSelection.range(0, HUGE)]).pieces[0]
    assert [(piece.producer, len(piece.rows)) for piece in pieces] == [(rank, HUGE // 4) for rank in range(4)]
