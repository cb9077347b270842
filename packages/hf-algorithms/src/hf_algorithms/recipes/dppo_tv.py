"""DPPO-TV: a token trains while its probability stays within a distance of the sampler's (Qi et al. 2026).

The distance is the total variation of the token against all others, |p - q|, with q the probability that the sampler
reported. A token beyond the `threshold` on the side to which its advantage pushes it has loss 0.

Deviations from the paper (DPPO-Binary-TV):

- the ratio that weighs a token is taken to the old log-probs, and is 1 where these are the current ones;
  `old_logprobs = "sampled"` takes it to the sampler's, as the paper does;
- that ratio is cut at `ratio_cap`, 20; prime-rl has no cap, and verl's default is 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import PolicyConfig, Range, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_group_advantage, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["DPPO_TV", "DPPOConfig", "step"]


class DPPOConfig(StdKeys, PolicyConfig):
    """`[algorithm]` with `name = "dppo_tv"`."""

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold: Range = 0.2
    """Largest |p - q| of a token that is pushed away from the sampler."""
    ratio_cap: Range = 20.0
    """Largest weight of a token."""
    anchor: Literal["sampler", "old"] = "sampler"
    """Source of the probability q: the sampler (paper), or the policy at the start of the update (verl)."""


def step(roles: Roles, prompts: BatchFuture, config: DPPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import DPPOTV

    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(
        roles,
        batch,
        config,
        context,
        estimator,
        DPPOTV(threshold=config.threshold, ratio_cap=config.ratio_cap, anchor=config.anchor),
    )


DPPO_TV = Recipe(name="dppo_tv", config=DPPOConfig, roles=POLICY_ROLES, step=step)
