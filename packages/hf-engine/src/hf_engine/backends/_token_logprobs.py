"""Log-probabilities of chosen tokens from logits, without a second tensor of the logits' size at once."""

from __future__ import annotations

import torch

__all__ = ["compute_token_logprobs"]

_CHUNK_ELEMENTS = 1 << 24


def compute_token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log of softmax(logits / temperature) at the given tokens, as gather - logsumexp in float32.

    Args:
        logits: [b, T, V], any float dtype; upcast chunk by chunk.
        token_ids: int64 [b, T].
        temperature: divides the logits.
        entropy: also compute the entropy of every distribution, in nats.

    Returns:
        float32 [b, T] log-probs, and the entropies or None.
    """
    flat = logits.flatten(0, 1)
    ids = token_ids.flatten()
    rows = max(1, _CHUNK_ELEMENTS // max(1, flat.shape[-1]))
    parts = [
        _logprobs_of_chunk(chunk, chunk_ids, temperature, entropy)
        for chunk, chunk_ids in zip(torch.split(flat, rows), torch.split(ids, rows), strict=True)
    ]
    logprobs = torch.cat([part[0] for part in parts]).view(token_ids.shape)
    entropies = [part[1] for part in parts if part[1] is not None]
    return logprobs, torch.cat(entropies).view(token_ids.shape) if entropies else None


def _logprobs_of_chunk(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, token_ids[:, None]).squeeze(-1) - normalizer
    if not entropy:
        return logprobs, None
    all_logprobs = scaled - normalizer[:, None]
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)
