"""Drawing inside vLLM with the numbers of every other backend.

A logits processor draws the token and leaves it as the only one that vLLM's greedy sampler can take. In its place in
the logits stands the number to report: its log-prob under the full distribution at the temperature.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.rollout.sampling import sample_tokens
from hf_engine.rollout.vllm._core import LogitsProcessor, process_dict_updates

__all__ = ["EXTRA", "Draw", "DrawProcessor"]

EXTRA = "hf_engine"
"""Key of a request's `Draw` in the extra_args of vLLM's SamplingParams."""


class Draw:
    """One sample's numbers; the requests of one call share sampling and stops."""

    def __init__(self, uniforms: list[float], sampling: SamplingParams, stops: torch.Tensor) -> None:
        self.uniforms = uniforms
        self.sampling = sampling
        self.stops = stops

    def __deepcopy__(self, memo: dict[int, Any]) -> Draw:
        """VLLM copies the parameters of every request; nothing here is ever written."""
        return self


class DrawProcessor(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of every request; see the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[Draw, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Returns False: the drawn token is rarely the most likely one."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follows requests into, inside and out of the batch; their lists of tokens grow by themselves."""
        process_dict_updates(
            self._requests,
            batch_update,
            lambda params, _, tokens: (params.extra_args[EXTRA], tokens) if params.extra_args else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replaces logits [b, V] by the log-prob of the drawn token, +inf if it is not finite, and -inf elsewhere."""
        if not self._requests:  # vLLM measures its memory
            return logits
        drawing = [self._requests[row] for row in range(len(logits))]
        sampling, stops = drawing[0][0].sampling, drawing[0][0].stops.to(logits.device)
        scaled = logits.float() / sampling.temperature
        allowed = scaled
        young = [row for row, (_, tokens) in enumerate(drawing) if len(tokens) < sampling.min_new_tokens]
        if young and len(stops):
            allowed = scaled.clone()
            allowed[torch.tensor(young, device=logits.device)[:, None], stops] = -torch.inf
        uniforms = [draw.uniforms[min(len(tokens), len(draw.uniforms) - 1)] for draw, tokens in drawing]
        drawn = sample_tokens(allowed, torch.tensor(uniforms, dtype=torch.float64, device=logits.device), sampling)
        logprobs = scaled.gather(-1, drawn[:, None]) - scaled.logsumexp(-1, keepdim=True)
        finite = torch.isfinite(logprobs)
        return logits.fill_(-torch.inf).scatter_(-1, drawn[:, None], logprobs.masked_fill(~finite, torch.inf))
