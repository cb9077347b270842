"""The loss of preferences between two responses to one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from hf_algorithms.jagged import pad_rows
from hf_algorithms.losses._loss import Metrics
from hf_protocols import BatchError, ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["PreferenceLoss", "PreferencePairs", "label_pairs"]

_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """Means over pairs of -log sigmoid(beta h) (DPO) or (h - 1 / (2 beta))^2 (IPO).

    h is the chosen response's log-ratio less the rejected one's, and a log-ratio the sum of lp - ref lp over a
    response's trained tokens (Rafailov et al. 2023, eq. 7; Azar et al. 2023, eq. 17).

    The two rows of a pair need not be in one micro-batch. A pair's gradient is the sum of its rows' gradients, and a
    row needs only one number of its partner, the log-ratio: the column `partner_logratio` of `label_pairs`. The
    gradient is exactly that of the pair if this column belongs to the weights that the step updates, and if both rows
    are in that step. So compute log-probs again before every mini-batch, and draw mini-batches of whole pairs. Each row
    has half the pair's value.

    Raises:
        ConfigError: for an unknown kind, or a beta of at most 0.
    """

    beta: float = 0.1
    kind: Literal["dpo", "ipo"] = "dpo"

    def __post_init__(self) -> None:
        if self.kind not in ("dpo", "ipo"):
            raise ConfigError(f"kind={show(self.kind)}: is not a known preference loss. Use 'dpo' or 'ipo'")
        _check.number("beta", self.beta)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch; `old_logprobs` serves a metric alone."""
        return ("response_mask", "preference", "partner_logratio", "ref_logprobs", "old_logprobs?")

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns the pairs among these rows, one half for each row."""
        return float((columns["preference"] != 0).sum()) / 2

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the sum of the rows' shares and metrics.

        `preference/loss` is the mean over pairs, `preference/margin` that of beta h, `preference/accuracy` the share of
        rows with h > 0, and `preference/skipped` that of rows in no pair. `preference/stale_max` is by how much a row's
        log-ratio has moved since `old_logprobs`: `partner_logratio` is out of date by as much.

        Args:
            outputs: `logprobs` [b, T], with the gradient.
            micro_batch: `response_mask` and `ref_logprobs` [b, T]; `preference` and `partner_logratio` [b].
        """
        mask = micro_batch["response_mask"].bool()
        logprobs = outputs["logprobs"].masked_fill(~mask, 0.0)
        log_ratio = (logprobs - micro_batch["ref_logprobs"].masked_fill(~mask, 0.0)).sum(1)
        sign = micro_batch["preference"].to(log_ratio.dtype)
        is_paired = sign != 0
        partner = micro_batch["partner_logratio"].to(log_ratio.dtype).masked_fill(~is_paired, 0.0)
        margin = sign * (log_ratio - partner)
        if self.kind == "dpo":
            losses = torch.nn.functional.softplus(-self.beta * margin)
        else:
            losses = (margin - 1 / (2 * self.beta)).square()
        losses = losses.masked_fill(~is_paired, 0.0)
        # Half the value and the whole gradient: the other half of the pair's gradient is the partner's.
        loss = (losses - losses.detach() / 2).sum()
        rows = float(is_paired.sum())
        metrics = {
            "preference/loss": (float(loss.detach()), rows / 2),
            "preference/margin": (self.beta * float(margin.detach().sum()), rows),
            "preference/accuracy": (float((margin > 0).sum()), rows),
            "preference/skipped": (float((~is_paired).sum()), float(len(sign))),
        }
        if "old_logprobs" in micro_batch.keys():  # noqa: SIM118 - a TensorDict cannot be asked otherwise
            moved = (logprobs.detach() - micro_batch["old_logprobs"].masked_fill(~mask, 0.0)).sum(1).abs()
            metrics["preference/stale_max"] = (float(moved[is_paired].max()), 1.0) if rows else (0.0, 0.0)
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class PreferencePairs:
    """`label_pairs` as an estimator: what `compute_advantages` of the advantage worker takes."""

    reads: ClassVar[tuple[str, ...]] = ("response_mask", "scores", "group_id", "old_logprobs", "ref_logprobs")
    writes: ClassVar[tuple[str, ...]] = ("preference", "partner_logratio")

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the columns of `label_pairs`."""
        return label_pairs(columns)


def label_pairs(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns which row of each pair is preferred, and its partner's log-ratio, by group and in any order.

    A pair whose scores are equal, or of which one is NaN, is skipped.

    Args:
        columns: `scores` [B], `group_id` int64 [B]; `response_mask`, `old_logprobs`, `ref_logprobs` [B, T] of the whole
            batch, padded or jagged. `old_logprobs` are of the weights that the next step updates.

    Returns:
        `preference` float64 [B], 1 for chosen, -1 for rejected, 0 for skipped; and `partner_logratio` float64 [B], the
        sum of old_logprobs - ref_logprobs over the partner's trained tokens.

    Raises:
        BatchError: if a group has not exactly two rows.
    """
    mask = pad_rows(columns["response_mask"]).bool()
    old, reference = (pad_rows(columns[name]).double() for name in ("old_logprobs", "ref_logprobs"))
    log_ratios = (old - reference).masked_fill(~mask, 0.0).sum(1)
    groups, sizes = torch.unique(columns["group_id"], return_counts=True)
    if bool((sizes != 2).any()):
        odd = int((sizes != 2).nonzero()[0])
        raise BatchError(
            f"group_id={int(groups[odd])}: has {int(sizes[odd])} rows, and preferences are between two. "
            "Set rollout.samples_per_prompt=2"
        )
    partner = torch.empty_like(columns["group_id"])
    first, second = columns["group_id"].argsort(stable=True).view(-1, 2).unbind(1)
    partner[first], partner[second] = second, first
    scores = columns["scores"].double()
    preference = torch.sign(scores - scores[partner]).nan_to_num(0.0)
    return {"preference": preference, "partner_logratio": log_ratios[partner]}
