"""Log-probabilities of chosen tokens from logits: [B, T, V] is not held in float32, forward or backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

__all__ = ["TokenScores", "compute_token_logprobs", "join_candidates", "split_candidates", "sum_logits"]

_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS_ON_CPU = 1 << 19
"""Number of float32 values that stay in a core's cache: passes over larger chunks take more than twice the time."""

_LEAST_LOG_WEIGHT = -1e4
"""Stands for an infinite log, whose product with its weight of 0 would be NaN."""


class TokenScores(NamedTuple):
    """Numbers of the distributions at some positions, by position."""

    logprobs: torch.Tensor
    """Float32 [...], of one token each."""
    entropy: torch.Tensor | None
    """Float32 [...], in nats."""
    candidate_logprobs: torch.Tensor | None
    """Float32 [..., k], of k tokens each; -inf for one outside of the vocabulary."""


def compute_token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    candidate_ids: torch.Tensor | None = None,
) -> TokenScores:
    """The log of softmax(logits / temperature) at the given tokens, as gather - logsumexp in float32.

    Entropy costs a pass over the logits, and nothing in the backward pass of a loss that does not use its gradient.

    Args:
        logits: [..., V], any float dtype; upcast chunk by chunk. The backward pass holds them and their gradient, both
            in their own dtype, and can be taken once.
        token_ids: int64 [...].
        temperature: divides the logits.
        entropy: also compute the entropy of every distribution, in nats.
        candidate_ids: int64 [..., k], more tokens of the same distributions.
    """
    compute: Any = _TokenLogprobs.apply
    ids = join_candidates(token_ids, candidate_ids, logits.shape[-1])
    logprobs, entropies = compute(logits.flatten(0, -2), ids, temperature, entropy)
    chosen, candidates = split_candidates(logprobs, token_ids, candidate_ids, logits.shape[-1])
    return TokenScores(chosen, entropies.view(token_ids.shape) if entropy else None, candidates)


def join_candidates(token_ids: torch.Tensor, candidate_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """One row of ids for each position, int64 [n, 1 + k]; those outside of the vocabulary are moved into it."""
    if candidate_ids is None:
        return token_ids.reshape(-1, 1)
    inside = candidate_ids.flatten(0, -2).clamp(max=vocab_size - 1)
    return torch.cat([token_ids.reshape(-1, 1), inside], dim=1)


def split_candidates(
    logprobs: torch.Tensor, token_ids: torch.Tensor, candidate_ids: torch.Tensor | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [...] and [..., k] of what `join_candidates` joined; -inf for ids outside of the vocabulary."""
    chosen = logprobs[:, 0].view(token_ids.shape)
    if candidate_ids is None:
        return chosen, None
    return chosen, logprobs[:, 1:].reshape(candidate_ids.shape).masked_fill(candidate_ids >= vocab_size, -torch.inf)


def sum_logits(scaled: torch.Tensor, *, mean: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log of the sum of the exponentials of logits [n, V], [n], and the mean logit that they weigh, [n]."""
    if not mean:
        return scaled.logsumexp(-1), None
    highest = scaled.amax(-1, keepdim=True)
    relative = scaled - highest
    weights = relative.exp()
    total = weights.sum(-1)
    average = weights.mul_(relative.clamp_(min=_LEAST_LOG_WEIGHT)).sum(-1) / total
    highest = highest.squeeze(-1)
    return total.log() + highest, average + highest


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.new_zeros(ids.shape, dtype=dtype)
        normalizers, entropies = (logits.new_zeros(len(ids), dtype=dtype) for _ in range(2))
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature)
            normalizers[part], mean = sum_logits(scaled, mean=entropy)
            logprobs[part] = scaled.gather(-1, ids[part]) - normalizers[part, None]
            if mean is not None:
                entropies[part] = normalizers[part] - mean
        ctx.save_for_backward(logits, ids, normalizers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # the gradient of an entropy that is only reported costs nothing
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, ids, normalizers, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = normalizers.new_zeros(ids.shape)
        grads = torch.empty_like(logits)
        is_wide = grads.dtype == normalizers.dtype
        for part in _chunks(logits):
            # In place where the logits are float32 already: this is most of what a small model's loss costs.
            relative = torch.sub(
                _scaled(logits[part], ctx.temperature),
                normalizers[part, None],
                out=grads[part] if is_wide else None,
            )
            factor = -grad_logprobs[part].sum(-1, keepdim=True)
            if grad_entropies is not None:
                bounded = relative.clamp(min=_LEAST_LOG_WEIGHT)
                factor = factor - grad_entropies[part, None] * (bounded + entropies[part, None])
            grad = relative.exp_().mul_(factor)
            grad.scatter_add_(-1, ids[part], grad_logprobs[part])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if not is_wide:
                grads[part] = grad
        return grads, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    elements = min(_CHUNK_ELEMENTS, _CHUNK_ELEMENTS_ON_CPU) if logits.device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(1, elements // max(1, logits.shape[-1]))
    return (slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature
