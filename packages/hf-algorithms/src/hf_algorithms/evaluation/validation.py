"""Evaluation: the metric of greedy responses, samples to read, and the sampled divergence from the reference.

Rows may be fewer than the ranks that share them: a call then gets some rows twice, and what it returns of them is
dropped. Every row counts once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_algorithms.roles import least_rows
from hf_protocols.errors import RewardError

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture, ObjectFuture, WorkerGroup
    from hf_engine import SamplingParams

__all__ = [
    "NUM_SAMPLES",
    "call_on_rows",
    "evaluate",
    "evaluate_with_samples",
    "measure_divergence",
    "request_divergence",
    "request_evaluation",
]

NUM_SAMPLES = 12
"""Rows of validation and test whose responses a run writes down."""


def evaluate(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> float:
    """Mean of the metric over the greedy responses, one a prompt; those that have no score do not count.

    Raises:
        RewardError: if none has a score.
    """
    return _average(_request_scores(roles, _respond(roles, prompts, _greedily(sampling)), prompts.num_rows))


def evaluate_with_samples(
    roles: Roles, prompts: BatchFuture, sampling: SamplingParams
) -> tuple[float, list[dict[str, Any]]]:
    """As `evaluate`, and the first of the same responses as texts: prompt, response, answer, score."""
    scores, samples = request_evaluation(roles, prompts, sampling)
    return _average(scores), samples.result()


def _average(scores: BatchFuture) -> float:
    found: list[float] = scores.result()["metric_scores"].tolist()
    known = [score for score in found if not math.isnan(score)]
    if not known:
        raise RewardError(
            f"reward.metric scored none of {len(found)} responses in an evaluation: their rows have no answers. Add "
            "answers, or set reward.metric to a function that needs no answers"
        )
    return sum(known) / len(known)


def measure_divergence(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> dict[str, Any] | None:
    """KL to the reference from one sample a prompt: `estimator`, `unit` and `value`; None without a reference.

    The value is k3 (see `hf_algorithms.kl`), summed over each response and averaged over the responses; it is never
    negative. A few responses that the reference finds much likelier than the actor may carry most of it.
    """
    metrics = request_divergence(roles, prompts, sampling)
    if metrics is None:
        return None
    return {"estimator": "k3", "unit": "nats per response", "value": float(metrics.result()["kl_sequence/k3"])}


def request_evaluation(
    roles: Roles, prompts: BatchFuture, sampling: SamplingParams
) -> tuple[BatchFuture, ObjectFuture]:
    """Makes the calls of `evaluate_with_samples`; the scores are the column `metric_scores`."""
    batch = _respond(roles, prompts, _greedily(sampling))
    scores = _request_scores(roles, batch, prompts.num_rows)
    shown = batch.rows(range(min(NUM_SAMPLES, prompts.num_rows)))
    samples: ObjectFuture = roles.having("collect_samples").collect_samples(shown)
    return scores, samples


def _request_scores(roles: Roles, batch: BatchFuture, num_rows: int) -> BatchFuture:
    return call_on_rows(roles.having("compute_metric"), "compute_metric", batch, num_rows)


def request_divergence(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> MetricsFuture | None:
    """Makes the calls of `measure_divergence`."""
    if roles.find("compute_ref_logprobs") is None:
        return None
    num_rows, temperature = prompts.num_rows, sampling.temperature
    batch = _respond(roles, prompts, replace(sampling, n=1))
    for method in ("compute_logprobs", "compute_ref_logprobs"):
        batch = batch.union(call_on_rows(roles.having(method), method, batch, num_rows, temperature=temperature))
    batch = batch.union(call_on_rows(roles.having("compute_reward"), "compute_reward", batch, num_rows))
    metrics: MetricsFuture = roles.having("compute_metrics").compute_metrics(batch)
    return metrics


def _respond(roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> BatchFuture:
    return prompts.union(
        call_on_rows(roles.having("generate_sequences"), "generate_sequences", prompts, prompts.num_rows, sampling)
    )


def _greedily(sampling: SamplingParams) -> SamplingParams:
    """At temperature 1: nobody reads these log-probs, and some servers report no others of greedy responses."""
    return replace(sampling, greedy=True, n=1, temperature=1.0)


def call_on_rows(
    group: WorkerGroup, method: str, batch: BatchFuture, num_rows: int, *args: Any, **kwargs: Any
) -> BatchFuture:
    """A call that returns one row for each of the batch's `num_rows`, which may be fewer than its ranks need."""
    call = getattr(group, method)
    result: BatchFuture
    least = least_rows(group, method)
    if num_rows >= least:
        result = call(batch, *args, **kwargs)
        return result
    repeated = batch.rows([row % num_rows for row in range(least)])
    result = call(repeated, *args, **kwargs)
    return result.rows(range(num_rows))
