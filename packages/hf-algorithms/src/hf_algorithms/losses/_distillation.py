"""The loss of a student that learns a teacher's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_algorithms.losses._aggregation import Aggregation
from hf_algorithms.losses._correction import measure_mismatch
from hf_algorithms.losses._loss import Metrics

__all__ = ["DistillationLoss"]


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """Aggregates the reverse KL(student || teacher) over k + 1 outcomes (Gu et al. 2024; Agarwal et al. 2024).

    The outcomes are the teacher's k likeliest tokens, and all other tokens as one. So both sides are distributions.
    With p and q their probabilities the loss of a token is sum_a p_a log(p_a / q_a), with the whole gradient of p. It
    never exceeds the KL over the vocabulary, and equals it for k = V - 1.

    A candidate with log-prob -inf, which the student's vocabulary lacks, adds nothing. The probability of the last
    outcome is 1 less the others, at least the rounding error of the dtype, 1e-7 in float32; there its gradient ends.
    """

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch; the model scores the tokens in `candidate_ids`, `rollout_logprobs` serve metrics."""
        return (*self.aggregation.reads, "candidate_ids", "teacher_candidate_logprobs", "rollout_logprobs?")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model; `logprobs` and `entropy` serve metrics alone, and may be absent."""
        return ("logprobs", "entropy", "candidate_logprobs")

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns these rows' share of the denominator; see `Aggregation.count`."""
        return self.aggregation.count(columns)

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the weighted sum of the token losses and metrics.

        `distillation/kl` is the mean over trained tokens, in nats. `distillation/rest` is the mean probability that the
        teacher gives to the last outcome. `entropy` is the student's. `rollout/*` compares sampler and student;
        later updates of an iteration add their own change.

        Args:
            outputs: `candidate_logprobs` [b, T, k], with the gradient.
            micro_batch: the columns of `reads`, padded; `teacher_candidate_logprobs` [b, T, k].
        """
        mask = self.aggregation.select(micro_batch)
        student = outputs["candidate_logprobs"].masked_fill(~mask[..., None], 0.0)
        teacher = micro_batch["teacher_candidate_logprobs"].masked_fill(~mask[..., None], 0.0).to(student.dtype)
        rest = _log_rest(teacher)
        token_loss = _measure_kl(student, teacher, rest).masked_fill(~mask, 0.0)
        loss = (self.aggregation.weigh(mask, micro_batch).to(token_loss.dtype) * token_loss).sum()
        count = float(mask.sum())
        metrics = {
            "distillation/kl": (float(token_loss.detach().sum()), count),
            "distillation/rest": (float(rest.exp().masked_fill(~mask, 0.0).sum()), count),
        }
        if "entropy" in outputs.keys():  # noqa: SIM118 - a TensorDict cannot be asked otherwise
            entropy = outputs["entropy"].detach().masked_fill(~mask, 0.0)
            metrics["entropy"] = (float(entropy.sum()), count)
        if "rollout_logprobs" in micro_batch.keys() and "logprobs" in outputs.keys():  # noqa: SIM118 - see above
            rollout = micro_batch["rollout_logprobs"].masked_fill(~mask, 0.0)
            metrics |= measure_mismatch(outputs["logprobs"].detach().masked_fill(~mask, 0.0), rollout, mask, None)
        return loss, metrics


def _measure_kl(student: torch.Tensor, teacher: torch.Tensor, teacher_rest: torch.Tensor) -> torch.Tensor:
    """The KL over the k + 1 outcomes, [b, T]."""
    is_known = student > -torch.inf
    known = student.masked_fill(~is_known, 0.0)
    parts = (known.exp() * (known - teacher)).masked_fill(~is_known, 0.0)
    rest = _log_rest(student)
    return parts.sum(-1) + rest.exp() * (rest - teacher_rest)


def _log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """The log-probability of all tokens that are not among the k, [b, T]."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps).log()
