"""Preference pairs as two rows each, for losses of a language model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_algorithms.data._jagged_columns import build_jagged, check_rows
from hf_algorithms.data._preferences import PreferenceDataset

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PairRowsDataset"]


class PairRowsDataset(PreferenceDataset):
    """Pairs of which each becomes two rows of a batch: the chosen response, then the rejected one.

    Arguments and errors are those of `PreferenceDataset`.
    """

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest row, a prompt with one response, and its place."""
        totals = [prompt + max(sides) for prompt, *sides in zip(*self._lengths.values(), strict=True)]
        return max(totals), self._rows[totals.index(max(totals))].where

    def batch(self, indices: Iterable[int]) -> TensorDict:
        """Returns two rows for each of the chosen pairs.

        `row_id` int64 [2 B], the pair's number; `prompt_ids`, `response_ids` jagged int64 and `response_mask` jagged
        bool, [2 B, tokens], all true; `group_id` int64 [2 B], equal for the rows of a pair; and `scores` float32
        [2 B], 1 for the chosen response and 0 for the rejected one.

        Raises:
            BatchError: for a row that the data set does not have.
        """
        import torch
        from tensordict import TensorDict

        chosen = check_rows(indices, len(self))
        ids = [self._cut(self._encode(self._rows[row])) for row in chosen]
        responses = [side for _, *sides in ids for side in sides]
        columns = {
            "row_id": torch.tensor(chosen, dtype=torch.int64, device="cpu").repeat_interleave(2),
            "prompt_ids": build_jagged([prompt for prompt, *_ in ids for _ in range(2)], torch.int64),
            "response_ids": build_jagged(responses, torch.int64),
            "response_mask": build_jagged([[True] * len(side) for side in responses], torch.bool),
            "group_id": torch.arange(len(chosen), device="cpu").repeat_interleave(2),
            "scores": torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu").repeat(len(chosen)),
        }
        return TensorDict(columns, batch_size=[2 * len(chosen)])
