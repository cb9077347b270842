"""PPO for language models (paper, Figure 6): actor, critic, reference and reward.

Deviations from Schulman et al. (2017) and from the paper's figure:

- the reward is a Python function of the texts; a KL penalty against the reference enters as a token reward, or as a
  term of the loss (`kl_place`);
- old log-probs are recomputed by the training engine; with `old_logprobs = "sampled"` the sampler's are trusted, and
  the policy's ratio, which then holds the difference of the two engines as well, is truncated;
- advantages are whitened over the whole batch; the value loss is clipped like the policy's;
- the logarithm of the policy's ratio is cut at -20 and 20;
- each loss is a mean over all response tokens of a mini-batch, so long responses weigh more than short ones;
  `aggregation` and `overlong_filter` change the actor's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hf_algorithms.recipes._config import (
    ClipKeys,
    Coefficient,
    CriticKeys,
    PolicyConfig,
    Range,
    RewardKeys,
    Share,
    WhitenKeys,
)
from hf_algorithms.recipes._critics import build_value_loss, compute_values, trains_actor
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import ACTOR, ADVANTAGE, CRITIC, REFERENCE, REWARD
from hf_algorithms.recipes._steps import (
    add_old_logprobs,
    add_ref_logprobs,
    build_clip,
    build_policy_loss,
    generate,
    mini_batches,
)

if TYPE_CHECKING:
    from hf_algorithms.advantages import GAE
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["PPO", "PPOConfig", "step"]


class PPOConfig(CriticKeys, RewardKeys, WhitenKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "ppo"`."""

    name: Literal["ppo"] = "ppo"
    kl_coefficient: Coefficient = 0.02
    kl_place: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: Range | None = None
    """Nats per response: the coefficient is moved so that the divergence comes to it (Ziegler et al. 2019)."""
    kl_horizon: Annotated[int, Field(ge=1)] = 10_000
    """Responses over which the coefficient may change by a fifth."""
    kl_stop: Range | None = None
    """Nats per token: the actor is not updated again in an iteration once `actor/update_kl` is above this."""
    value_lambda: Share | None = None
    """The lambda of the critic's returns; by default `gae_lambda`."""
    reward_position: Literal["last", "after"] = "last"
    """Position that gets the score: the last token, or the one after it, whose value the critic then learns as well.

    A response of `rollout.max_new_tokens` has no position after its last token, which then gets the score. Only PPO has
    this key: without a critic no value follows the response, and Safe-RLHF's authors pay at the last token.
    """

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.reward_position == "after" and self.bootstrap == "value":
            yield (
                "algorithm.bootstrap = 'value': with algorithm.reward_position = 'after' the score stands where the "
                "last value is. Use 'zero'"
            )
        if self.kl_target is not None and self.kl_coefficient == 0:
            yield (
                "algorithm.kl_coefficient = 0: algorithm.kl_target multiplies it and so leaves it 0. Set "
                "kl_coefficient above 0, or remove kl_target"
            )
        elif self.kl_target is not None and not (self.needs_reference and self.old_source != "current"):
            yield (
                f"algorithm.kl_target = {self.kl_target}: the divergence is not known before the update. Set "
                "algorithm.kl_place = 'reward', or algorithm.old_logprobs = 'recomputed'"
            )
        if self.kl_target is None and self.changes("kl_horizon"):
            yield (
                f"algorithm.kl_horizon = {self.kl_horizon}: without algorithm.kl_target the coefficient is fixed. "
                "Set kl_target, or remove kl_horizon"
            )
        if self.kl_stop is not None and self.epochs * self.mini_batches == 1:
            yield (
                f"algorithm.kl_stop = {self.kl_stop}: an iteration makes one update, so none is left to stop. Raise "
                "algorithm.epochs or algorithm.mini_batches, or remove it"
            )


def step(
    roles: Roles, prompts: BatchFuture, config: PPOConfig, context: StepContext
) -> Sequence[MetricsFuture | Mapping[str, float]]:
    """One iteration; it waits for metrics where `kl_target` or `kl_stop` reads them, and for a critic's new unit."""
    coefficient = context.state.get("kl_coefficient", config.kl_coefficient)
    trains = trains_actor(config, context)
    batch = add_old_logprobs(roles, generate(roles, prompts, context), config, context, trains_same=trains)
    batch = batch.union(compute_values(roles, batch, config, context))
    batch = add_ref_logprobs(roles, batch, config, context)
    batch = batch.union(roles.reward.compute_reward(batch))
    context.note_scored(batch)
    batch = batch.union(roles.advantage.compute_advantages(batch, _build_gae(config, coefficient)))
    found = roles.advantage.compute_metrics(batch, compares_sampler=config.old_source != "sampled")
    metrics = [found, *_update(roles, batch, config, context, coefficient)]
    if config.kl_target is None:
        return metrics
    if trains:
        context.state["kl_coefficient"] = _adapt(coefficient, config, found, batch.num_rows)
    return [*metrics, {"kl/coefficient": coefficient}]


def _build_gae(config: PPOConfig, coefficient: float) -> GAE:
    from hf_algorithms.advantages import GAE

    return GAE(
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        value_lambda=config.value_lambda,
        kl_coefficient=coefficient if config.penalises_rewards else 0.0,
        kl_estimator=config.kl_estimator,
        bootstrap=config.bootstrap,
        whiten=config.whiten,
        whiten_ddof=config.std_ddof,
        whiten_eps=config.std_eps,
        reward_clip=config.reward_clip,
        missing_eos_penalty=config.missing_eos_penalty,
        reward_position=config.reward_position,
    )


def _update(
    roles: Roles, batch: BatchFuture, config: PPOConfig, context: StepContext, coefficient: float
) -> list[MetricsFuture]:
    """Updates critic and actor on every mini-batch; the actor not in the critic's warm-up, nor after `kl_stop`."""
    sampling, metrics = context.sampling, []
    value_loss = build_value_loss(roles, batch, config, context)
    policy_loss = build_policy_loss(
        config, build_clip(config), max_new_tokens=sampling.max_new_tokens, kl_coefficient=coefficient
    )
    trains = trains_actor(config, context)
    for rows in mini_batches(roles, batch, config, context):
        metrics.append(roles.critic.update_critic(rows, value_loss))
        if trains:
            metrics.append(roles.actor.update_actor(rows, policy_loss, temperature=sampling.temperature))
            if config.kl_stop is not None and metrics[-1].result().get("actor/update_kl", 0.0) > config.kl_stop:
                trains = False
    return metrics


def _adapt(coefficient: float, config: PPOConfig, metrics: MetricsFuture, num_samples: int) -> float:
    from hf_algorithms.kl import AdaptiveKL

    assert config.kl_target is not None
    controller = AdaptiveKL(target=config.kl_target, horizon=config.kl_horizon)
    return controller.update(coefficient, float(metrics.result()["kl_sequence/k1"]), num_samples)


PPO = Recipe(name="ppo", config=PPOConfig, roles=(ACTOR, CRITIC, REFERENCE, REWARD, ADVANTAGE), step=step)
