"""Meanings of metrics: for the tooltips of curves, and for the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["METRIC_MEANINGS", "describe_metric"]

METRIC_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Responses and rewards": {
        "response/tokens": "mean number of trained tokens in a response",
        "response/truncated": "share of responses that were cut by their length",
        "reward/mean": "mean score of the responses, all functions and models together; responses without one are left "
        "out",
        "reward/std": "standard deviation of the scores in the whole batch (divisor N - 1)",
        "reward/unscorable": "number of responses without a score",
        "reward/unscorable_baseline": "number of prompts whose greedy baseline has no score",
        "reward/NAME/mean": "mean score by one function of the reward, before its weight; `model` is a model's",
        "reward/NAME/unscorable": "number of responses that this function did not score",
        "reward/NAME/failed": "number of those whose call exceeded its deadline or ended its process",
        "reward/NAME/NUMBER": "mean of a further number that this function returned",
        "group/zero_variance": "share of groups whose scores are all equal, among those with at least two scores",
        "group/filtered": "number of groups that were left out because their scores are equal",
        "group/refills": "number of times that further prompts were drawn in place of such groups",
        "cost/unscorable": "number of responses without a cost",
        "cost/NAME/mean": "mean cost by one function, before its weight",
        "cost/NAME/unscorable": "number of responses that this function did not score",
        "cost/NAME/failed": "number of those whose call exceeded its deadline or ended its process",
        "cost/NAME/NUMBER": "mean of a further number that this function returned",
        "constraint/cost": "mean cost by which the multiplier was moved",
        "constraint/lambda": "multiplier of the cost in the advantages",
        "constraint/infeasible": "1 where the multiplier keeps growing, or is at its limit, while the cost is too high",
    },
    "Updates": {
        "ROLE/policy_loss": "the surrogate's part of the loss, without KL and entropy",
        "ROLE/clip_low": "share of trained tokens whose loss the lower clip changed",
        "ROLE/clip_high": "share of trained tokens whose loss the upper clip changed",
        "ROLE/clip_dual": "share of trained tokens with a negative advantage whose ratio is above `dual_clip`",
        "ROLE/truncated_fraction": "share of trained tokens whose ratio is above its cap",
        "ROLE/entropy": "mean entropy of the policy's distributions over trained tokens, in nats, before the step",
        "ROLE/update_kl": "k3 estimate of the KL from the old policy to the present one, in nats per token",
        "ROLE/value_loss": "the critic's loss",
        "ROLE/explained_variance": "1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that "
        "knows nothing",
        "ROLE/ptx_loss": "language-model loss on the rows of `data.pretraining`, in nats per token",
        "ROLE/grad_norm": "norm of the gradient before it is clipped",
        "ROLE/learning_rate": "learning rate of the step",
        "ROLE/skipped_steps": "1 where an update had no trained token, and the weights stayed",
        "ROLE/skipped_nonfinite": "share of updates that `training.on_nonfinite` left out",
        "batch/padding": "share of the computed tokens that are padding, over all updates",
        "batch/shared": "share of the tokens that did not have to be computed, mostly prompts that responses share",
        "rollback/count": "number of the run's rollbacks so far",
    },
    "KL to the reference": {
        "kl/k1": "k1 estimate, mean over trained tokens, in nats per token",
        "kl/k2": "k2 estimate, mean over trained tokens, in nats per token",
        "kl/k3": "k3 estimate, mean over trained tokens, in nats per token",
        "kl_sequence/k1": "k1 estimate, summed over the trained tokens of a response, in nats per response",
        "kl_sequence/k3": "k3 estimate, summed over the trained tokens of a response, in nats per response",
        "kl/coefficient": "weight of the KL, where `kl_target` moves it",
        "distillation/kl": "mean over trained tokens of the policy's log-prob less the teacher's; with "
        '`signal = "top_k"` of the divergence over the teacher\'s likeliest tokens',
        "distillation/rest": "mean probability that the teacher gives to all other tokens",
    },
    "Sampler and trainer": {
        "rollout/mismatch_k3": "k3 estimate of the KL from the sampler to the trainer's policy, in nats per token",
        "rollout/logprob_gap": "mean over trained tokens of the size of the difference of both log-probs",
        "rollout/logprob_gap_max": "largest such difference",
        "rollout/logprob_gap_share": "share of trained tokens whose difference is above 0.1",
        "rollout/weight_mean": "mean of the trainer's probability over the sampler's, before any bound",
        "rollout/weight_max": "largest of these weights",
        "rollout/masked": "share of trained tokens whose weight `algorithm.correction` made 0",
        "ROLE/sampler_gap": "mean over trained tokens of the size of the log-prob's change since it was sampled",
        "ROLE/sampler_gap_max": "largest such change",
        "ROLE/sampler_gap_share": "share of trained tokens whose change is above 0.1",
    },
    "Preferences and answers": {
        "preference/loss": "mean loss of the pairs",
        "preference/margin": "mean of beta times the difference of the log-ratios of chosen and rejected",
        "preference/accuracy": "share of responses in pairs whose margin is above 0",
        "preference/skipped": "share of responses in no pair, because their scores are equal or missing",
        "preference/stale_max": "largest change of a response's log-ratio since it was scored",
        "ranking/loss": "mean loss of the pairs of a reward or cost model",
        "ranking/accuracy": "share of pairs that are ordered rightly; a tie counts half",
        "ranking/margin": "mean difference of the two scores of a pair",
        "ranking/score": "mean score",
        "ranking/sign_accuracy": "share of responses whose cost has the right sign",
        "supervised/loss": "cross-entropy of the answers, in nats per token by default",
    },
    "Evaluations": {
        "eval/validation/METRIC": "mean of `reward.metric` over the validation rows, with greedy responses",
        "eval/validation/loss": "of `sft`: mean of -log-prob over the trained tokens of the validation rows, in nats",
        "eval/validation/perplexity": "of `sft`: its exponential",
        "eval/validation/accuracy": "of `dpo` and `reward-model`: share of validation pairs that are ordered rightly; "
        "a tie counts half",
        "eval/validation/accuracy_low": "lower end of its 95 % interval",
        "eval/validation/accuracy_high": "upper end of its 95 % interval",
        "eval/validation/margin": "mean margin of the validation pairs",
        "eval/validation/sign_accuracy": "of a cost model: share of responses whose cost has the right sign",
        "eval/SET/METRIC": "mean of a metric over the rows of a set of `[[evaluation]]`",
        "eval/SET/METRIC/avg@K": "the same with its number of responses to a prompt in its name",
        "eval/SET/METRIC/pass@K": "chance that one of K responses is correct",
    },
    "Time": {
        "time/iteration_s": "seconds of the step: without evaluations and commits",
        "time/PHASE_s": "seconds of the calls of a phase, each as long as its slowest rank: `generate`, `sync` (moving "
        "weights), `score`, `logprobs` (log-probs and values), `advantages`, `train`, `other`",
        "perf/samples_per_s": "responses, or rows of a supervised command, per second of the step",
        "perf/tokens_per_s": "trained tokens of responses per second of the step",
        "checkpoint/blocked_s": "seconds that commits have held up the run since the iteration before",
        "checkpoint/share": "share of the run's time that commits have taken so far",
    },
}
"""By the part of a run that they are of; capitals stand for a name, a number or a phase."""
_PLACES = re.compile("[A-Z]+")


def describe_metric(name: str) -> str:
    """Returns the meaning of a metric; an empty string for one of a user's own."""
    for pattern, meaning in _PATTERNS:
        if pattern.fullmatch(name):
            return meaning
    return ""


def _compile(name: str) -> re.Pattern[str]:
    parts = _PLACES.split(name)
    return re.compile("[^/]+".join(map(re.escape, parts)))


_PATTERNS = sorted(
    ((_compile(name), meaning) for found in METRIC_MEANINGS.values() for name, meaning in found.items()),
    key=lambda pair: pair[0].pattern.count("[^/]+"),
)
"""Those with fewer places first: `time/iteration_s` is not a phase."""
