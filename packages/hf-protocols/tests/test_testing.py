from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_protocols.testing
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
    ParallelSpec,
    ProtocolError,
    Route,
    RowSelection,
    Topology,
    TransferProtocol,
    split_rows,
)
from hf_protocols.testing import check_transfer_protocol

laws = settings(max_examples=150, derandomize=True)
FOUR = Topology(ParallelSpec(tp_size=2, dp_size=2))


# ------------------------------------------------------------------------------------- the eight, on any topology


@laws
@given(data=st.data(), more=st.integers(0, 20), weighted=st.booleans())
def test_the_protocols_that_split_obey_the_laws(data, topologies, more: int, weighted: bool) -> None:
    topology = data.draw(topologies(generates=True))
    train = topology.train
    splits = {
        DP: (train.world_size, ()),
        THREE_D: (train.dp_size, ("tp", "pp", "cp")),
        THREE_D_ALL_MICRO_DP: (topology.num_gen_replicas, ("gen_tp", "gen_pp", "gen_replica")),
        THREE_D_PP_AS_DP: (train.dp_size * train.pp_size, ("tp", "cp")),
    }
    for protocol, (num_chunks, axes) in splits.items():
        num_rows = num_chunks + more
        weights = data.draw(st.none() | st.lists(st.integers(0, 99), min_size=num_rows, max_size=num_rows))
        weights = weights if weighted else None
        check_transfer_protocol(protocol, topology, num_rows, weights=weights, replicated_over=axes)
        if num_chunks > 1:
            with pytest.raises(BatchError, match=f"{num_chunks - 1} rows cannot be shared by {num_chunks} "):
                protocol.distribute(topology, num_chunks - 1)


@laws
@given(data=st.data(), num_rows=st.integers(0, 30))
def test_the_protocols_that_do_not_split_obey_the_laws(data, topologies, num_rows: int) -> None:
    topology = data.draw(topologies())
    everywhere = ("tp", "pp", "dp", "cp", "ep")
    check_transfer_protocol(RANK_ZERO, topology, num_rows)
    check_transfer_protocol(ONE_TO_ALL, topology, num_rows, replicated_over=everywhere)
    copies = topology.train.pp_size
    check_transfer_protocol(THREE_D_PP_ONLY, topology, num_rows, copies=copies, replicated_over=everywhere)
    check_transfer_protocol(ALL_TO_ALL, topology, topology.world_size)


# ---------------------------------------------------------------------------------------------- protocols of users


def _round_robin(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    size = topology.world_size
    return [RowSelection.from_rows(range(rank, num_rows, size)) for rank in range(size)]


def _last_rank_first(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    return split_rows(num_rows, topology.world_size, weights)[::-1]


def _by_data_and_context(
    topology: Topology, num_rows: int, weights: Sequence[float] | None = None
) -> list[RowSelection]:
    cp_size = topology.train.cp_size
    chunks = split_rows(num_rows, topology.train.dp_size * cp_size, weights)
    at = map(topology.coordinate, range(topology.world_size))
    return [chunks[one.dp * cp_size + one.cp] for one in at]


def _first_of_each_data_and_context(topology: Topology) -> Collection:
    at = map(topology.coordinate, range(topology.world_size))
    return Collection(tuple(rank for rank, one in enumerate(at) if (one.pp, one.tp) == (0, 0)))


ROUND_ROBIN = TransferProtocol("round robin", _round_robin, DP.collect)
LAST_RANK_FIRST = TransferProtocol("last rank first", _last_rank_first, DP.collect)
DATA_AND_CONTEXT = TransferProtocol("data and context", _by_data_and_context, _first_of_each_data_and_context)


@laws
@given(data=st.data(), more=st.integers(0, 20))
def test_users_protocols_obey_the_laws(data, topologies, more: int) -> None:
    topology = data.draw(topologies())
    num_rows = topology.world_size + more
    weights = data.draw(st.none() | st.lists(st.floats(0, 99), min_size=num_rows, max_size=num_rows))
    check_transfer_protocol(ROUND_ROBIN, topology, num_rows)
    check_transfer_protocol(LAST_RANK_FIRST, topology, num_rows, weights=weights)
    check_transfer_protocol(DATA_AND_CONTEXT, topology, num_rows, weights=weights, replicated_over=("tp", "pp"))


@laws
@given(data=st.data(), num_rows=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_any_distribution_of_the_rows_obeys_the_laws(data, topologies, num_rows: int, seed: int) -> None:
    """A user's protocol drawn at random: rows permuted and cut anywhere, on ranks and collected in any order."""
    topology = data.draw(topologies())

    def distribute(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
        rng = random.Random(seed)
        rows = rng.sample(range(num_rows), num_rows)
        cuts = sorted(rng.randint(0, num_rows) for _ in range(topology.world_size - 1))
        borders = itertools.pairwise([0, *cuts, num_rows])
        return [RowSelection.from_rows(rows[start:stop]) for start, stop in borders]

    def collect(topology: Topology) -> Collection:
        return Collection(tuple(random.Random(seed).sample(range(topology.world_size), topology.world_size)))

    check_transfer_protocol(TransferProtocol("drawn", distribute, collect), topology, num_rows)


# ----------------------------------------------------------------------------------- a wrong protocol for every law


def distributing(change: Callable[[list[RowSelection]], list[RowSelection]]) -> TransferProtocol:
    """DP, with its selections changed."""
    return replace(
        DP, name="wrong", distribute=lambda topology, num_rows, weights=None: change(split_rows(num_rows, 4, weights))
    )


def collecting(*ranks: int, combine: str = "concat") -> TransferProtocol:
    """DP, with other ranks collected."""
    return replace(DP, name="wrong", collect=lambda topology: Collection(ranks, combine))


def _changing(answers: Sequence[object]) -> Callable[..., object]:
    queue = iter(answers)
    return lambda *args, **kwargs: next(queue)


def _rows(*numbers: int) -> RowSelection:
    return RowSelection.from_rows(numbers)


CHUNKS = split_rows(9, 4)  # (0 1 2) (3 4) (5 6) (7 8)

WRONG = {
    "a rank without a selection": (
        distributing(lambda chunks: chunks[:3]),
        "distributes to 3 ranks, the topology has 4",
    ),
    "a selection without a rank": (
        distributing(lambda chunks: [*chunks, chunks[0]]),
        "distributes to 5 ranks, the topology has 4",
    ),
    "a row twice on a rank": (
        distributing(lambda chunks: [chunks[0] + _rows(1), *chunks[1:]]),
        r"rank 0 gets row \[1\]",
    ),
    "a row that does not exist": (
        distributing(lambda chunks: [*chunks[:3], chunks[3] + _rows(9)]),
        r"rank 3 gets row \[9\], which does not exist",
    ),
    "a row left out": (distributing(lambda chunks: [*chunks[:3], _rows(7)]), r"row \[8\] reaches no rank"),
    "rows that wander": (
        replace(DP, name="wrong", distribute=_changing([CHUNKS, CHUNKS[::-1]])),
        "distribute is not repeatable",
    ),
    "collected ranks that wander": (
        replace(DP, name="wrong", collect=_changing([Collection((0, 1, 2, 3)), Collection((3, 2, 1, 0))])),
        "collect is not repeatable",
    ),
    "nobody collected": (collecting(), r"collects the ranks \(\)\. Return at least one"),
    "a rank collected twice": (
        collecting(0, 1, 2, 3, 3),
        r"collects the ranks \(0, 1, 2, 3, 3\)\. Return at least one, each once",
    ),
    "a rank collected that does not exist": (collecting(0, 1, 2, 4), "the topology has ranks 0 to 3"),
    "a rank below zero collected": (collecting(0, 1, 2, -1), "the topology has ranks 0 to 3"),
    "an unknown way to combine": (collecting(0, 1, 2, 3, combine="sum"), r"combine='sum'.*\. Return Collection"),
    "nothing distributed": (replace(DP, name="wrong", distribute=lambda *_: None), "distribute returned None"),
    "lists of rows": (
        replace(DP, name="wrong", distribute=lambda *_: [[0]] * 4),
        "returned .*RowSelections",
    ),
    "too few arguments taken": (replace(DP, name="wrong", distribute=lambda topology, rows: []), "raised TypeError"),
    "a function that raises": (
        replace(DP, name="wrong", distribute=lambda *_: 1 / 0),
        "distribute raised ZeroDivisionError: division by zero",
    ),
    "a bare list collected": (
        replace(DP, name="wrong", collect=lambda _: [0]),
        r"returned \[0\]\. Return Coll",
    ),
    "a result not collected": (collecting(0, 1, 2), "row 7 is collected by 0 ranks, not by 1"),
    "a result collected twice": (
        replace(ONE_TO_ALL, name="wrong", collect=DP.collect),
        "row 0 is collected by 4 ranks, not by 1",
    ),
}


@pytest.mark.parametrize(("protocol", "broken"), WRONG.values(), ids=WRONG)
def test_the_laws_reject_a_wrong_protocol(protocol: TransferProtocol, broken: str) -> None:
    with pytest.raises(ProtocolError, match=f"protocol 'wrong'.*{broken}"):
        check_transfer_protocol(protocol, FOUR, num_rows=9)


def test_the_laws_reject_replicas_that_differ() -> None:
    with pytest.raises(ProtocolError, match=r"the ranks \(0, 1\) along tp get different rows"):
        check_transfer_protocol(DP, FOUR, num_rows=9, replicated_over=("tp",))


def test_the_laws_reject_another_number_of_copies() -> None:
    with pytest.raises(ProtocolError, match="row 0 is collected by 1 ranks, not by 2"):
        check_transfer_protocol(THREE_D, FOUR, num_rows=9, copies=2)


def test_the_laws_reject_a_split_that_weights_make_worse() -> None:
    heavy_together = distributing(lambda chunks: [_rows(0, 8), _rows(1, 2), _rows(3, 4), _rows(5, 6, 7)])
    with pytest.raises(ProtocolError, match=r"the heaviest chunk has 18\.0 tokens, the contiguous split 11\.0"):
        check_transfer_protocol(heavy_together, FOUR, num_rows=9, weights=[9, 1, 1, 1, 1, 1, 1, 1, 9])


def test_the_laws_reject_uneven_chunks_under_weights() -> None:
    uneven = distributing(lambda chunks: [_rows(0, 1, 2, 3), _rows(4, 5), _rows(6, 7), _rows(8)])
    check_transfer_protocol(uneven, FOUR, num_rows=9)
    with pytest.raises(ProtocolError, match=r"chunk sizes \[4, 2, 2, 1\] differ by more than one"):
        check_transfer_protocol(uneven, FOUR, num_rows=9, weights=[1] * 9)


def test_the_laws_watch_the_order_of_the_routed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """No protocol can reorder rows, for route restores their order; a route that does not is caught."""
    monkeypatch.setattr(
        hf_protocols.testing, "route", lambda held, wanted: Route((_backwards(held, wanted),)), raising=True
    )
    with pytest.raises(ProtocolError, match="the result does not keep the input's order"):
        check_transfer_protocol(DP, FOUR, num_rows=9)


def _backwards(held: dict[int, RowSelection], wanted: Sequence[RowSelection]) -> tuple:
    return hf_protocols.route(held, wanted).pieces[0][::-1]


def test_what_cannot_be_called_is_not_a_protocol() -> None:
    with pytest.raises(ProtocolError, match="a name and two functions, got None"):
        TransferProtocol("wrong", None, DP.collect)


@pytest.mark.parametrize("ranks", [3, None, "0123", ([0],), (0.0, 1.0), (False, True, 2, 3), {0: 1}], ids=repr)
def test_collected_ranks_are_a_tuple_of_whole_numbers(ranks: Any) -> None:
    wrong = replace(DP, name="wrong", collect=lambda _: Collection(ranks))
    with pytest.raises(ProtocolError, match=r"^protocol 'wrong': collect returned Collection\(ranks=.*\)\. Return"):
        check_transfer_protocol(wrong, FOUR, num_rows=9)


def test_collected_ranks_are_not_a_generator() -> None:
    wrong = replace(DP, name="wrong", collect=lambda _: Collection(iter(range(4))))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"^protocol 'wrong': collect returned Collection\(ranks=.*Return Coll"):
        check_transfer_protocol(wrong, FOUR, num_rows=9)


UNWEIGHTED = distributing(lambda chunks: split_rows(9, 4))


@pytest.mark.parametrize(
    ("protocol", "more", "message"),
    [
        ("DP", {}, "check_transfer_protocol: protocol='DP'. Use a TransferProtocol"),
        (UNWEIGHTED, {"topology": 4}, "check_transfer_protocol: topology=4. Use a Topology"),
        (UNWEIGHTED, {"weights": [1]}, r"weights=\[1\]. Use one finite number >= 0 for each of the 9 rows"),
        (UNWEIGHTED, {"weights": "abcdefghi"}, "weights='abcdefghi'. Use one finite number"),
        (UNWEIGHTED, {"weights": [1] * 8 + [math.nan]}, r"weights=\[1, .* nan\]. Use one finite number"),
        (UNWEIGHTED, {"weights": 3}, "weights=3. Use one finite number"),
        (UNWEIGHTED, {"copies": 0}, "copies=0 must be a whole number of at least 1"),
        (UNWEIGHTED, {"copies": "1"}, "copies='1' must be a whole number of at least 1"),
    ],
)
def test_what_is_checked_is_checked_itself(protocol: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{message}"):
        check_transfer_protocol(protocol, **{"topology": FOUR, "num_rows": 9, **more})
