"""Small ragged batches, and what a plain forward pass per row says about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "add_candidates",
    "build_batch",
    "build_prompts",
    "greedy_response",
    "leave_tokens_out",
    "reference_outputs",
    "rows_of",
    "select_rows",
]


def build_prompts(num_rows: int, *, vocab_size: int, max_length: int = 7, seed: int = 0) -> TensorDict:
    """Columns `prompt_ids` (ragged, 1 to max_length tokens) and `row_id`."""
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (num_rows,), generator=generator)
    rows = [torch.randint(3, vocab_size, (int(length),), generator=generator) for length in lengths]
    columns = {"prompt_ids": _jagged(rows), "row_id": torch.arange(num_rows) * 7 + 3}
    return TensorDict(columns, batch_size=[num_rows])


def build_batch(num_rows: int, *, vocab_size: int, seed: int = 0) -> TensorDict:
    """Prompts with ragged responses, their mask, and a `targets` column of random numbers per response token."""
    batch = build_prompts(num_rows, vocab_size=vocab_size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, 6, (num_rows,), generator=generator)
    batch["response_ids"] = _jagged([torch.randint(0, vocab_size, (int(n),), generator=generator) for n in lengths])
    batch["response_mask"] = _jagged([torch.ones(int(n), dtype=torch.bool) for n in lengths])
    batch["targets"] = _jagged([torch.randn(int(n), generator=generator) for n in lengths])
    return batch


def add_candidates(batch: TensorDict, k: int, *, vocab_size: int) -> TensorDict:
    """The same rows with `candidate_ids`, k different tokens for each response token."""
    generator = torch.Generator().manual_seed(2)
    lengths = [len(row) for row in rows_of(batch["response_ids"])]
    batch["candidate_ids"] = _jagged(
        [
            torch.stack([torch.randperm(vocab_size, generator=generator)[:k] for _ in range(length)])
            for length in lengths
        ]
    )
    return batch


def leave_tokens_out(batch: TensorDict) -> TensorDict:
    """The same rows, where the mask is False on the last token of every second response: a loss leaves it out."""
    masks = rows_of(batch["response_mask"])
    batch["response_mask"] = _jagged(
        [torch.cat([mask[:-1], mask[-1:] & (row % 2 == 0)]) for row, mask in enumerate(masks)]
    )
    return batch


def select_rows(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows of a batch, in the given order."""
    from tensordict import TensorDict

    columns: dict[str, torch.Tensor] = {}
    for name, column in batch.items():
        assert isinstance(column, torch.Tensor)
        columns[str(name)] = _select(column, rows) if column.is_nested else column[list(rows)]
    return TensorDict(columns, batch_size=[len(rows)])


def _select(column: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if rows:
        return _jagged([column[row] for row in rows])
    empty: torch.Tensor = torch.nested.nested_tensor_from_jagged(column.values()[:0], torch.zeros(1, dtype=torch.int64))
    return empty


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a jagged column."""
    return [row.detach() for row in column.unbind()]


def reference_outputs(reference: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """[T, V] logits (or [T, 1] values) at the columns that predict the response: one row, no padding, no cache."""
    sequence = torch.cat([prompt, response])[None]
    outputs: torch.Tensor = reference(input_ids=sequence, use_cache=False).logits[0]
    return outputs[len(prompt) - 1 : -1].float()


@torch.no_grad()
def greedy_response(reference: Any, prompt: torch.Tensor, num_tokens: int, stops: frozenset[int]) -> torch.Tensor:
    """The most likely tokens, each found by a whole forward pass."""
    sequence = prompt
    while len(sequence) < len(prompt) + num_tokens and not (len(sequence) > len(prompt) and int(sequence[-1]) in stops):
        logits = reference(input_ids=sequence[None], use_cache=False).logits[0, -1]
        sequence = torch.cat([sequence, logits.argmax()[None]])
    return sequence[len(prompt) :]


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return nested
