"""The order of rows: epochs without gaps, shares of a mixture, and no memory of what was drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_algorithms.data import RowOrder, select_rows


def draws(order: RowOrder, count: int, batch: int, seed: int = 3) -> list[tuple[int, int]]:
    return [each for i in range(-(-count // batch)) for each in order.draw(batch, iteration=i, seed=seed)][:count]


@pytest.mark.parametrize(
    ("weights", "round_length", "shares"),
    [([1, 1], 2, [1, 1]), ([3.0, 1.0], 4, [3, 1]), ([0.7, 0.3], 10, [7, 3]), ([0.2, 0.5, 0.3], 10, [2, 5, 3])],
)
def test_every_round_has_the_shares_of_the_weights(weights: list[float], round_length: int, shares: list[int]) -> None:
    sizes = [5, 11, 2][: len(weights)]
    order = RowOrder(sizes, weights)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    found = draws(order, round_length * 50, 7)
    for turn in range(50):
        rows = [row for _, row in found[turn * round_length : (turn + 1) * round_length]]
        counts = Counter(max(n for n, start in enumerate(starts) if row >= start) for row in rows)
        assert [counts[number] for number in range(len(sizes))] == shares


def test_every_source_has_epochs_without_gaps() -> None:
    sizes = [5, 11]
    found = draws(RowOrder(sizes, [0.7, 0.3]), 1000, 8)
    for start, size in ((0, 5), (5, 11)):
        own = [(epoch, row) for epoch, row in found if start <= row < start + size]
        assert [epoch for epoch, _ in own] == [number // size for number in range(len(own))]
        for epoch in range(len(own) // size):
            assert sorted(row for _, row in own[epoch * size : (epoch + 1) * size]) == list(range(start, start + size))


def test_draws_need_no_history_and_do_not_depend_on_the_batch() -> None:
    order = RowOrder([50, 70], [1, 2])
    assert order.draw(10, iteration=90, seed=1) == draws(RowOrder([50, 70], [1, 2]), 910, 13, seed=1)[900:]
    assert order.draw(10, iteration=90, seed=1) != order.draw(10, iteration=90, seed=2)


def test_shares_that_no_short_round_has_are_nearest() -> None:
    found = draws(RowOrder([10, 10], [2**0.5, 1]), 10_000, 1000)
    assert abs(sum(row < 10 for _, row in found) / 10_000 - 2**0.5 / (1 + 2**0.5)) < 1e-4


@pytest.mark.parametrize("weights", [None, [5.0, 1.0]])
def test_an_arrangement_has_every_row_once(weights: list[float] | None) -> None:
    order = RowOrder([4, 9], weights)
    found = order.arrange(iteration=2, seed=0)
    assert sorted(found) == list(range(13))
    assert found != order.arrange(iteration=3, seed=0)
    if weights is None:
        assert found == select_rows(13, 13, iteration=2, seed=0)
    else:
        assert sum(row < 4 for row in found[:6]) == 4, "the heavier set comes first, and is then used up"


def test_without_weights_it_is_the_order_of_one_set() -> None:
    assert [row for _, row in draws(RowOrder([4, 9]), 60, 6)] == [
        row for i in range(10) for row in select_rows(13, 6, iteration=i, seed=3)
    ]
