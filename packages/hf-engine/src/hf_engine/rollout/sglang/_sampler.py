"""Drawing inside SGLang with the numbers of every other backend, and log-probs of the full distribution.

SGLang carries a request's own parameters to the sampler only with a custom logits processor: `Carrier` is one that
changes nothing and is never called.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.rollout.sampling import sample_tokens
from hf_engine.rollout.sglang._core import CustomLogitProcessor, Sampler

__all__ = ["Carrier", "DrawingSampler"]


class Carrier(CustomLogitProcessor):  # type: ignore[misc]
    """Brings `uniforms`, `prompt_length`, `stops` and `sampling` of a request to the sampler."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """The logits as they are."""
        return logits


class DrawingSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler for requests that bring their random numbers.

    All requests of a batch are of one call: they share sampling and stops.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Draws one token for every row of logits [b, V]; `positions` are those of the last tokens seen."""
        requests = sampling_info.custom_params
        if not requests:  # SGLang tries itself out
            arguments = logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            tried: torch.Tensor = super().forward(*arguments, **options)
            return tried
        sampling = SamplingParams(**requests[0]["sampling"])
        scaled = logits_output.next_token_logits.float() / sampling.temperature
        drawn_before = [
            position + 1 - request["prompt_length"]
            for position, request in zip(positions.tolist(), requests, strict=True)
        ]
        allowed, stops = scaled, requests[0]["stops"]
        young = [row for row, count in enumerate(drawn_before) if count < sampling.min_new_tokens]
        if young and stops:
            allowed = scaled.clone()
            allowed[torch.tensor(young)[:, None], torch.tensor(stops)] = -torch.inf
        # What is drawn within a prompt that came in part, or once more after the end, is thrown away.
        numbers = [
            request["uniforms"][max(0, min(count, sampling.max_new_tokens - 1))]
            for request, count in zip(requests, drawn_before, strict=True)
        ]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=scaled.device)
        drawn = sample_tokens(allowed, uniforms, sampling).to(torch.int32)
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                scaled.log_softmax(-1), top_logprobs_nums, token_ids_logprobs, drawn
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(drawn, sampling_info)
        return drawn
