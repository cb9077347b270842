"""MaxRL: advantages relative to the group's mean score, (r - m) / m.

For scores of 0 and 1 the expected gradient is that of the log-likelihood of success, expanded to order n - 1. A group
whose mean is 0 or less has advantages 0, as in prime-rl.

Deviations from that:

- the loss has a clipped ratio, which is 1 in the first update of an iteration;
- the logarithm of the ratio is cut at -20 and 20.
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

__all__ = ["MAXRL", "MaxRLConfig", "step"]


class MaxRLConfig(GroupKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "maxrl"`."""

    name: Literal["maxrl"] = "maxrl"


def step(roles: Roles, prompts: BatchFuture, config: MaxRLConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GroupAdvantage

    batch = generate_scored(roles, prompts, context)
    estimator = GroupAdvantage(
        scale="mean",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
    )
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


MAXRL = Recipe(name="maxrl", config=MaxRLConfig, roles=POLICY_ROLES, step=step)
