"""Inputs of a stage, from a micro-batch: token ids, positions, and which tokens see which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_engine.models.attention import build_score_term
from hf_engine.training.micro_batches import MicroBatch, PackedMicroBatch

__all__ = ["DecoderInputs"]


@dataclass(frozen=True, kw_only=True)
class DecoderInputs:
    """A micro-batch as megatron-core wants it: tokens start at column 0 of each of the b rows, packed ones included."""

    input_ids: torch.Tensor
    """int64 [b, S], padding on the right. The ranks that share a sequence have equal parts of S."""
    position_ids: torch.Tensor | None
    """int64 [b, S]; None: the columns."""
    attention_mask: torch.Tensor | None
    """[b or 1, 1, S, S], 0 where a query sees a key and -inf elsewhere; None: each sees itself and all before it."""
    predicting: torch.Tensor
    """int64 [n], of the flattened [S, b]: whose hidden states predict the response tokens, row by row."""

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        *,
        window: int | None,
        multiple: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DecoderInputs:
        """Arranges a micro-batch.

        Args:
            micro_batch: padded rows, or packed ones.
            window: keys that a query sees, itself included; None: all.
            multiple: S is divisible by it: the number of ranks that share a sequence.
            dtype: of the mask, that of the computation.
            device: where the tensors go.
        """
        width = -(-micro_batch.input_ids.shape[1] // multiple) * multiple
        if isinstance(micro_batch, PackedMicroBatch):
            return cls._of_packed(micro_batch, width, window, dtype, device)
        num_rows, given = micro_batch.input_ids.shape
        mask = micro_batch.attention_mask[:, : micro_batch.prompt_width]
        left = mask.shape[1] - mask.sum(-1)
        moved = micro_batch.input_ids.gather(1, (torch.arange(given) + left[:, None]) % given)
        rows, tokens = micro_batch.response_mask.nonzero(as_tuple=True)
        columns = tokens + micro_batch.prompt_width - 1 - left[rows]
        return cls(
            input_ids=_pad(moved, width, 0).to(device),
            position_ids=None,
            attention_mask=None if window is None or window >= width else _slide(width, window, dtype, device),
            predicting=(columns * num_rows + rows).to(device),
        )

    @classmethod
    def _of_packed(
        cls, packed: PackedMicroBatch, width: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderInputs:
        """A token sees its own prompt and its own response; padding sees padding."""
        num_rows, given = packed.input_ids.shape
        segments, prompts = (_pad(each, width, -1).to(device) for each in (packed.segments, packed.prompts))
        positions = _pad(packed.positions, width, 0).to(device)
        of_key, at_key, at_query = segments[:, None, :], positions[:, None, :], positions[:, :, None]
        sees = ((of_key == prompts[:, :, None]) | (of_key == segments[:, :, None])) & (at_key <= at_query)
        if window is not None:
            sees &= at_key > at_query - window
        rows, columns = packed.predicting_positions // given, packed.predicting_positions % given
        return cls(
            input_ids=_pad(packed.input_ids, width, 0).to(device),
            position_ids=positions,
            attention_mask=build_score_term(sees[:, None], dtype),
            predicting=(columns * num_rows + rows).to(device),
        )


def _pad(rows: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=value)


def _slide(width: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    columns = torch.arange(width, device=device)
    sees = (columns <= columns[:, None]) & (columns > columns[:, None] - window)
    return build_score_term(sees[None, None], dtype)
