"""A batch as vLLM's requests: one for every sample, all of one call in the same order on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.rollout.sampling import draw_uniforms
from hf_engine.rollout.vllm._core import RequestOutputKind
from hf_engine.rollout.vllm._core import SamplingParams as EngineSampling
from hf_engine.rollout.vllm._draws import EXTRA, Draw

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.rollout.stop_strings import StopStrings
    from hf_engine.rollout.vllm._core import LoRARequest

__all__ = ["EngineResponse", "run_requests"]


@dataclass(frozen=True)
class EngineResponse:
    """One sample."""

    token_ids: list[int]
    logprobs: list[float]
    """Aligned with `token_ids`."""
    is_stopped: bool
    """By a stop token or string; else it is as long as it may be."""


def run_requests(
    engine: Any,
    batch: TensorDict,
    sampling: SamplingParams,
    stops: Sequence[int],
    strings: StopStrings | None,
    *,
    adapter: LoRARequest | None = None,
) -> list[EngineResponse]:
    """Runs a batch to its end.

    Args:
        engine: vLLM's.
        batch: columns `prompt_ids` and `row_id`.
        sampling: how to draw.
        stops: all tokens that end a response.
        strings: what else ends one; it is looked for after every token.
        adapter: with which all are computed; None: with the base alone.

    Returns:
        The n samples of a prompt one after the other.
    """
    uniforms = draw_uniforms(batch["row_id"], sampling).tolist()
    stop_ids = torch.tensor(list(stops), dtype=torch.int64)
    for row, prompt in enumerate(batch["prompt_ids"].unbind()):
        prompt_ids = prompt.tolist()
        for sample in range(row * sampling.n, (row + 1) * sampling.n):
            draw = Draw(uniforms[sample], sampling, stop_ids)
            parameters = EngineSampling(
                temperature=0.0,  # the draw leaves one token to take
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(stops),
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=RequestOutputKind.CUMULATIVE if strings else RequestOutputKind.FINAL_ONLY,
                extra_args={EXTRA: draw},
            )
            engine.add_request(str(sample), {"prompt_token_ids": prompt_ids}, parameters, lora_request=adapter)
    finished: dict[int, EngineResponse] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (found,) = output.outputs
            completes = False
            if strings is not None:
                completes = strings.ends(found.token_ids[-strings.most_tokens :], len(found.token_ids))
            if completes and not output.finished:
                engine.abort_request([output.request_id])
            if completes or output.finished:
                logprobs = [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]
                is_stopped = completes or found.finish_reason == "stop"
                finished[int(output.request_id)] = EngineResponse(list(found.token_ids), logprobs, is_stopped)
    return [finished[sample] for sample in range(len(uniforms))]
