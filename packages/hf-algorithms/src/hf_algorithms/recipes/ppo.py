"""PPO for language models (paper, Figure 6): actor, critic, reference and reward.

Deviations from Schulman et al. (2017) and from the paper's figure:

- the reward is a Python function of the texts; a KL penalty against the reference enters as a token reward;
- old log-probs are recomputed by the training engine; with ``old_logprobs = "sampled"`` the sampler's are trusted, and
  the policy's ratio, which then holds the difference of the two engines as well, is truncated;
- advantages are whitened over the whole batch; the value loss is clipped like the policy's;
- the logarithm of the policy's ratio is cut at -20 and 20;
- each loss is a mean over all response tokens of a mini-batch, so long responses weigh more than short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AlgorithmConfig, Coefficient, Discount, Range
from hf_algorithms.recipes._recipe import Recipe, StepContext, mini_batch_rows
from hf_algorithms.recipes._roles import ACTOR, ADVANTAGE, CRITIC, REFERENCE, REWARD

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["PPO", "PPOConfig", "step"]


_RATIO_CAP = 2.0
"""Where truncated importance sampling cuts a ratio."""


class PPOConfig(AlgorithmConfig):
    """`[algorithm]` with `name = "ppo"`."""

    name: Literal["ppo"] = "ppo"
    kl_coefficient: Coefficient = 0.02
    """Weight of the KL penalty against the reference in the token rewards."""
    gamma: Discount = 1.0
    gae_lambda: Discount = 0.95
    clip_range: Range = 0.2
    """The policy's ratio is clipped to 1 - clip_range ... 1 + clip_range."""
    value_clip_range: Range = 0.2
    """Values are clipped to this distance from the old ones."""
    old_logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """`sampled` saves a forward pass: the rollout backend's log-probs are taken, and ratios truncated at 2."""


def step(roles: Roles, prompts: BatchFuture, config: PPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GAE
    from hf_algorithms.losses import Clip, PolicyLoss, ValueLoss

    gae = GAE(gamma=config.gamma, gae_lambda=config.gae_lambda, kl_coefficient=config.kl_coefficient)
    trusts_sampler = config.old_logprobs == "sampled"
    clip = Clip(low=config.clip_range, high=config.clip_range, ratio_cap=_RATIO_CAP if trusts_sampler else None)
    policy_loss = PolicyLoss(surrogate=clip)
    value_loss = ValueLoss(clip=config.value_clip_range)

    sampling = context.sampling
    batch = prompts.repeat(sampling.n).union(roles.actor.generate_sequences(prompts, sampling))
    if trusts_sampler:
        batch = batch.union(batch.select(["rollout_logprobs"]).rename({"rollout_logprobs": "old_logprobs"}))
    else:
        batch = batch.union(roles.actor.compute_logprobs(batch, temperature=sampling.temperature))
    batch = batch.union(roles.critic.compute_values(batch))
    batch = batch.union(roles.reference.compute_ref_logprobs(batch, temperature=sampling.temperature))
    batch = batch.union(roles.reward.compute_reward(batch))
    batch = batch.union(roles.advantage.compute_advantages(batch, gae))
    metrics = [roles.advantage.compute_metrics(batch, compares_sampler=not trusts_sampler)]
    num_rows = prompts.num_rows * sampling.n
    for rows in mini_batch_rows(num_rows, config.mini_batches, epochs=config.epochs, seed=sampling.step):
        metrics.append(roles.critic.update_critic(batch.rows(rows), value_loss))
        metrics.append(roles.actor.update_actor(batch.rows(rows), policy_loss, temperature=sampling.temperature))
    return metrics


PPO = Recipe(name="ppo", config=PPOConfig, roles=(ACTOR, CRITIC, REFERENCE, REWARD, ADVANTAGE), step=step)
