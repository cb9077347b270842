"""Log-probabilities of chosen tokens from logits: [B, T, V] is not held in float32, forward or backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["compute_token_logprobs"]

_CHUNK_ELEMENTS = 1 << 24


def compute_token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log of softmax(logits / temperature) at the given tokens, as gather - logsumexp in float32.

    Args:
        logits: [..., V], any float dtype; upcast chunk by chunk. The backward pass holds them and their gradient, both
            in their own dtype, and can be taken once.
        token_ids: int64 [...].
        temperature: divides the logits.
        entropy: also compute the entropy of every distribution, in nats.

    Returns:
        float32 [...] log-probs, and the entropies or None.
    """
    compute: Any = _TokenLogprobs.apply
    logprobs, entropies = compute(logits.flatten(0, -2), token_ids.flatten(), temperature, entropy)
    return logprobs.view(token_ids.shape), entropies.view(token_ids.shape) if entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, normalizers, entropies = (logits.new_zeros(len(ids), dtype=torch.float32) for _ in range(3))
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature)
            normalizers[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(-1, ids[part, None]).squeeze(-1) - normalizers[part]
            if entropy:
                relative = scaled - normalizers[part, None]
                entropies[part] = -(relative.exp() * relative).sum(-1)
        ctx.save_for_backward(logits, ids, normalizers, entropies)
        ctx.arguments = temperature, entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, ids, normalizers, entropies = ctx.saved_tensors
        temperature, entropy = ctx.arguments
        grads = torch.empty_like(logits)
        for part in _chunks(logits):
            # In place where the logits are float32 already: this is most of what a small model's loss costs.
            relative = torch.sub(
                _scaled(logits[part], temperature),
                normalizers[part, None],
                out=grads[part] if grads.dtype == torch.float32 else None,
            )
            factor = -grad_logprobs[part, None]
            if entropy:
                factor = factor - grad_entropies[part, None] * (relative + entropies[part, None])
            grad = relative.exp_().mul_(factor)
            grad.scatter_add_(-1, ids[part, None], grad_logprobs[part, None])
            if temperature != 1.0:
                grad.div_(temperature)
            if grads.dtype != torch.float32:
                grads[part] = grad
        return grads, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return (slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature
