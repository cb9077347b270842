"""Parts of a step that several recipes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes._recipe import StepContext, mini_batch_rows

if TYPE_CHECKING:
    from hf_algorithms.advantages import Estimator, GroupAdvantage, StdOver
    from hf_algorithms.losses import Aggregation, Clip, Correction, PolicyLoss, Surrogate
    from hf_algorithms.recipes._config import PolicyConfig
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = [
    "add_old_logprobs",
    "add_ref_logprobs",
    "build_aggregation",
    "build_clip",
    "build_group_advantage",
    "build_policy_loss",
    "generate",
    "generate_scored",
    "mini_batches",
    "score_uncounted",
    "train_by_scores",
    "update_policy",
]

_RATIO_CAP = 2.0
"""Largest ratio to a sampler's log-probs: truncated importance sampling."""


def generate(roles: Roles, prompts: BatchFuture, context: StepContext) -> BatchFuture:
    """Returns the responses to every prompt, with the prompt's columns."""
    batch = prompts.repeat(context.sampling.n).union(roles.actor.generate_sequences(prompts, context.sampling))
    context.note_generated(batch)
    return batch


def generate_scored(roles: Roles, prompts: BatchFuture, context: StepContext) -> BatchFuture:
    """Returns the responses to every prompt, with the prompt's columns and the scores."""
    batch = generate(roles, prompts, context)
    batch = batch.union(roles.reward.compute_reward(batch))
    context.note_scored(batch)
    context.show_samples(batch)
    return batch


def score_uncounted(roles: Roles, batch: BatchFuture) -> BatchFuture:
    """Returns the scores of responses that are not trained on, so that metrics leave them out.

    A worker of one's own whose `compute_reward` does not take `is_counted` counts them.
    """
    worker: Any = roles.group("reward").spec.worker
    parameters = signature(worker.compute_reward).parameters.values()
    takes = any(each.name == "is_counted" or each.kind is each.VAR_KEYWORD for each in parameters)
    return roles.reward.compute_reward(batch, is_counted=False) if takes else roles.reward.compute_reward(batch)


def add_old_logprobs(
    roles: Roles, batch: BatchFuture, config: PolicyConfig, context: StepContext, *, trains_same: bool = True
) -> BatchFuture:
    """Returns the batch with `old_logprobs`, unless they are taken from the update itself.

    With `trains_same` the iteration's first update learns these rows and no others, if it learns all of them.
    """
    if config.old_source == "recomputed":
        keeps = trains_same and config.updates_at_once
        found = roles.actor.compute_logprobs(batch, temperature=context.sampling.temperature, keep_graph=keeps)
        return batch.union(found)
    if config.old_source == "sampled":
        return batch.union(batch.select(["rollout_logprobs"]).rename({"rollout_logprobs": "old_logprobs"}))
    return batch


def add_ref_logprobs(roles: Roles, batch: BatchFuture, config: PolicyConfig, context: StepContext) -> BatchFuture:
    """Returns the batch with `ref_logprobs`, if there is a KL penalty."""
    if not config.needs_reference:
        return batch
    return batch.union(roles.reference.compute_ref_logprobs(batch, temperature=context.sampling.temperature))


def build_aggregation(config: PolicyConfig, *, max_new_tokens: int) -> Aggregation:
    """Returns the configured aggregation; `max_new_tokens` stands in for `loss_denominator` where it is absent."""
    from hf_algorithms.losses import Aggregation

    constant = config.loss_denominator or float(max_new_tokens)
    return Aggregation(
        mode=config.aggregation,
        constant=constant if config.aggregation == "constant" else None,
        overlong_filter=config.overlong_filter,
    )


def build_policy_loss(
    config: PolicyConfig, surrogate: Surrogate, *, max_new_tokens: int, kl_coefficient: float | None = None
) -> PolicyLoss:
    """Returns the loss that the configuration describes, around `surrogate`.

    Args:
        config: of the algorithm.
        surrogate: the loss of one token.
        max_new_tokens: stands in for `loss_denominator` where it is absent.
        kl_coefficient: in place of the configured one.
    """
    from hf_algorithms.losses import KLTerm, PolicyLoss

    coefficient = config.kl_coefficient if kl_coefficient is None else kl_coefficient
    return PolicyLoss(
        surrogate=surrogate,
        aggregation=build_aggregation(config, max_new_tokens=max_new_tokens),
        correction=_build_correction(config),
        kl=KLTerm(coefficient=coefficient, estimator=config.kl_estimator, gradient=config.kl_gradient)
        if config.needs_reference and config.kl_place == "loss"
        else None,
        entropy_coefficient=config.entropy_coefficient,
        old="current" if config.old_source == "current" else "column",
        log_ratio_clamp=config.log_ratio_clamp,
    )


def build_clip(config: Any) -> Clip:
    """Returns PPO's clip with the configured ranges; ratios to a sampler's log-probs are cut as well."""
    from hf_algorithms.losses import Clip

    cap = _RATIO_CAP if config.old_source == "sampled" else None
    return Clip(low=config.clip_low, high=config.clip_high, dual=config.dual_clip, ratio_cap=cap)


def build_group_advantage(config: Any) -> GroupAdvantage:
    """Returns the estimator that `StdKeys` describe: scores against those of their group, divided by a spread."""
    from hf_algorithms.advantages import GroupAdvantage

    of_group: StdOver = "others" if config.baseline == "leave_one_out" else "group"
    return GroupAdvantage(
        baseline=config.baseline,
        std_ddof=config.std_ddof,
        std_eps=config.std_eps,
        std_on=config.std_on,
        scale="none" if config.std_over == "none" else "std",
        std_over=of_group if config.std_over == "group" else "batch",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
        score_clip=config.score_clip,
    )


def _build_correction(config: PolicyConfig) -> Correction | None:
    from hf_algorithms.losses import Correction

    if config.correction == "none":
        return None
    low, high = config.correction_bounds
    return Correction(kind=config.correction, low=low, high=high, statistic=config.correction_statistic)


def mini_batches(roles: Roles, batch: BatchFuture, config: PolicyConfig, context: StepContext) -> Iterator[BatchFuture]:
    """Yields the rows of every update of an iteration, with the columns that the aggregation reads.

    The batch is what the iteration shows of its samples.

    A batch of fewer rows, or groups, than `config.mini_batches` is split into as many as it has.

    Raises:
        BatchError: if groups must stay whole, and the batch has a part of one.
    """
    context.show_samples(batch)
    context.note_trained(batch)
    if config.aggregation == "prompt-mean":
        batch = batch.union(roles.advantage.count_group_tokens(batch, overlong_filter=config.overlong_filter))
    group_size = context.sampling.n if config.keeps_groups else 1
    parts = max(min(config.mini_batches, batch.num_rows // group_size), 1)
    for rows in mini_batch_rows(batch.num_rows, parts, epochs=config.epochs, seed=context.seed, group_size=group_size):
        yield batch.rows(rows)


def update_policy(
    roles: Roles, batch: BatchFuture, config: PolicyConfig, context: StepContext, surrogate: Surrogate
) -> list[MetricsFuture]:
    """Updates the actor on every mini-batch; returns the metrics."""
    sampling = context.sampling
    loss = build_policy_loss(config, surrogate, max_new_tokens=sampling.max_new_tokens)
    return [
        roles.actor.update_actor(rows, loss, temperature=sampling.temperature)
        for rows in mini_batches(roles, batch, config, context)
    ]


def train_by_scores(
    roles: Roles,
    batch: BatchFuture,
    config: PolicyConfig,
    context: StepContext,
    estimator: Estimator,
    surrogate: Surrogate,
    *,
    counts_responses: bool = True,
) -> Sequence[MetricsFuture]:
    """Trains the actor on scored responses: log-probs, advantages of `estimator`, updates on `surrogate`.

    Without `counts_responses` the metrics leave out what is known of responses before log-probs.
    """
    batch = add_old_logprobs(roles, batch, config, context)
    batch = add_ref_logprobs(roles, batch, config, context)
    batch = batch.union(roles.advantage.compute_advantages(batch, estimator))
    metrics = roles.advantage.compute_metrics(
        batch, compares_sampler=config.old_source != "sampled", counts_responses=counts_responses
    )
    return [metrics, *update_policy(roles, batch, config, context, surrogate)]
