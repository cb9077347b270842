"""CISPO: every token keeps its gradient, weighted by a clipped ratio (MiniMax 2025, eq. 4).

As in the paper's runs, only the upper bound acts: the lower one is 0.

Deviations from the paper: losses are averaged over all tokens of the batch, where equation 4 divides by the tokens of
each prompt's group, as `aggregation = "prompt-mean"` does; the standard deviation divides by n - 1, and 1e-6 is added
to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import Coefficient, PolicyConfig, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_group_advantage, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["CISPO", "CISPOConfig", "step"]


class CISPOConfig(StdKeys, PolicyConfig):
    """`[algorithm]` with `name = "cispo"`."""

    name: Literal["cispo"] = "cispo"
    clip_low: Coefficient = 1.0
    """The weight is clipped to 1 - clip_low ... 1 + clip_high."""
    clip_high: Coefficient = 4.0
    """See `clip_low`."""


def step(roles: Roles, prompts: BatchFuture, config: CISPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import CISPO

    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(roles, batch, config, context, estimator, CISPO(low=config.clip_low, high=config.clip_high))


CISPO = Recipe(name="cispo", config=CISPOConfig, roles=POLICY_ROLES, step=step)
