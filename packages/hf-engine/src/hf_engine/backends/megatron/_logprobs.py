"""Log-probs and entropies from hidden states under a vocabulary that is cut over ranks.

Logits exist for one chunk of tokens at a time, forward and backward: [B, T, V] is never held, in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["compute_vocab_parallel_logprobs"]

_CHUNK_ELEMENTS = 1 << 24


def compute_vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log of softmax(hidden @ weight.T / temperature) at the given tokens. Collective over `group`.

    Args:
        hidden: [b, T, h], the same on every rank of the group.
        weight: [rows, h], this rank's rows of the output layer, in rank order; the last ones may be padding.
        token_ids: int64 [b, T].
        group: the tensor-parallel ranks.
        vocab_size: V, without padding.
        temperature: divides the logits.
        entropy: also return the entropy of every distribution, in nats.

    Returns:
        float32 [b, T] log-probs, and the entropies or None, the same on every rank.
    """
    first = dist.get_rank(group) * weight.shape[0]
    num_rows = max(0, min(vocab_size - first, weight.shape[0]))
    compute: Any = _VocabParallelLogprobs.apply
    logprobs, entropies = compute(
        hidden.flatten(0, 1), weight, token_ids.flatten(), group, first, num_rows, temperature, entropy
    )
    return logprobs.view(token_ids.shape), entropies.view(token_ids.shape) if entropy else None


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        group: dist.ProcessGroup,
        first: int,
        num_rows: int,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = weight[:num_rows]
        logprobs, normalizers, entropies = (hidden.new_zeros(len(ids), dtype=torch.float32) for _ in range(3))
        for part in _chunks(len(ids), weight.shape[0]):
            logits = _logits(hidden[part], rows, temperature)
            normalizer = _logsumexp(logits, group)
            picked, columns = _local_targets(ids[part], first, num_rows)
            sums = logits.new_zeros(2, len(normalizer))
            sums[0, picked] = logits[picked, columns]
            if entropy:
                relative = logits - normalizer[:, None]
                sums[1] = -(relative.exp() * relative).sum(-1)
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            logprobs[part], normalizers[part], entropies[part] = sums[0] - normalizer, normalizer, sums[1]
        ctx.save_for_backward(hidden, weight, ids, normalizers, entropies)
        ctx.arguments = group, first, num_rows, temperature, entropy
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, normalizers, entropies = ctx.saved_tensors
        group, first, num_rows, temperature, entropy = ctx.arguments
        rows = weight[:num_rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(ids), weight.shape[0]):
            relative = _logits(hidden[part], rows, temperature) - normalizers[part, None]
            factor = grad_logprobs[part, None]
            if entropy:
                factor = factor + grad_entropies[part, None] * (relative + entropies[part, None])
            grad = -relative.exp() * factor
            picked, columns = _local_targets(ids[part], first, num_rows)
            grad[picked, columns] += grad_logprobs[part][picked]
            grad = (grad / temperature).to(weight.dtype)
            grad_hidden[part] = grad @ rows
            if grad_weight is not None:
                grad_weight[:num_rows] += grad.T @ hidden[part]
        if group.size() > 1:
            dist.all_reduce(grad_hidden, group=group)
        given = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, given, None, None, None, None, None, None


def _chunks(num_tokens: int, vocab_rows: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab_rows)
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ rows.T).float()
    return logits if temperature == 1.0 else logits / temperature


def _logsumexp(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    own = logits.logsumexp(-1)
    if group.size() == 1:
        return own
    everyones = own.new_empty(group.size() * len(own))
    dist.all_gather_single(everyones, own.contiguous(), group=group)
    return everyones.view(group.size(), -1).logsumexp(0)


def _local_targets(ids: torch.Tensor, first: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens this rank's rows hold, and at which row."""
    picked = ((ids >= first) & (ids < first + num_rows)).nonzero().flatten()
    return picked, ids[picked] - first
