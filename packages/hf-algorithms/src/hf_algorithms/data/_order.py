"""The order in which rows are drawn: shuffled epochs of one set, or a mixture of several by weight.

Nothing is remembered: position p of a run holds the same row whenever it is asked for.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hf_protocols.errors import ConfigError

__all__ = ["RowOrder", "select_rows"]

_LONGEST_ROUND = 10_000


def select_rows(num_rows: int, batch_size: int, *, iteration: int, seed: int) -> list[int]:
    """Returns the rows of iteration `iteration` (from 0) when shuffled epochs are read one after the other.

    Each epoch is a permutation of its own; each row comes once per epoch, and a batch may end one epoch and begin
    the next, or hold several. Nothing is remembered: a run resumed at iteration i reads what it would have read.

    Raises:
        ConfigError: for no rows, a batch without rows, or an iteration before the first.
    """
    if num_rows < 1 or batch_size < 1 or iteration < 0:
        raise ConfigError(
            f"num_rows={num_rows}, batch_size={batch_size}, iteration={iteration}: "
            "rows and batches start at 1, iterations at 0"
        )
    return [row for _, row in RowOrder([num_rows]).draw(batch_size, iteration=iteration, seed=seed)]


class RowOrder:
    """Draws from row sets that lie one after the other.

    Without weights they are one set, of which an epoch holds each row once. With weights each set has epochs of its
    own, and its share of the draws is its share of the weights: exactly so in every round, of at most 10,000 draws.

    Args:
        sizes: rows of each set.
        weights: one for each set, above 0; None: one set.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None) -> None:
        self._sizes = list(sizes) if weights else [sum(sizes)]
        self._starts = list(accumulate(self._sizes, initial=0))
        self._shares = _count_shares(weights) if weights else (1,)

    def draw(self, batch_size: int, *, iteration: int, seed: int) -> list[tuple[int, int]]:
        """Epoch and row of every draw of an iteration, from 0."""
        return self.draw_from(iteration * batch_size, batch_size, seed=seed)

    def draw_from(self, position: int, num_rows: int, *, seed: int) -> list[tuple[int, int]]:
        """Epoch and row of so many draws, after the first `position` of a run."""
        return [self._at(each, seed) for each in range(position, position + num_rows)]

    def arrange(self, *, iteration: int, seed: int) -> list[int]:
        """Every row once, shuffled; sets take turns by their weights until they are used up."""
        left = [
            [start + row for row in reversed(_permutation(size, iteration, seed, number))]
            for number, (size, start) in enumerate(zip(self._sizes, self._starts, strict=False))
        ]
        found: list[int] = []
        turn = 0
        while len(found) < self._starts[-1]:
            for number, _ in _shuffle_round(self._shares, turn, seed):
                if left[number]:
                    found.append(left[number].pop())
            turn += 1
        return found

    def _at(self, position: int, seed: int) -> tuple[int, int]:
        turn, place = divmod(position, sum(self._shares))
        number, before = _shuffle_round(self._shares, turn, seed)[place]
        size = self._sizes[number]
        epoch, place = divmod(turn * self._shares[number] + before, size)
        return epoch, self._starts[number] + _permutation(size, epoch, seed, number)[place]


def _count_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each set in a round: the smallest whole numbers of these proportions, or the nearest that fit."""
    parts = [weight / sum(weights) for weight in weights]
    for length in range(len(parts), 1001):
        counts = [part * length for part in parts]
        if all(round(each) and abs(each - round(each)) < 1e-9 * length for each in counts):
            return tuple(map(round, counts))
    return tuple(max(1, round(part * _LONGEST_ROUND)) for part in parts)


@lru_cache(maxsize=8)
def _shuffle_round(shares: tuple[int, ...], turn: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Of every draw of a round: its set, and how many draws of that set the round had before."""
    if len(shares) == 1:
        return tuple((0, before) for before in range(shares[0]))
    order = [number for number, share in enumerate(shares) for _ in range(share)]
    random.Random(f"round {turn} of seed {seed}").shuffle(order)
    counts = [0] * len(shares)
    found = []
    for number in order:
        found.append((number, counts[number]))
        counts[number] += 1
    return tuple(found)


@lru_cache(maxsize=8)
def _permutation(num_rows: int, epoch: int, seed: int, number: int) -> array[int]:
    order = array("q", range(num_rows))
    random.Random(f"epoch {epoch} of seed {seed}" + (f" in set {number}" if number else "")).shuffle(order)
    return order
