"""Before a run trains adapters: proof that the sampler generates with them, not from the base."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hf_engine import LOGPROB_BOUNDS, measure_logprob_gap
from hf_protocols.errors import ReshardError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_engine import HybridEngine, SamplingParams, SupportsAdapters, TrainBackend

__all__ = ["probe_adapters"]

_MOST_TOKENS = 16
_FIRST_STD, _LARGEST_STD, _FACTOR = 1e-3, 100.0, 4.0
_MARGIN = 4.0
"""Multiple of the bound by which the adapters must move the base's log-probs, so that the two are distinguishable."""


def probe_adapters(
    train: SupportsAdapters, engine: HybridEngine, batch: TensorDict, sampling: SamplingParams, *, dtype: str
) -> None:
    """Sets every `B` to small random values, generates, compares, and brings every bit of `B` back.

    The values grow until the trainer's log-probs are further than the bound from the base's. The sampler's must be
    within the bound of the trainer's then. Collective over the ranks of the engine.

    Args:
        train: the training backend.
        engine: that brings its weights to the sampler.
        batch: prompts of this rank.
        sampling: of the run.
        dtype: whose bounds count, by torch's name.

    Raises:
        ReshardError: on all ranks, for samples of other weights, or adapters that change nothing.
    """
    bound = LOGPROB_BOUNDS[dtype][0] / min(1.0, sampling.temperature)
    few = replace(sampling, n=1, min_new_tokens=0, max_new_tokens=min(sampling.max_new_tokens, _MOST_TOKENS))
    std = _FIRST_STD
    while std < _LARGEST_STD:
        with train.perturbed_adapters(seed=sampling.seed, std=std):
            with engine.generation():
                responses = engine.generate(batch, few)
            moved, missed = _measure(train, engine, batch, responses, few.temperature)
        if missed > bound:
            raise ReshardError(
                f"the adapters of [model.lora] do not reach generation: with B set at random, the sampler's log-probs "
                f"differ from the trainer's by {missed:.3g} nats on average (bound {bound:g}, {dtype}), and the "
                f"trainer's from the base's by {moved:.3g}. Use another rollout.backend, or report this one"
            )
        if moved > _MARGIN * bound:
            return
        std *= _FACTOR
    raise ReshardError(
        f"the adapters of [model.lora] change nothing: with B drawn with deviation {std / _FACTOR:g}, log-probs differ "
        f"from the base's by {moved:.3g} nats on average. Choose other model.lora.targets"
    )


def _measure(
    train: SupportsAdapters, engine: HybridEngine, batch: TensorDict, responses: TensorDict, temperature: float
) -> tuple[float, float]:
    """Mean |difference| of the trainer's log-probs to the base's, and to the sampler's, over all ranks."""
    rows = batch.select("prompt_ids")
    rows["response_ids"] = responses["response_ids"]
    trained = _score(train, rows, temperature)
    with train.adapters_off():
        base = _score(train, rows, temperature)
    gaps = [measure_logprob_gap(each, trained) for each in (base, responses["rollout_logprobs"])]
    tokens = engine.sum_over_ranks(gaps[0].num_tokens)
    moved, missed = (engine.sum_over_ranks(gap.mean * gap.num_tokens) / max(1.0, tokens) for gap in gaps)
    return moved, missed


def _score(train: SupportsAdapters, rows: TensorDict, temperature: float) -> torch.Tensor:
    backend: TrainBackend = train  # type: ignore[assignment] # it is one, with adapters
    found: torch.Tensor = backend.compute_logprobs(rows, temperature=temperature)["logprobs"]
    return found
