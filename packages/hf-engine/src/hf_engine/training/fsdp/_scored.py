"""Models that return one number for a sequence: reward models and cost models.

A row of a batch is a prompt and one response, or two responses of which a loss compares the scores. Both sequences of a
row stay in one micro-batch, padded on the right, which every sequence classifier of transformers takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hf_engine.backends.base import Head
from hf_engine.backends.jagged import Ragged, read_ids, require_columns, to_jagged
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch, plan_micro_batches
from hf_protocols.errors import BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ScoredBatch", "forward_scores", "read_sequences"]


class ScoredBatch(SequenceBatch):
    """A batch of prompts, each with one response or two, split into micro-batches of whole rows.

    Args:
        batch: has `prompt_ids` and `response_ids`, jagged; `rejected_ids`, jagged, is the second response of each row.
        vocab_size: of the model.

    Raises:
        BatchError: as `SequenceBatch` does.
    """

    def __init__(self, batch: TensorDict, vocab_size: int | None = None) -> None:
        require_columns(batch, ("prompt_ids", "response_ids"))
        self._batch = batch
        self._prompts = read_ids(batch, "prompt_ids", vocab_size)
        # Whether or not the model has a token for padding, one is left that ends no sequence; see `_classify`.
        self._most_sequences = len(self._prompts.lengths) * 2 if vocab_size is None else vocab_size - 1
        names = ("response_ids", *(("rejected_ids",) if "rejected_ids" in batch else ()))
        self._sides = [_join(self._prompts, read_ids(batch, name, vocab_size)) for name in names]

    def micro_batches(self, max_tokens: int, enough_tokens: int | None = None) -> list[MicroBatch]:
        """Every row in one micro-batch of at most `max_tokens` tokens, padding and both sides included.

        Args:
            max_tokens: bound on a micro-batch.
            enough_tokens: bound on a micro-batch with two rows or more; see `find_enough_tokens`.

        Raises:
            BatchError: for a row without tokens, above the token budget, or whose sides have different frequencies.
        """
        num_sides = len(self._sides)
        longest = torch.stack([side.lengths for side in self._sides]).max(0).values.tolist()
        for row, tokens in enumerate(longest):
            if num_sides * tokens > max_tokens:
                each = f"{num_sides} sequences of up to {tokens} tokens" if num_sides > 1 else f"{tokens} tokens"
                raise BatchError(
                    f"row {row} has {each}, above micro_batch_tokens={max_tokens}. Raise micro_batch_tokens or shorten "
                    "the row"
                )
        if any(int(side.lengths.min()) == 0 for side in self._sides if len(side.lengths)):
            raise BatchError("a row of the batch has no tokens: nothing can be scored. Give each row a prompt")
        self.rope_limits.check_rows(longest)
        self._check_ranges()
        prompts = [0] * len(longest)
        enough = None if enough_tokens is None else enough_tokens // num_sides
        plan = plan_micro_batches(
            prompts,
            longest,
            max_tokens // num_sides,
            enough_tokens=enough,
            pair_memory=self.pair_memory,
            rope_limits=self.rope_limits,
        )
        most = max(1, self._most_sequences // num_sides)
        cut = [rows[start : start + most] for rows in plan for start in range(0, len(rows), most)]
        return [self._pad_sides(torch.tensor(rows)) for rows in cut]

    def check_columns(self) -> None:
        """Refuses nothing: a loss of scores gets only the dense columns of any batch."""

    def padded_columns(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """The dense columns of the rows, by name: a loss of scores reads no tokens."""
        columns = {str(name): column for name, column in self._batch.items()}
        return {
            name: column[micro_batch.rows]
            for name, column in columns.items()
            if isinstance(column, torch.Tensor) and not column.is_nested
        }

    def jagged(
        self,
        parts: Sequence[tuple[MicroBatch, torch.Tensor]],
        token_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """The scores of all micro-batches in one dense column, [B], or [B, 2] of rows with two sides."""
        sides = (len(self._sides),) if len(self._sides) > 1 else ()
        column = torch.zeros(len(self._prompts.lengths), *sides, *token_shape, dtype=dtype)
        for micro_batch, result in parts:
            if len(micro_batch.rows):
                column[micro_batch.rows] = result.to("cpu", dtype)
        return column

    def _check_ranges(self) -> None:
        """Refuses a row whose sides are in different ranges: both are in one forward pass."""
        if not self.rope_limits.splits:
            return
        for row, sides in enumerate(zip(*(side.lengths.tolist() for side in self._sides), strict=True)):
            if len({self.rope_limits.range_of(tokens) for tokens in sides}) > 1:
                split = self.rope_limits.splits[self.rope_limits.range_of(min(sides))]
                raise BatchError(
                    f"row {row} has sequences of {sides[0]} and {sides[1]} tokens, across "
                    f"original_max_position_embeddings={split}: with rope_type='longrope' they have different "
                    "frequencies, but one forward pass scores both. Shorten the longer one, or leave the row out"
                )

    def _pad_sides(self, rows: torch.Tensor) -> MicroBatch:
        width = max(2, max(int(side.lengths[rows].max()) for side in self._sides))
        padded = [side.pad_right(rows, width) for side in self._sides]
        ids, mask = torch.cat([each.long() for each, _ in padded]), torch.cat([each for _, each in padded])
        return MicroBatch(
            rows=rows,
            input_ids=ids,
            attention_mask=mask,
            prompt_width=1,
            response_ids=ids[:, 1:],
            response_mask=mask[:, 1:],
        )


def read_sequences(
    head: Head, batch: TensorDict, vocab_size: int | None = None, *, candidates: bool = False
) -> SequenceBatch:
    """The rows of a batch as a model with this head reads them."""
    if head == "score":
        return ScoredBatch(batch, vocab_size)
    return SequenceBatch(batch, vocab_size, candidates=candidates)


def forward_scores(model: Any, micro_batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """`scores` float32 [b], or [b, 2] of rows with two sides: what transformers answers for each sequence alone."""
    ids, mask = micro_batch.input_ids.to(device), micro_batch.attention_mask.to(device)
    if model.get_output_embeddings() is not None:  # a value head, which has a number at every token
        values = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        flat = values[torch.arange(len(ids), device=device), mask.sum(1) - 1, 0]
    else:
        flat = _classify(model, ids, mask)
    sides = flat.float().view(-1, max(1, len(micro_batch.rows))).T
    return {"scores": sides.squeeze(1) if sides.shape[1] == 1 else sides}


def _classify(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Numbers [n]. Decoders read theirs at the last token that is not `pad_token_id`, or at the last where it is unset.

    Without one, rows are padded with a token that ends none of them, for this pass.
    """
    config = model.config.get_text_config()
    given = getattr(config, "pad_token_id", None)
    pad: int = -1 if given is None else given
    if not 0 <= pad < model.get_input_embeddings().weight.shape[0]:
        ends = set(ids[torch.arange(len(ids)), mask.sum(1).cpu() - 1].tolist())
        pad = next(token for token in count() if token not in ends)
    config.pad_token_id = pad
    try:
        logits: torch.Tensor = model(input_ids=ids.masked_fill(~mask, pad), attention_mask=mask.long()).logits
    finally:
        config.pad_token_id = given
    return logits[:, 0]


def _join(prompts: Ragged, responses: Ragged) -> Ragged:
    """Each prompt and its response as one row."""
    firsts, seconds = (torch.split(each.packed, each.lengths.tolist()) for each in (prompts, responses))
    rows = [part for pair in zip(firsts, seconds, strict=True) for part in pair]
    lengths = prompts.lengths + responses.lengths
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Ragged(to_jagged(torch.cat([prompts.packed[:0], *rows]), offsets))
