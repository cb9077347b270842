"""What goes into a rollout backend and what comes out of it, the same for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict

from hf_engine.backends._base import SamplingParams
from hf_engine.backends._jagged import to_jagged
from hf_protocols.errors import BackendError, NonFiniteLossError

__all__ = ["build_responses", "check_prompts", "end_of_sequence_ids"]


def check_prompts(lengths: Iterable[int], positions: int | None, sampling: SamplingParams) -> None:
    """Refuses prompts that are empty or do not fit the model's positions with `max_new_tokens`.

    Raises:
        BackendError: naming the row and the numbers.
    """
    limit = None if positions is None else positions - sampling.max_new_tokens
    for row, length in enumerate(lengths):
        if length == 0:
            raise BackendError(f"prompt of row {row} is empty; a prompt needs at least one token")
        if limit is not None and length > limit:
            raise BackendError(
                f"prompt of row {row} has {length} tokens, above the model's {positions} positions - "
                f"max_new_tokens={sampling.max_new_tokens} = {limit}; shorten the prompt or lower max_new_tokens"
            )


def build_responses(
    ids: torch.Tensor, logprobs: torch.Tensor, lengths: torch.Tensor, reasons: torch.Tensor, *, n: int, version: int
) -> TensorDict:
    """The columns that `RolloutBackend.generate` returns.

    Args:
        ids: int64, the tokens of all samples one after the other.
        logprobs: float32, aligned with `ids`.
        lengths: int64 [B * n].
        reasons: int64 [B * n], finish reasons.
        n: samples per prompt.
        version: of the weights.

    Raises:
        NonFiniteLossError: for a log-prob that is not finite, naming the row of its prompt.
    """
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if not torch.isfinite(logprobs).all():
        token = (~torch.isfinite(logprobs)).nonzero()[0]
        row = int(torch.searchsorted(offsets, token, right=True) - 1) // n
        raise NonFiniteLossError(
            f"the model's logits for the prompt of row {row} are not finite at weight version {version}: the weights "
            "have diverged; lower the learning rate"
        )
    return TensorDict(
        {
            "response_ids": to_jagged(ids, offsets),
            "response_mask": to_jagged(torch.ones_like(ids, dtype=torch.bool), offsets),
            "rollout_logprobs": to_jagged(logprobs, offsets),
            "finish_reason": reasons,
            "weight_version": torch.full_like(reasons, version),
        },
        batch_size=[len(lengths)],
    )


def end_of_sequence_ids(generation_config: Any, text_config: Any) -> frozenset[int]:
    """The tokens that end a response of a model by themselves: its generation config's, else its config's."""
    stated = getattr(generation_config, "eos_token_id", None)
    ids = stated if stated is not None else text_config.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
