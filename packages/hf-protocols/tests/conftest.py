from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import strategies as st

from hf_protocols import GenerationSpec, Grouping, Order, ParallelSpec, Topology

MAX_RANKS = 64


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def draw_topology(draw: st.DrawFn, *, generates: bool | None = None) -> Topology:
    """Any topology of at most 64 ranks; `generates=None` leaves the generation layout to chance."""
    sizes, room = [], MAX_RANKS
    for _ in range(4):
        sizes.append(draw(st.integers(1, room)))
        room //= sizes[-1]
    pp, tp, dp, cp = draw(st.permutations(sizes))
    ep = draw(st.sampled_from(divisors(dp * cp)))
    train = ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp, cp_size=cp, ep_size=ep)
    generation = None
    if generates or (generates is None and draw(st.booleans())):
        # Half of the time nested sizes, which chance alone seldom finds.
        nested = draw(st.booleans())
        gen_pp = draw(st.sampled_from(divisors(pp if nested else train.world_size)))
        gen_tp = draw(st.sampled_from(divisors(tp if nested else train.world_size // gen_pp)))
        generation = GenerationSpec(gen_pp_size=gen_pp, gen_tp_size=gen_tp)
    order = draw(st.sampled_from(get_args(Order)))
    return Topology(train, generation, order, draw(st.sampled_from(get_args(Grouping))))


@pytest.fixture(scope="session")
def topologies() -> Callable[..., st.SearchStrategy[Topology]]:
    """The strategy above, for tests that draw from it with `data.draw(topologies())`."""
    return draw_topology


def _holds_training_shard(topology: Topology, rank: int) -> bool:
    """True if the layers and columns that a rank trains are among those with which it generates."""
    at, train, gen = topology.coordinate(rank), topology.train, topology.generation

    def inside(index: int, size: int, gen_index: int, gen_size: int) -> bool:
        low, high = Fraction(index, size), Fraction(index + 1, size)
        return Fraction(gen_index, gen_size) <= low and high <= Fraction(gen_index + 1, gen_size)

    return inside(at.pp, train.pp_size, at.gen_pp, gen.gen_pp_size) and inside(
        at.tp, train.tp_size, at.gen_tp, gen.gen_tp_size
    )


@pytest.fixture(scope="session")
def holds_training_shard() -> Callable[[Topology, int], bool]:
    """The function above."""
    return _holds_training_shard
