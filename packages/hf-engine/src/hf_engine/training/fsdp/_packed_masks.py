"""Attention of packed rows: a token sees its own prompt and its own response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_engine.models.attention import build_score_term
from hf_engine.training.micro_batches import MicroBatch, PackedMicroBatch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["attend_in_packs"]


def attend_in_packs(model: Any, micro_batch: MicroBatch, device: torch.device) -> AbstractContextManager[None]:
    """Inside the block, a forward pass on packed rows uses their masks. For other rows nothing changes."""
    if not isinstance(micro_batch, PackedMicroBatch):
        return nullcontext()
    return _packed_masks(
        model, micro_batch.positions.to(device), micro_batch.segments.to(device), micro_batch.prompts.to(device)
    )


@contextmanager
def _packed_masks(model: Any, positions: torch.Tensor, segments: torch.Tensor, prompts: torch.Tensor) -> Iterator[None]:
    """Has transformers build each kind of mask of the model, full, sliding or chunked, from positions.

    A model's own code asks for its masks by a rule on the columns of queries and keys. The rule is asked about their
    positions instead, and joined with the rule that a key is of the query's prompt or of the same response.
    """
    kind = model.config.get_text_config()._attn_implementation
    builders: Any = ALL_MASK_ATTENTION_FUNCTIONS
    build, uses = builders[kind], 0

    def build_packed(*, mask_function: Any, **options: Any) -> Any:
        nonlocal uses
        uses += 1

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            of_key = segments[row, key]
            is_near = (of_key == prompts[row, query]) | (of_key == segments[row, query])
            return is_near & mask_function(row, head, positions[row, query], positions[row, key])

        mask = build(mask_function=sees, **options | {"attention_mask": None, "allow_is_causal_skip": False})
        is_bool = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
        return build_score_term(mask, options["dtype"]) if is_bool else mask

    builders[kind] = build_packed
    try:
        yield
    finally:
        del builders[kind]
    assert uses, "a family of EXACT_FAMILIES builds its masks with transformers' functions"
