"""Packs: a prompt and responses to it, which is computed once; and packed rows: packs in one row of a forward pass.

Only lengths and estimates live here; tokens and masks live with the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil, inf, sqrt

__all__ = ["MASK_BYTES", "PackedRow", "PackedRowPlanner", "PromptSharing"]

Pack = Sequence[int]
"""Rows of the batch with one prompt, which is computed once for them."""
PackedRow = Sequence[Pack]
"""Packs one after another."""

MASK_BYTES = 5
"""Of one element of a mask: a term of the scores in float32, and the bool that it is made of."""
_PAIR_EFFORT = 1.3
"""Time of attention's multiplications, relative to those of matrices with weights: measured on a CPU."""
_PASS_TOKENS = 40
"""A pass on a CPU reads all weights and writes their gradients in about the time of so many tokens."""
_PASS_WEIGHTS = 100_000_000
"""It calls functions in about the time of a token on so many weights."""
_LEAST_SAVED = 0.02
"""Smallest share of work, or of padding, that packing must save: building masks takes time, too."""
_PACKS_A_ROW = (1, 2, 4)
"""Mean numbers that are tried: with more, attention between packs costs what padding saves."""
_MOST_CELLS = 16
"""Bound on responses x longest response of a micro-batch, in its tokens: columns of a loss have that size, padded."""


@dataclass(frozen=True, kw_only=True)
class PromptSharing:
    """Costs of rows of a model, in tokens; `always` has responses share their prompt without a look at the work."""

    pair_work: float
    """Work of attention between two tokens, as a share of all other work on a token."""
    pair_memory: float
    """Bytes of masks for two tokens, as a share of those that a token needs at least."""
    pass_work: float = 0.0
    """Work of a pass on a CPU by itself, in tokens."""
    always: bool = False
    """Share prompts wherever they fit."""

    @classmethod
    def estimate(
        cls,
        *,
        attended: int,
        passed: int,
        pair_bytes: float,
        token_bytes: int,
        score_memory: float = 0.0,
        always: bool = False,
    ) -> PromptSharing:
        """Costs from a model's sizes.

        Args:
            attended: numbers of a token that attention multiplies with those of another one: layers x heads x size.
            passed: weights that a token is multiplied with, without those of the embedding and of the head.
            pair_bytes: of the masks for two tokens; `MASK_BYTES` for each kind of layer that has its own.
            token_bytes: least that a token needs: 4 for each layer and hidden unit.
            score_memory: of scores that attention keeps, in tokens.
            always: see `PromptSharing`.
        """
        return cls(
            pair_work=_PAIR_EFFORT * 2 * attended / passed,
            pair_memory=pair_bytes / token_bytes + score_memory,
            pass_work=_PASS_TOKENS + _PASS_WEIGHTS / passed,
            always=always,
        )

    def work(self, tokens: int) -> float:
        """Of a row, in tokens."""
        return tokens + self.pair_work * tokens**2

    def memory(self, tokens: int) -> int:
        """Of a row with a mask of its own, in tokens of the budget."""
        return tokens + ceil(self.pair_memory * tokens**2)


class PackedRowPlanner:
    """Decides which rows of a batch are computed together.

    Args:
        prompt_lengths: tokens of every row's prompt.
        response_lengths: tokens of every row's response that are computed.
        max_tokens: bound on the memory of a micro-batch, in tokens; see `PromptSharing.memory`.
        sharing: costs.
        enough_tokens: bound on the tokens of a micro-batch with two packed rows or more, without masks; None: none.
            Where it is given, another pass is weighed against the padding that it saves.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[int],
        max_tokens: int,
        sharing: PromptSharing,
        enough_tokens: int | None = None,
    ) -> None:
        self._prompts = prompt_lengths
        self._responses = response_lengths
        self._max_tokens = max_tokens
        self._enough_tokens = max_tokens if enough_tokens is None else enough_tokens
        self._sharing = sharing
        self._pass_work = 0.0 if enough_tokens is None else sharing.pass_work

    def split(self, groups: Sequence[Sequence[int]]) -> tuple[list[Pack], list[int]]:
        """Splits groups of rows with one prompt into packs of two or more rows, and rows apart. Every row is in one."""
        packs: list[Pack] = []
        apart: list[int] = []
        for group in groups:
            ordered = sorted(group, key=lambda row: (-self._responses[row], row))
            found = [pack for pack in self._split(ordered) if len(pack) > 1] if len(group) > 1 else []
            packs += found
            packed = {row for pack in found for row in pack}
            apart += [row for row in group if row not in packed]
        return packs, sorted(apart)

    def fits(self, row: int) -> bool:
        """True if a row apart may be packed: a packed row's mask needs memory, too."""
        return self._fits(self._measure([[row]]))

    def batch(self, packed: Sequence[PackedRow]) -> list[list[PackedRow]]:
        """Cuts packed rows into micro-batches, the longest first: rows x memory of the longest is within the bound.

        One micro-batch is never cut: an update can go on from a pass on it.
        """
        lengths = [self._measure(row) for row in packed]
        ordered = sorted(zip(lengths, packed, strict=True), key=lambda each: (-each[0], each[1][0][0]))
        whole = self._cut(ordered, inf)
        if len(whole) < 2 or not self._pass_work:
            return whole
        return min(whole, self._cut(ordered, self._pass_work), key=self._work)

    def _cut(self, ordered: Sequence[tuple[int, PackedRow]], most_padding: float) -> list[list[PackedRow]]:
        """Micro-batches of rows, the longest first. Another begins where padding would be more than `most_padding`."""
        batches: list[list[PackedRow]] = []
        room = num_responses = longest = widest = 0
        for index, (length, row) in enumerate(ordered):
            responses = [self._responses[each] for pack in row for each in pack]
            num_responses, longest = num_responses + len(responses), max(longest, *responses)
            is_padded = (widest - length) * min(room, len(ordered) - index) > most_padding
            if not room or is_padded or num_responses * longest > _MOST_CELLS * self._max_tokens:
                batches.append([])
                room = max(1, min(self._max_tokens // self._sharing.memory(length), self._enough_tokens // length))
                num_responses, longest, widest = len(responses), max(responses), length
            batches[-1].append(row)
            room -= 1
        return batches

    def join(
        self, packs: Sequence[Pack], padded: Sequence[Sequence[int]]
    ) -> tuple[list[list[PackedRow]], Sequence[Sequence[int]]]:
        """Puts packs and rows apart in common packed rows where that is less work than padding.

        Args:
            packs: of `split`.
            padded: micro-batches of its rows apart that fit, whose prompts and whose responses are padded.

        Returns:
            Micro-batches of packed rows, and those of padded rows that are left.
        """
        best = self.batch([[pack] for pack in packs])
        widths = [self._width(rows) for rows in padded]
        computed = sum(len(batch) * self._measure(batch[0]) for batch in best)
        computed += sum(len(rows) * width for rows, width in zip(padded, widths, strict=True))
        every = [*packs, *([row] for rows in padded for row in rows)]
        lengths = [self._measure([pack]) for pack in every]
        if computed - sum(lengths) <= _LEAST_SAVED * computed:
            return best, padded
        least = self._work(best) + len(padded) * self._pass_work
        least += sum(len(rows) * self._sharing.work(width) for rows, width in zip(padded, widths, strict=True))
        least *= 1 - _LEAST_SAVED
        for packed in self._distribute(every, lengths):
            batches = self.batch(packed)
            if self._fits(self._measure(batches[0][0])) and (work := self._work(batches)) < least:
                least, best, padded = work, batches, []
        return best, padded

    def _split(self, rows: Sequence[int]) -> list[list[int]]:
        """The fewest packs that fit and are near the least work; none where rows apart need at most as much work."""
        prompt, sharing = self._prompts[rows[0]], self._sharing
        lengths = [self._responses[row] for row in rows]
        count = 1
        if not sharing.always:
            # Of k equal responses, (P + work of pairs) / k falls with k and the pairs among responses grow with it.
            mean = max(1.0, sum(lengths) / len(rows))
            best = sqrt(prompt * (1 + sharing.pair_work * prompt) / sharing.pair_work) / mean
            count = max(1, round(len(rows) / max(1.0, best)))
        while count < len(rows):
            packs = [[rows[index] for index in each] for each in _fill(lengths, count)]
            found = [self._measure([pack]) for pack in packs]
            if self._fits(max(found)):
                apart = sum(sharing.work(prompt + length) for length in lengths)
                return packs if sharing.always or sum(map(sharing.work, found)) < apart else []
            count += ceil(count / 4)
        return []

    def _distribute(self, packs: Sequence[Pack], lengths: Sequence[int]) -> Iterator[list[PackedRow]]:
        """Yields packed rows of similar lengths: some packs in each, or as many as fit next to the longest pack."""
        counts = {ceil(len(packs) / each) for each in _PACKS_A_ROW} | {ceil(sum(lengths) / max(lengths))}
        for count in sorted(counts, reverse=True):
            yield [[packs[index] for index in each] for each in _fill(lengths, count)]

    def _measure(self, packed: PackedRow) -> int:
        """Tokens of a packed row."""
        return sum(self._prompts[pack[0]] + sum(self._responses[row] for row in pack) for pack in packed)

    def _width(self, rows: Sequence[int]) -> int:
        return max(self._prompts[row] for row in rows) + max(self._responses[row] for row in rows)

    def _fits(self, tokens: int) -> bool:
        return self._sharing.memory(tokens) <= self._max_tokens

    def _work(self, batches: Sequence[Sequence[PackedRow]]) -> float:
        return sum(self._pass_work + len(batch) * self._sharing.work(self._measure(batch[0])) for batch in batches)


def _fill(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Distributes items over at most `count` bins of similar sums: each, longest first, to the bin with the least."""
    bins: list[list[int]] = [[] for _ in range(count)]
    sums = [(0, 0, number) for number in range(count)]
    heapify(sums)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        total, size, number = sums[0]
        bins[number].append(index)
        heapreplace(sums, (total + lengths[index], size + 1, number))
    return [each for each in bins if each]
