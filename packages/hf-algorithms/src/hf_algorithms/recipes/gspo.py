"""GSPO: GRPO with the ratio of whole sequences, normalised by their length (Zheng et al. 2025, eq. 5).

Deviations from the paper: the standard deviation divides by n - 1, and 1e-6 is added to it; the logarithm of the ratio
is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, Coefficient, PolicyConfig, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_group_advantage, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["GSPO", "GSPOConfig", "step"]


class GSPOConfig(StdKeys, PolicyConfig):
    """`[algorithm]` with `name = "gspo"`."""

    name: Literal["gspo"] = "gspo"
    clip_low: Coefficient = 3e-4
    """The sequence's ratio is clipped to 1 - clip_low ... 1 + clip_high."""
    clip_high: Coefficient = 4e-4
    """See `clip_low`."""
    aggregation: AggregationMode = "seq-mean-token-mean"


def step(roles: Roles, prompts: BatchFuture, config: GSPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import SequenceClip

    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(
        roles, batch, config, context, estimator, SequenceClip(low=config.clip_low, high=config.clip_high)
    )


GSPO = Recipe(name="gspo", config=GSPOConfig, roles=POLICY_ROLES, step=step)
