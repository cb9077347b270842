"""Check by log-probs that a rollout engine generates from the weights that it was given. Pure.

Digests prove which bytes arrived in memory that can be read. An engine that packs its weights away can only be checked
by its samples: if the weights are the same, the log-probs of the samples agree with those that the training backend
computes, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hf_engine.backends.jagged import Ragged
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks, show

__all__ = ["LOGPROB_BOUNDS", "LogprobGap", "check_logprobs", "find_coarsest", "measure_logprob_gap"]

_check = Checks(ReshardError)

LOGPROB_BOUNDS: Mapping[str, tuple[float, float]] = {
    "float64": (1e-3, 1e-1),
    "float32": (1e-3, 1e-1),
    "float16": (5e-2, 2.0),
    "bfloat16": (1e-1, 5.0),
}
"""Largest mean and largest single |difference|, in nats, by the coarser dtype of the two engines.

They hold at temperature 1. Two engines differ by about 1e-5 in float32 and by 0.01 to 0.05 in bfloat16, single tokens
by more; unrelated weights differ by about 1 and up.
"""
_SURE_TOKENS = 64
"""The mean of fewer tokens may be larger."""


@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """|sampler's log-prob - recomputed one| over the tokens of a batch, in nats."""

    mean: float
    max: float
    num_tokens: int


def measure_logprob_gap(rollout: torch.Tensor, recomputed: torch.Tensor) -> LogprobGap:
    """Compares two columns of log-probs of the same tokens: jagged [B, T], or of equal shape without padding.

    A log-prob that is not finite in either column makes the gap infinite.
    """
    for name, column in (("rollout", rollout), ("recomputed", recomputed)):
        _check.kind(name, column, torch.Tensor, "a tensor of log-probs")
    ours, theirs = (Ragged(each).packed if each.is_nested else each.reshape(-1) for each in (recomputed, rollout))
    if ours.shape != theirs.shape:
        raise ReshardError(
            f"{len(theirs)} log-probs of the sampler and {len(ours)} recomputed ones are not of one batch"
        )
    gaps = (theirs.double() - ours.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if not len(gaps):
        return LogprobGap(mean=0.0, max=0.0, num_tokens=0)
    return LogprobGap(mean=float(gaps.mean()), max=float(gaps.max()), num_tokens=len(gaps))


def find_coarsest(dtypes: Iterable[str]) -> str:
    """Returns the dtype with the largest bounds, of some names of `LOGPROB_BOUNDS`."""
    return max(dtypes, key=lambda dtype: LOGPROB_BOUNDS[dtype])


def check_logprobs(
    rollout: torch.Tensor,
    recomputed: torch.Tensor,
    *,
    dtype: str,
    temperature: float = 1.0,
    bounds: tuple[float, float] | None = None,
) -> LogprobGap:
    """Refuses samples that the training weights do not explain.

    Logits differ by rounding, which the temperature divides: below 1 the bounds are divided by it too. The bound of the
    mean grows below 64 tokens, because the mean of a few is less sure than that of many.

    Args:
        rollout: the sampler's log-probs, jagged [B, T].
        recomputed: the training backend's, of the same tokens at the same temperature.
        dtype: the coarser dtype of the two engines, by torch's name; chooses the bounds.
        temperature: of both log-probs, above 0.
        bounds: largest mean and largest single difference in nats, which do not change with temperature and tokens.

    Raises:
        ReshardError: with both figures and their bounds; for bounds that are not two numbers of at least 0.
    """
    _check.number("temperature", temperature)
    gap = measure_logprob_gap(rollout, recomputed)
    mean, largest = _bounds(dtype, bounds)
    if bounds is None:
        mean, largest = (bound / min(1.0, temperature) for bound in (mean, largest))
        mean *= max(1.0, _SURE_TOKENS / max(1, gap.num_tokens))
    if gap.mean > mean or gap.max > largest:
        raise ReshardError(
            f"the engine's log-probs are not those of the training weights: over {gap.num_tokens} tokens they "
            f"differ by {gap.mean:.3g} nats on average (bound {mean:g}) and {gap.max:.3g} at most "
            f"(bound {largest:g}, {dtype}): it generates from other weights, or at another temperature"
        )
    return gap


def _bounds(dtype: object, given: object) -> tuple[float, float]:
    name = _check.one_of("dtype", dtype, LOGPROB_BOUNDS)
    if given is None:
        return LOGPROB_BOUNDS[name]
    # Every comparison with NaN passes.
    bounds = given if isinstance(given, tuple | list) else ()
    if [isinstance(bound, int | float) and bound >= 0 for bound in bounds] != [True, True]:
        raise ReshardError(
            f"bounds={show(given)}. Use two numbers of at least 0, the largest mean and single difference"
        )
    mean, largest = bounds
    return mean, largest
