"""GRPO: advantages from a group of responses to one prompt, without a critic (Shao et al. 2024, section 4.1).

Deviations from the paper:

- the standard deviation divides by n - 1, and 1e-6 is added to it; the paper states neither;
- the KL term has the gradient of KL(policy || reference); the paper's k3 term without a weight has another one, which
  `kl_gradient = "value"` gives;
- the logarithm of the ratio is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, ClipKeys, Coefficient, PolicyConfig, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, build_group_advantage, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["GRPO", "GRPOConfig", "step"]


class GRPOConfig(StdKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "grpo"`."""

    name: Literal["grpo"] = "grpo"
    kl_coefficient: Coefficient = 0.04
    aggregation: AggregationMode = "seq-mean-token-mean"


def step(roles: Roles, prompts: BatchFuture, config: GRPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(roles, batch, config, context, estimator, build_clip(config))


GRPO = Recipe(name="grpo", config=GRPOConfig, roles=POLICY_ROLES, step=step)
