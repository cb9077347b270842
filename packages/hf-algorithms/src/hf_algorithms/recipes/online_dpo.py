"""Online DPO: two responses to a prompt, of which the better scored one is preferred (Guo et al. 2024).

Deviations from the paper:

- scores come from the reward, not from a judge;
- a pair whose scores are equal is skipped and counted in `preference/skipped`;
- log-probs of a response are summed, not averaged;
- the loss has no ratio to the sampler, so corrections of the sampler's mismatch do not apply.

Each update computes the log-probs of both responses of a pair again: the loss of one response depends on the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from hf_algorithms.recipes._config import PreferenceKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext, mini_batch_rows
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import generate_scored

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["ONLINE_DPO", "OnlineDPOConfig", "step"]


class OnlineDPOConfig(PreferenceKeys):
    """`[algorithm]` with `name = "online_dpo"`."""

    least_samples: ClassVar[int] = 2
    most_samples: ClassVar[int | None] = 2

    name: Literal["online_dpo"] = "online_dpo"


def step(roles: Roles, prompts: BatchFuture, config: OnlineDPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.losses import PreferencePairs

    temperature = context.sampling.temperature
    batch = generate_scored(roles, prompts, context)
    batch = batch.union(roles.reference.compute_ref_logprobs(batch, temperature=temperature))
    loss = config.build_loss()
    metrics = [roles.advantage.compute_metrics(batch)]
    parts = min(config.mini_batches, prompts.num_rows)
    for rows in mini_batch_rows(batch.num_rows, parts, epochs=config.epochs, seed=context.seed, group_size=2):
        pairs = batch.rows(rows)
        pairs = pairs.union(roles.actor.compute_logprobs(pairs, temperature=temperature, keep_graph=True))
        pairs = pairs.union(roles.advantage.compute_advantages(pairs, PreferencePairs()))
        metrics.append(roles.advantage.compute_metrics(pairs, counts_responses=False, compares_sampler=False))
        metrics.append(roles.actor.update_actor(pairs, loss, temperature=temperature))
    return metrics


ONLINE_DPO = Recipe(name="online_dpo", config=OnlineDPOConfig, roles=POLICY_ROLES, step=step)
