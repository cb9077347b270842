"""A batch as vLLM's requests: one for every sample, all of one call in the same order on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams as EngineSampling
from vllm.sampling_params import RequestOutputKind

from hf_engine.backends._base import SamplingParams
from hf_engine.backends._sampling import draw_uniforms
from hf_engine.backends.vllm._draws import EXTRA, Draw

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["run_requests"]


def run_requests(engine: Any, batch: TensorDict, sampling: SamplingParams, stops: Sequence[int]) -> list[Any]:
    """Runs a batch to its end.

    Args:
        engine: vLLM's.
        batch: columns `prompt_ids` and `row_id`.
        sampling: how to draw.
        stops: all tokens that end a response.

    Returns:
        vLLM's outputs, the n samples of a prompt one after the other.
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
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={EXTRA: draw},
            )
            engine.add_request(str(sample), {"prompt_token_ids": prompt_ids}, parameters)
    finished: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output.outputs[0]
    return [finished[sample] for sample in range(len(uniforms))]
