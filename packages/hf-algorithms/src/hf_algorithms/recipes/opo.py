"""OPO: the baseline weights scores by the length of their responses (Hao et al. 2025).

The baseline has the least variance if all tokens have gradients of equal size. It is meant for one update per
iteration.

Deviations from the paper: the loss has a clipped ratio, which is 1 in the first update; its logarithm is cut at -20 and
20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import ClipKeys, GroupKeys, PolicyConfig
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["OPO", "OPOConfig", "step"]


class OPOConfig(GroupKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "opo"`."""

    name: Literal["opo"] = "opo"


def step(roles: Roles, prompts: BatchFuture, config: OPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GroupAdvantage

    batch = generate_scored(roles, prompts, context)
    estimator = GroupAdvantage(
        baseline="length",
        scale="none",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
    )
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


OPO = Recipe(name="opo", config=OPOConfig, roles=POLICY_ROLES, step=step)
