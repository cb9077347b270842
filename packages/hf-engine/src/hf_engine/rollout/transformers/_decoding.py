"""The decode loop: one batch of left-padded prompts, their samples, and a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.rollout.responses import LENGTH, STOP
from hf_engine.rollout.sampling import sample_tokens
from hf_engine.rollout.stop_strings import StopStrings
from hf_engine.rollout.transformers._cache import moves_rows_alone, prompts_shared

__all__ = ["Decoding", "close_ranks"]

_DROPPED, _DROPPED_WITH_COPIES = 1 / 16, 1 / 4
"""Least share of finished samples at which they are dropped, by caches that move rows and by caches that copy."""


class Decoding:
    """One batch of prompts on its way: results are written where a sample belongs, finished samples drop out."""

    def __init__(
        self, model: Any, stop_token_ids: frozenset[int], sampling: SamplingParams, strings: StopStrings | None = None
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._strings = strings
        stops = sorted(stop_token_ids | set(sampling.stop_token_ids))
        self._stops = torch.tensor(stops, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def run(self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, uniforms: torch.Tensor, cache: Any) -> None:
        """Decodes prompts [b, P], padded on the left, into b * n samples with uniforms [b * n, max_new_tokens]."""
        n, device = self._sampling.n, self._model.device
        num_samples, capacity = uniforms.shape
        self._uniforms = uniforms.to(device)
        self.tokens = torch.zeros(num_samples, capacity, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_samples, capacity, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self.reasons = torch.full((num_samples,), LENGTH, device=device)
        width = prompt_ids.shape[1]
        mask = prompt_mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(prompt_ids.to(device), mask, positions, cache).repeat_interleave(n, 0)
        cache.batch_repeat_interleave(n)
        mask = torch.nn.functional.pad(mask.repeat_interleave(n, 0), (0, capacity), value=True)
        positions = positions[:, -1:].repeat_interleave(n, 0)
        samples = torch.arange(num_samples, device=device)
        dropped = _DROPPED if moves_rows_alone(cache) else _DROPPED_WITH_COPIES
        with prompts_shared(cache):
            for position in range(capacity):
                finished = self._draw(logits, samples, position)
                if position + 1 == capacity or bool(finished.all()):
                    break
                if int(finished.sum()) >= dropped * len(samples):
                    alive = close_ranks(~finished)
                    cache.batch_select_indices(alive)
                    samples, mask, positions = samples[alive], mask[alive], positions[alive]
                positions = positions + 1
                drawn = self.tokens[samples, position, None]
                logits = self._forward(drawn, mask[:, : width + position + 1], positions, cache)

    def _draw(self, logits: torch.Tensor, samples: torch.Tensor, position: int) -> torch.Tensor:
        """Draws one token for every sample that still runs; returns which samples of the batch have finished."""
        scaled = logits.float() / self._sampling.temperature
        allowed = scaled
        if position < self._sampling.min_new_tokens and len(self._stops):
            allowed = scaled.index_fill(-1, self._stops, -torch.inf)
        drawn = sample_tokens(allowed, self._uniforms[samples, position], self._sampling)
        logprobs = scaled.gather(-1, drawn[:, None]).squeeze(-1) - scaled.logsumexp(-1)
        running = self.reasons[samples] != STOP
        self.tokens[samples, position] = drawn
        self.logprobs[samples, position] = logprobs
        self.lengths[samples] += running
        stopped = running & torch.isin(drawn, self._stops)
        if self._strings is not None:
            count = position + 1
            recent = self.tokens[samples, max(0, count - self._strings.most_tokens) : count].tolist()
            waits = (running & ~stopped).tolist()
            ends = [wait and self._strings.ends(last, count) for wait, last in zip(waits, recent, strict=True)]
            stopped |= torch.tensor(ends, device=stopped.device)
        self.reasons[samples[stopped]] = STOP
        return ~running | stopped

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [b, V] after the last of the given tokens."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def close_ranks(alive: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the alive rows; the last of them fill the places of finished ones."""
    count = int(alive.sum())
    order = torch.arange(count, device=alive.device)
    order[~alive[:count]] = count + alive[count:].nonzero().squeeze(-1)
    return order
