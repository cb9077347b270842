"""Changes of scores before advantages are computed: clips, penalties and length terms. Pure, all [B].

A NaN score (the reward could not score the response) stays NaN.
"""

from __future__ import annotations

import torch

from hf_protocols.arguments import show
from hf_protocols.errors import ConfigError

__all__ = ["TRUNCATED", "add_length_term", "clip_scores", "subtract_missing_eos"]

TRUNCATED = 1
"""The `finish_reason` of a response that reached the token limit; 0 is one that stopped by itself."""


def clip_scores(scores: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Returns scores [B] cut at -limit and limit; unchanged for None."""
    return scores if limit is None else scores.clamp(-limit, limit)


def subtract_missing_eos(scores: torch.Tensor, finish_reason: torch.Tensor, penalty: float | None) -> torch.Tensor:
    """Returns scores [B] minus `penalty` where the response was truncated (`finish_reason` 1); unchanged for None.

    TRL's `missing_eos_penalty`.
    """
    return scores if penalty is None else torch.where(finish_reason == TRUNCATED, scores - penalty, scores)


def add_length_term(
    scores: torch.Tensor, lengths: torch.Tensor, *, max_tokens: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """Returns scores [B] plus a term that falls over the last `buffer` tokens (DAPO, Yu et al. 2025, eq. 13).

    The term is 0 up to `max_tokens - buffer` tokens, then falls linearly to -factor at `max_tokens`. Longer responses
    get -factor. DAPO adds it after the metric of dynamic sampling was taken, so it does not decide which groups stay.

    Args:
        scores: [B].
        lengths: [B], response tokens.
        max_tokens: limit of the response, tokens.
        buffer: tokens before the limit, 1 to `max_tokens`.
        factor: size of the largest penalty.

    Raises:
        ConfigError: the buffer is empty or longer than the response may be.
    """
    if not 0 < buffer <= max_tokens:
        rule = f"is not between 1 and the {show(max_tokens)} tokens of a response"
        raise ConfigError(f"overlong_buffer={show(buffer)} {rule}. Lower it, or raise rollout.max_new_tokens.")
    excess = (lengths.to(scores.dtype) - (max_tokens - buffer)).clamp(0, buffer)
    return scores - factor * excess / buffer
