"""Packs: responses to one prompt that are computed in one row, and what that costs a model.

Only lengths and estimates live here; tokens and masks live with the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

__all__ = ["PromptSharing", "batch_packs", "plan_packs"]


@dataclass(frozen=True, kw_only=True)
class PromptSharing:
    """Costs of rows of a model, in tokens, and when responses share the row of their prompt."""

    pair_work: float
    """Work of attention between two tokens, as a share of all other work on a token."""
    pair_memory: float
    """Bytes of masks for two tokens, as a share of those that a token needs at least."""
    always: bool = False
    """Share rows wherever they fit, without a look at the work."""

    def work(self, tokens: int) -> float:
        """Of a row, in tokens."""
        return tokens + self.pair_work * tokens**2

    def memory(self, tokens: int) -> int:
        """Of a row with a mask of its own, in tokens of the budget."""
        return tokens + ceil(self.pair_memory * tokens**2)


def plan_packs(
    groups: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    sharing: PromptSharing,
) -> tuple[list[list[int]], list[int]]:
    """Splits groups into packs of responses that share a row, and rows that stay apart.

    Args:
        groups: rows that have one prompt; every row is in one group.
        prompt_lengths: of every row.
        response_lengths: of every row.
        max_tokens: bound on the memory of a pack.
        sharing: costs.

    Returns:
        Packs of two or more rows, and the rows in none of them.
    """
    packs: list[list[int]] = []
    apart: list[int] = []
    for group in groups:
        prompt = prompt_lengths[group[0]]
        ordered = sorted(group, key=lambda row: (-response_lengths[row], row))
        found = _split(ordered, prompt, response_lengths, max_tokens, sharing) if len(group) > 1 else []
        packs += [pack for pack in found if len(pack) > 1]
        packed = {row for pack in found if len(pack) > 1 for row in pack}
        apart += [row for row in group if row not in packed]
    return packs, sorted(apart)


def batch_packs(
    packs: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    sharing: PromptSharing,
) -> list[list[list[int]]]:
    """Cuts packs into micro-batches, the longest first: packs x memory of the longest is at most `max_tokens`."""
    lengths = [prompt_lengths[pack[0]] + sum(response_lengths[row] for row in pack) for pack in packs]
    batches: list[list[list[int]]] = []
    room = 0
    for index in sorted(range(len(packs)), key=lambda index: (-lengths[index], packs[index][0])):
        if not room:
            batches.append([])
            room = max(1, max_tokens // sharing.memory(lengths[index]))
        batches[-1].append(list(packs[index]))
        room -= 1
    return batches


def _split(
    rows: Sequence[int], prompt: int, responses: Sequence[int], max_tokens: int, sharing: PromptSharing
) -> list[list[int]]:
    """The fewest packs that fit and are near the least work; none where that is not below the work of rows apart."""
    count = 1
    if not sharing.always:
        # Of k equal responses, (P + work of pairs) / k falls with k and the pairs among responses grow with it.
        mean = max(1.0, sum(responses[row] for row in rows) / len(rows))
        best = sqrt(prompt * (1 + sharing.pair_work * prompt) / sharing.pair_work) / mean
        count = max(1, round(len(rows) / max(1.0, best)))
    while count < len(rows):
        packs = _deal(rows, responses, count)
        lengths = [prompt + sum(responses[row] for row in pack) for pack in packs]
        if max(map(sharing.memory, lengths)) <= max_tokens:
            together = sum(map(sharing.work, lengths))
            apart = sum(sharing.work(prompt + responses[row]) for row in rows)
            return packs if sharing.always or together < apart else []
        count += ceil(count / 4)
    return []


def _deal(rows: Sequence[int], responses: Sequence[int], count: int) -> list[list[int]]:
    """Packs of similar sums: each row, longest first, goes to the shortest pack."""
    packs: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in rows:
        shortest = min(range(count), key=lambda pack: (sums[pack], len(packs[pack]), pack))
        packs[shortest].append(row)
        sums[shortest] += responses[row]
    return [pack for pack in packs if pack]
