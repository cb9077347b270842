"""Changes of scores before advantages are computed: clips, penalties and length terms. Pure, all [B].

A NaN score (the reward could not score the response) stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

__all__ = ["TRUNCATED", "LengthTerm", "clip_scores", "subtract_missing_eos"]

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


@dataclass(frozen=True, kw_only=True)
class LengthTerm:
    """A term that falls over the last tokens of a response (DAPO, Yu et al. 2025, soft overlong punishment).

    It is 0 up to `max_tokens - buffer` tokens, then falls linearly to -factor at `max_tokens`. Longer responses get
    -factor. DAPO adds it after the metric of dynamic sampling was taken, so it does not decide which groups stay.

    Raises:
        ConfigError: the buffer is empty or longer than the response may be.
    """

    max_tokens: int
    """Limit of the response, tokens."""
    buffer: int
    """Tokens before the limit, 1 to `max_tokens`."""
    factor: float = 1.0
    """Size of the largest penalty."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer = {show(self.buffer)}: is not between 1 and the {show(self.max_tokens)} "
                "tokens of a response. Lower it, or raise rollout.max_new_tokens"
            )

    def __call__(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns scores [B] plus the term, by lengths [B] in tokens."""
        excess = (lengths.to(scores.dtype) - (self.max_tokens - self.buffer)).clamp(0, self.buffer)
        return scores - self.factor * excess / self.buffer
