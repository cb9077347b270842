"""Evaluation: the metric of greedy responses, samples to read, and the sampled divergence from the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture
    from hf_engine import SamplingParams

__all__ = ["collect_samples", "evaluate", "measure_divergence"]


def evaluate(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> float:
    """Mean of the metric over the greedy responses, one a prompt."""
    batch = _respond(roles, prompts, _greedily(sampling))
    return float(roles.reward.compute_metric(batch).result()["score"])


def collect_samples(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> list[dict[str, Any]]:
    """Greedy responses as texts: prompt, response, answer, score."""
    batch = _respond(roles, prompts, _greedily(sampling))
    samples: list[dict[str, Any]] = roles.reward.collect_samples(batch).result()
    return samples


def measure_divergence(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> dict[str, Any]:
    """KL to the reference from one sample a prompt: ``estimator``, ``unit`` and ``value``.

    k3 (see ``hf_algorithms.kl``) summed over each response and averaged over the responses: never negative. A few
    responses that the reference finds much likelier than the actor may carry most of it.
    """
    batch = _respond(roles, prompts, replace(sampling, n=1))
    batch = batch.union(roles.actor.compute_logprobs(batch, temperature=sampling.temperature))
    batch = batch.union(roles.reference.compute_ref_logprobs(batch, temperature=sampling.temperature))
    batch = batch.union(roles.reward.compute_reward(batch))
    value = float(roles.advantage.compute_metrics(batch).result()["kl_sequence/k3"])
    return {"estimator": "k3", "unit": "nats per response", "value": value}


def _respond(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> BatchFuture:
    return prompts.union(roles.actor.generate_sequences(prompts, sampling))


def _greedily(sampling: SamplingParams) -> SamplingParams:
    """At temperature 1: nobody reads these log-probs, and some servers report no others of greedy responses."""
    return replace(sampling, greedy=True, n=1, temperature=1.0)
