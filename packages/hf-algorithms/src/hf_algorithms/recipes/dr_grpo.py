"""Dr.GRPO: GRPO without its two biases (Liu et al. 2025, section 3).

Advantages are centred and not divided by the group's standard deviation; each response's loss is a sum divided by a
constant, not by its length. The two belong together.

Deviations from the paper: the constant is `rollout.max_new_tokens` unless `loss_denominator` is given; the logarithm of
the ratio is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, ClipKeys, GroupKeys, PolicyConfig
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["DR_GRPO", "DrGRPOConfig", "step"]


class DrGRPOConfig(GroupKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "dr_grpo"`."""

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: AggregationMode = "constant"


def step(roles: Roles, prompts: BatchFuture, config: DrGRPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GroupAdvantage

    batch = generate_scored(roles, prompts, context)
    estimator = GroupAdvantage(
        scale="none",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
    )
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


DR_GRPO = Recipe(name="dr_grpo", config=DrGRPOConfig, roles=POLICY_ROLES, step=step)
