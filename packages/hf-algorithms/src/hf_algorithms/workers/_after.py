"""The position after a response, where a critic may give and learn one more value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hf_algorithms.jagged import to_jagged

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["add_positions", "find_room", "split_positions"]


def find_room(batch: TensorDict, max_tokens: int) -> torch.Tensor:
    """Returns bool [B]: responses shorter than `max_tokens` that have a trained token."""
    rows = zip(batch["response_ids"].unbind(), batch["response_mask"].unbind(), strict=True)
    return torch.tensor([len(ids) < max_tokens and bool(mask.any()) for ids, mask in rows], dtype=torch.bool)


def add_positions(
    batch: TensorDict, has_room: torch.Tensor, columns: Mapping[str, torch.Tensor] | None = None
) -> TensorDict:
    """Returns the batch with one more token, trained by a critic, in the rows that have room.

    Its id does not matter: the value before a token depends on what came before.

    Args:
        batch: `response_ids` and `response_mask` [B, T], jagged or dense.
        has_room: bool [B].
        columns: one number a row, to append to the column of that name.
    """
    added: dict[str, torch.Tensor] = {
        "response_ids": torch.zeros(len(batch), dtype=batch["response_ids"].dtype),
        "response_mask": torch.ones(len(batch), dtype=torch.bool),
        **(columns or {}),
    }
    found = batch.copy()
    for name, last in added.items():
        column = batch[name]
        found[name] = to_jagged(
            [
                torch.cat([row, last[place : place + 1].to(row.dtype)]) if has_room[place] else row
                for place, row in enumerate(column.unbind())
            ]
        )
    return found


def split_positions(column: torch.Tensor, has_room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a column without the last number of the rows that had room, and those numbers [B], NaN elsewhere."""
    rows = column.unbind()
    last = [row[-1] if room else row.new_tensor(float("nan")) for row, room in zip(rows, has_room, strict=True)]
    kept = [row[:-1] if room else row for row, room in zip(rows, has_room, strict=True)]
    return to_jagged(kept), torch.stack(last) if last else column.new_zeros(0)
