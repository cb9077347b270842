"""RLOO: the baseline of a response is the mean score of the others (Ahmadian et al. 2024, eq. 6).

Deviations from the paper:

- the KL penalty is a token reward, accumulated over what follows the token; the paper subtracts it from the score;
- a clipped token ratio allows several updates per batch; with one update it is plain REINFORCE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, ClipKeys, Coefficient, GroupKeys, PolicyConfig
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["RLOO", "RLOOConfig", "step"]


class RLOOConfig(GroupKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "rloo"`."""

    name: Literal["rloo"] = "rloo"
    kl_coefficient: Coefficient = 0.05
    kl_place: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    aggregation: AggregationMode = "seq-mean-token-sum"


def step(roles: Roles, prompts: BatchFuture, config: RLOOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GroupAdvantage

    batch = generate_scored(roles, prompts, context)
    estimator = GroupAdvantage(
        baseline="leave_one_out",
        scale="none",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
    )
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


RLOO = Recipe(name="rloo", config=RLOOConfig, roles=POLICY_ROLES, step=step)
