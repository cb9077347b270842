"""GMPO: the geometric mean of clipped token ratios in place of their mean (Zhao et al. 2025).

Deviations from the paper: the standard deviation divides by n - 1, and 1e-6 is added to it.
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

__all__ = ["GMPO", "GMPOConfig", "step"]


class GMPOConfig(StdKeys, PolicyConfig):
    """`[algorithm]` with `name = "gmpo"`."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Coefficient = 0.4
    """The logarithm of a token's ratio is clipped to -clip_low ... clip_high."""
    clip_high: Coefficient = 0.4
    """See `clip_low`."""
    aggregation: AggregationMode = "seq-mean-token-mean"


def step(roles: Roles, prompts: BatchFuture, config: GMPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import GMPO

    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(roles, batch, config, context, estimator, GMPO(low=config.clip_low, high=config.clip_high))


GMPO = Recipe(name="gmpo", config=GMPOConfig, roles=POLICY_ROLES, step=step)
