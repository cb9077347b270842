"""Log-probs and entropies from hidden states under a vocabulary that is sharded over ranks.

Logits exist for one chunk of tokens at a time, forward and backward: [B, T, V] is never held, in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_engine.training.token_logprobs import TokenScores, join_candidates, split_candidates, sum_logits

__all__ = ["compute_vocab_parallel_logprobs", "find_vocab_parallel_top_ids"]

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
    candidate_ids: torch.Tensor | None = None,
) -> TokenScores:
    """The log of softmax(hidden @ weight.T / temperature) at the given tokens. Collective over `group`.

    Args:
        hidden: [..., h], the same on every rank of the group.
        weight: [rows, h], this rank's rows of the output layer, in rank order; the last ones may be padding.
        token_ids: int64 [...].
        group: the tensor-parallel ranks.
        vocab_size: V, without padding.
        temperature: divides the logits.
        entropy: also return the entropy of every distribution, in nats.
        candidate_ids: int64 [..., k], more tokens of the same distributions.

    Returns:
        float32, the same on every rank.
    """
    first = dist.get_rank(group) * weight.shape[0]
    num_rows = _count_rows(weight, first, vocab_size)
    compute: Any = _VocabParallelLogprobs.apply
    ids = join_candidates(token_ids, candidate_ids, vocab_size)
    logprobs, entropies = compute(hidden.flatten(0, -2), weight, ids, group, first, num_rows, temperature, entropy)
    chosen, candidates = split_candidates(logprobs, token_ids, candidate_ids, vocab_size)
    return TokenScores(chosen, entropies.view(token_ids.shape) if entropy else None, candidates)


@torch.no_grad()
def find_vocab_parallel_top_ids(
    hidden: torch.Tensor, weight: torch.Tensor, k: int, *, group: dist.ProcessGroup, vocab_size: int
) -> torch.Tensor:
    """The ids of the k likeliest tokens, the likeliest first: int64 [..., k], alike on every rank. Collective.

    Args:
        hidden: [..., h], the same on every rank of the group.
        weight: [rows, h]; see `compute_vocab_parallel_logprobs`.
        k: at most `vocab_size`.
        group: the tensor-parallel ranks.
        vocab_size: V, without padding.
    """
    flat = hidden.flatten(0, -2)
    first = dist.get_rank(group) * weight.shape[0]
    num_rows = _count_rows(weight, first, vocab_size)
    found = torch.empty(len(flat), k, dtype=torch.int64, device=hidden.device)
    for part in _chunks(len(flat), weight.shape[0]):
        logits = _logits(flat[part], weight, 1.0)
        logits[:, num_rows:] = -torch.inf
        values, rows = logits.topk(min(k, weight.shape[0]), dim=-1)
        everyones, ids = _gather_columns(values, group), _gather_columns(rows + first, group)
        found[part] = ids.gather(-1, everyones.topk(k, dim=-1).indices)
    return found.view(*hidden.shape[:-1], k)


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
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        normalizers, entropies = (hidden.new_zeros(len(ids), dtype=torch.float32) for _ in range(2))
        for part in _chunks(len(ids), weight.shape[0]):
            logits = _logits(hidden[part], rows, temperature)
            normalizer, relative_mean = _sum_vocabulary(logits, group, mean=entropy)
            tokens, columns, local = _local_targets(ids[part], first, num_rows)
            sums = logits.new_zeros(len(normalizer), ids.shape[1] + 1)
            sums[tokens, columns] = logits[tokens, local]
            if relative_mean is not None:
                sums[:, -1] = -relative_mean
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            logprobs[part], entropies[part] = sums[:, :-1] - normalizer[:, None], sums[:, -1]
            normalizers[part] = normalizer
        ctx.save_for_backward(hidden, weight, ids, normalizers, entropies)
        ctx.arguments = group, first, num_rows, temperature
        ctx.set_materialize_grads(False)  # the gradient of an entropy that is only reported costs nothing
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, normalizers, entropies = ctx.saved_tensors
        group, first, num_rows, temperature = ctx.arguments
        if grad_logprobs is None:
            grad_logprobs = normalizers.new_zeros(ids.shape)
        rows = weight[:num_rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(ids), weight.shape[0]):
            relative = _logits(hidden[part], rows, temperature) - normalizers[part, None]
            factor = grad_logprobs[part].sum(-1, keepdim=True)
            if grad_entropies is not None:
                factor = factor + grad_entropies[part, None] * (relative + entropies[part, None])
            grad = -relative.exp() * factor
            tokens, columns, local = _local_targets(ids[part], first, num_rows)
            # Added one by one: a token may be among its own candidates.
            grad.index_put_((tokens, local), grad_logprobs[part][tokens, columns], accumulate=True)
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


def _count_rows(weight: torch.Tensor, first: int, vocab_size: int) -> int:
    """Rows of this rank that belong to tokens."""
    return max(0, min(vocab_size - first, weight.shape[0]))


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ rows.T).float()
    return logits if temperature == 1.0 else logits / temperature


def _sum_vocabulary(
    logits: torch.Tensor, group: dist.ProcessGroup, *, mean: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The normalizer of the whole vocabulary, [n], and this rank's share of the mean log-prob, [n]."""
    own, average = sum_logits(logits, mean=mean and logits.shape[-1] > 0)
    whole = own if group.size() == 1 else _gather_columns(own[:, None], group).logsumexp(-1)
    if not mean:
        return whole, None
    return whole, torch.zeros_like(whole) if average is None else (own - whole).exp() * (average - whole)


def _gather_columns(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ranks * k], the [n, k] of every rank."""
    if group.size() == 1:
        return values
    everyones = values.new_empty(group.size() * values.numel())
    dist.all_gather_single(everyones, values.flatten(), group=group)
    return everyones.view(group.size(), *values.shape).transpose(0, 1).flatten(1)


def _local_targets(ids: torch.Tensor, first: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids among [n, m] that this rank's rows hold: token, column, and row."""
    tokens, columns = ((ids >= first) & (ids < first + num_rows)).nonzero(as_tuple=True)
    return tokens, columns, ids[tokens, columns] - first
