"""Drawing tokens: counter-based uniforms and inverse-CDF sampling, vectorised over rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_engine.backends.base import SamplingParams

__all__ = ["draw_seeds", "draw_uniforms", "sample_tokens"]

_CHUNK_ELEMENTS = 1 << 22
# The multipliers of splitmix64's finaliser and its increment, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def draw_uniforms(row_ids: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Numbers in [0, 1) for every token of every sample, a pure function of (seed, step, row_id, sample, position).

    Args:
        row_ids: int64 [B].
        sampling: `n` samples per row, `max_new_tokens` positions, `seed` and `step`.

    Returns:
        float64 [B * n, max_new_tokens], the n samples of a row one after the other.
    """
    state = torch.tensor([_signed(sampling.seed)])
    for counter in (
        torch.tensor([_signed(sampling.step)]),
        row_ids.to("cpu", torch.int64)[:, None, None],
        torch.arange(sampling.n)[None, :, None],
        torch.arange(sampling.max_new_tokens)[None, None, :],
    ):
        state = _mix(state * _INCREMENT + counter + 1)
    uniforms = _shift_right(state, 11).double() * 2.0**-53
    return uniforms.flatten(0, 1)


def draw_seeds(row_ids: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """A seed for every sample, of engines that draw by themselves: a pure function of (seed, step, row_id, sample).

    Args:
        row_ids: int64 [B].
        sampling: `n` samples per row, `seed` and `step`.

    Returns:
        int64 [B * n] in [0, 2^31), the n samples of a row one after the other.
    """
    first = draw_uniforms(row_ids, replace(sampling, max_new_tokens=1, min_new_tokens=0))
    return (first[:, 0] * 2.0**31).long()


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The token at which the cumulative probability of the allowed tokens passes the uniform number.

    Args:
        logits: [b, V] already divided by the temperature; -inf where a token is forbidden.
        uniforms: float64 [b] in [0, 1).
        sampling: `greedy`, `top_k`, `top_p`.

    Returns:
        int64 [b].
    """
    if sampling.greedy:
        return logits.argmax(-1)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    chunks = zip(torch.split(logits, rows), torch.split(uniforms, rows), strict=True)
    return torch.cat([_sample_chunk(chunk, u, sampling) for chunk, u in chunks])


def _sample_chunk(logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    probabilities = logits.double().softmax(-1)
    if sampling.top_k or sampling.top_p < 1.0:
        probabilities = probabilities * _allowed(probabilities, sampling)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that the search never passes the last allowed token.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # Of logits that are not finite nothing can be drawn; the caller sees it in the log-probs.
    return tokens.clamp_(max=logits.shape[-1] - 1)


def _allowed(probabilities: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Mask of the tokens that top-k and then top-p leave; among equals the lower token id comes first."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = 0
    before = ordered.cumsum(-1) - ordered
    keep = (before < sampling.top_p * ordered.sum(-1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
