"""REINFORCE++ with a baseline: scores less their group's mean, whitened over all tokens of the batch (Hu 2025).

The whitening weighs long responses more. The group's standard deviation divides nothing.

Deviations from the paper: the variance divides by the number of tokens, `std_ddof = 1` subtracts one; the logarithm of
the ratio is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import ClipKeys, Coefficient, GroupKeys, PolicyConfig, ScoreClipKeys, WhitenKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["REINFORCE_PP_BASELINE", "ReinforcePPBaselineConfig", "step"]


class ReinforcePPBaselineConfig(ScoreClipKeys, GroupKeys, WhitenKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "reinforce_pp_baseline"`."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_coefficient: Coefficient = 0.01
    kl_place: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_return: Literal["token", "cumulative"] = "cumulative"
    """`token`: a token pays its own KL; `cumulative`: that of all that follow."""


def step(
    roles: Roles, prompts: BatchFuture, config: ReinforcePPBaselineConfig, context: StepContext
) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import ReinforceAdvantage

    batch = generate_scored(roles, prompts, context)
    estimator = ReinforceAdvantage(
        baseline="group",
        group_of_one=config.group_of_one,
        whiten=config.whiten,
        whiten_ddof=config.std_ddof,
        whiten_eps=config.std_eps,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
        kl_return=config.kl_return,
        score_clip=config.score_clip,
    )
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


REINFORCE_PP_BASELINE = Recipe(
    name="reinforce_pp_baseline", config=ReinforcePPBaselineConfig, roles=POLICY_ROLES, step=step
)
