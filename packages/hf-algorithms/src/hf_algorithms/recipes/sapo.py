"""SAPO: a soft gate in place of the clip (Gao et al. 2025).

Deviations from the paper: the standard deviation divides by n - 1, and 1e-6 is added to it; the logarithm of the ratio
is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, PolicyConfig, Range, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_group_advantage, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["SAPO", "SAPOConfig", "step"]


class SAPOConfig(StdKeys, PolicyConfig):
    """`[algorithm]` with `name = "sapo"`."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Range = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: Range = 1.05
    """Steepness of the gate where the advantage is negative."""
    aggregation: AggregationMode = "seq-mean-token-mean"


def step(roles: Roles, prompts: BatchFuture, config: SAPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import SAPO

    batch = generate_scored(roles, prompts, context)
    estimator = build_group_advantage(config)
    return train_by_scores(
        roles,
        batch,
        config,
        context,
        estimator,
        SAPO(tau_positive=config.tau_positive, tau_negative=config.tau_negative),
    )


SAPO = Recipe(name="sapo", config=SAPOConfig, roles=POLICY_ROLES, step=step)
