"""Estimators that compare the responses of one prompt: GRPO and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from hf_algorithms.advantages._columns import (
    check_bound,
    check_ddof,
    check_share,
    read_columns,
    split_groups,
)
from hf_algorithms.advantages._returns import KLEstimator, compute_penalty, spread_scores
from hf_algorithms.advantages.shaping import clip_scores
from hf_protocols.errors import BatchError, ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["GroupAdvantage", "GroupOfOne", "StdOver", "refuse_group_of_one"]

_check = Checks(ConfigError)

Baseline = Literal["mean", "leave_one_out", "length", "none"]
Scale = Literal["std", "mean", "none"]
StdOn = Literal["s+eps", "max", "positive"]
StdOver = Literal["group", "others", "batch"]
GroupOfOne = Literal["error", "raw", "zero"]
GroupKL = Literal["token", "cumulative", "sequence"]


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """A_i = (r_i - baseline) / scale among the responses of one prompt, on every trained token.

    Groups are rows of equal `group_id`, anywhere in the batch. With the other options at their defaults:

    - GRPO (Shao et al. 2024): the defaults.
    - Dr.GRPO (Liu et al. 2025): `scale="none"`, and a loss that divides by a constant.
    - RLOO (Ahmadian et al. 2024): `baseline="leave_one_out", scale="none"`.
    - MaxRL: `scale="mean"`, that is (r - m) / m, and 0 where m <= 0.
    - OPO (Hao et al. 2025): `baseline="length", scale="none"`, sum L_i r_i / sum L_i with L_i trained tokens.
    - NeMo-RL's GRPO: `baseline="leave_one_out", std_over="others", std_on="positive"`.

    A row without a score (NaN) is left out of its group's statistics and gets advantage 0. A row without a trained
    token counts in them: its score was drawn from the same policy. Statistics are computed in float64.
    """

    baseline: Baseline = "mean"
    scale: Scale = "std"
    std_ddof: int = 1
    """0 divides the sum of squares by n, 1 by n - 1. A std of `std_ddof` scores or fewer is 0."""
    std_eps: float = 1e-6
    std_on: StdOn = "s+eps"
    """Divisor: s + eps; the larger of s and eps (`max`); or s + eps where s > 0 and 1 elsewhere (`positive`)."""
    std_over: StdOver = "group"
    """`others`: the std of the other responses, which needs `std_on="positive"`: it may be 0 where A is not.

    `batch`: one std, of all scored rows of the batch (TRL's `scale_rewards="batch"`).
    """
    group_of_one: GroupOfOne = "error"
    """For a prompt with one response: refuse it, pass its score as it is, or give it advantage 0.

    A larger group of which one row is scored never fails: `error` means 0 there.
    """
    gamma: float = 1.0
    """Discount per trained token, from the last one."""
    kl_coefficient: float = 0.0
    """0 reads neither `old_logprobs` nor `ref_logprobs`."""
    kl_estimator: KLEstimator = "k1"
    kl_return: GroupKL = "cumulative"
    """`cumulative`: token t pays the KL of u >= t; `token`: its own; `sequence`: off the score, before the baseline.

    The last is TRL's RLOO. All act on token rewards, never on the loss.
    """
    score_clip: float | None = None
    """Cuts A_i at plus and minus this size, before the KL (OpenRLHF)."""

    writes: ClassVar[tuple[str, ...]] = ("advantages",)

    def __post_init__(self) -> None:
        _check.one_of("baseline", self.baseline, get_args(Baseline))
        _check.one_of("scale", self.scale, get_args(Scale))
        _check.one_of("std_on", self.std_on, get_args(StdOn))
        _check.one_of("std_over", self.std_over, get_args(StdOver))
        _check.one_of("group_of_one", self.group_of_one, get_args(GroupOfOne))
        _check.one_of("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _check.one_of("kl_return", self.kl_return, get_args(GroupKL))
        check_ddof("std_ddof", self.std_ddof)
        check_bound("std_eps", self.std_eps)
        check_bound("kl_coefficient", self.kl_coefficient)
        check_share("gamma", self.gamma)
        check_bound("score_clip", self.score_clip, may_be_zero=False, may_be_none=True)
        if self.scale == "std" and self.std_on != "positive" and (self.baseline == "none" or self.std_over == "others"):
            cause = 'baseline="none"' if self.baseline == "none" else 'std_over="others"'
            rule = f"divides by {self.std_eps} where the std is 0, and with {cause} the dividend is not 0 there"
            raise ConfigError(f'std_on={show(self.std_on)}: {rule}. Give std_on="positive".')

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that these options need."""
        names = ("response_mask", "scores", "group_id")
        return (*names, "old_logprobs", "ref_logprobs") if self.kl_coefficient else names

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns `advantages` [B, T], 0 where the mask is False.

        Args:
            columns: what `reads` names: `scores` [B] float, `group_id` [B] whole numbers, `old_logprobs`,
                `ref_logprobs`, `response_mask` [B, T].

        Raises:
            BatchError: a group has one row and `group_of_one` is `error`; or a column is missing or does not fit.
        """
        given = read_columns(columns, self.reads, "GroupAdvantage")
        mask, scores = given["response_mask"], given["scores"]
        penalty = compute_penalty(given, coefficient=self.kl_coefficient, estimator=self.kl_estimator)
        if self.kl_return == "sequence":
            scores, penalty = scores - penalty.sum(1), torch.zeros_like(penalty)
        scored, lengths = ~scores.isnan(), mask.sum(1).double()
        compared = torch.zeros_like(scores)
        of_batch = _compute_std(scores[scored][None].double(), self.std_ddof) if self.std_over == "batch" else None
        by_size: dict[int, list[torch.Tensor]] = {}
        for rows in split_groups(given["group_id"]):
            if len(rows) == 1 and self._compares and self.group_of_one == "error":
                refuse_group_of_one("GroupAdvantage", given["group_id"][rows[0]])
            known = rows[scored[rows]]
            by_size.setdefault(len(known), []).append(known)
        for groups in by_size.values():
            known = torch.stack(groups)
            compared[known] = self._compare(scores[known].double(), lengths[known], of_batch).to(scores.dtype)
        compared = clip_scores(compared, self.score_clip)
        cumulates = self.kl_return != "token"
        tokens = spread_scores(
            compared, penalty, mask, gamma=self.gamma, kl_return="cumulative" if cumulates else "token"
        )
        return {"advantages": tokens.masked_fill(~(mask & scored[:, None]), 0.0)}

    @property
    def _compares(self) -> bool:
        return self.baseline != "none" or self.scale != "none"

    def _compare(self, scores: torch.Tensor, lengths: torch.Tensor, of_batch: torch.Tensor | None) -> torch.Tensor:
        """The advantages [g, n] of g groups of n scored responses each, float64; `of_batch` [1] is the batch's std."""
        if scores.shape[1] < 2 and self._compares:
            return scores if self.group_of_one == "raw" else torch.zeros_like(scores)
        centred = scores - self._compute_baseline(scores, lengths)
        if self.scale == "none":
            return centred
        if self.scale == "mean":
            mean = scores.mean(1, keepdim=True)
            return torch.where(mean > 0, centred / mean, 0.0)
        if of_batch is not None:
            std = of_batch
        elif self.std_over == "group":
            std = _compute_std(scores, self.std_ddof)[:, None]
        else:
            std = _compute_std(_leave_one_out(scores), self.std_ddof)
        if self.std_on == "max":
            divisor = std.clamp(min=self.std_eps)
        elif self.std_on == "positive":
            divisor = torch.where(std > 0, std + self.std_eps, 1.0)
        else:
            divisor = std + self.std_eps
        # with eps = 0 and equal scores, 0 / 0
        return torch.where(divisor > 0, centred / divisor, 0.0)

    def _compute_baseline(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.baseline == "none":
            return torch.zeros_like(scores)
        if self.baseline == "leave_one_out":
            found = (scores.sum(1, keepdim=True) - scores) / (scores.shape[1] - 1)
        else:
            found = scores.mean(1, keepdim=True)
        if self.baseline == "length":
            tokens = lengths.sum(1, keepdim=True)
            found = torch.where(tokens > 0, (lengths * scores).sum(1, keepdim=True) / tokens, found)
        # exactly: a mean of equal floats may differ from them by rounding
        equal = scores.amax(1, keepdim=True) == scores.amin(1, keepdim=True)
        return torch.where(equal, scores, found)


def refuse_group_of_one(reader: str, group: torch.Tensor) -> None:
    """Fails for a prompt with one response, where a group is compared.

    Raises:
        BatchError: always.
    """
    rule = "has 1 response, and a group needs at least 2"
    raise BatchError(f"{reader}: group_id={int(group)} {rule}. Raise rollout.samples_per_prompt.")


def _leave_one_out(scores: torch.Tensor) -> torch.Tensor:
    """[g, n, n - 1]: in each of g groups row i has the scores of all but i."""
    groups, n = scores.shape
    others = ~torch.eye(n, dtype=torch.bool, device=scores.device)
    return scores[:, None].expand(groups, n, n)[others.expand(groups, n, n)].view(groups, n, n - 1)


def _compute_std(rows: torch.Tensor, ddof: int) -> torch.Tensor:
    """The std of each row of [..., k]; exactly 0 for equal entries, and for `ddof` entries or fewer."""
    if rows.shape[-1] <= ddof:
        return rows.new_zeros(rows.shape[:-1])
    equal = rows.amax(-1) == rows.amin(-1)
    return rows.std(dim=-1, correction=ddof).masked_fill(equal, 0.0)
