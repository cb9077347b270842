"""Estimators without a critic that do not divide by a group's spread: REINFORCE++ and ReMax."""

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
from hf_algorithms.advantages._group import GroupOfOne, refuse_group_of_one
from hf_algorithms.advantages._returns import KLEstimator, KLReturn, compute_penalty, spread_scores, whiten
from hf_algorithms.advantages.shaping import clip_scores
from hf_protocols.errors import ConfigError
from hf_protocols.validation import Checks

__all__ = ["ReinforceAdvantage"]

_check = Checks(ConfigError)

ReinforceBaseline = Literal["none", "group", "greedy"]


@dataclass(frozen=True, kw_only=True)
class ReinforceAdvantage:
    """Return of every trained token: discounted (score - baseline) minus the KL penalty.

    - REINFORCE (Williams 1992): the defaults.
    - REINFORCE++ (Hu 2025): `whiten=True` and a `kl_coefficient`.
    - Its baseline form: `baseline="group", whiten=True`. No division by the group's std.
    - ReMax (Li et al. 2024): `baseline="greedy"`, the score of the greedy response to the same prompt. The authors'
      code: `gamma=0.99, kl_coefficient=0.05, kl_return="token", score_clip=5.0, discounts_last=True`. The paper's
      derivation has no discount, and `kl_return="cumulative"` is the policy gradient of the penalised return.

    A row without a score, or without the baseline's score where it is greedy (NaN), gets advantage 0. It stays out of
    whitening and of its group's mean; its tokens stay in a loss's denominator.
    """

    gamma: float = 1.0
    """Discount per trained token."""
    baseline: ReinforceBaseline = "none"
    """0; the mean score of the rows of equal `group_id`, itself included; or `baseline_scores`."""
    group_of_one: GroupOfOne = "error"
    """For a prompt with one response and `baseline="group"`: refuse it, subtract nothing, or give it advantage 0."""
    whiten: bool = False
    """Gives advantages mean 0 and variance 1 over all trained tokens of the batch, so long responses weigh more."""
    whiten_ddof: int = 0
    whiten_eps: float = 1e-8
    """Is added to the variance, inside the root."""
    kl_coefficient: float = 0.0
    """0 reads neither `old_logprobs` nor `ref_logprobs`."""
    kl_estimator: KLEstimator = "k1"
    kl_return: KLReturn = "cumulative"
    """`cumulative`: token t pays the discounted KL of u >= t; `token`: its own only."""
    score_clip: float | None = None
    """Cuts the difference of score and baseline at plus and minus this size."""
    discounts_last: bool = False
    """Also multiplies the last token's score by `gamma`: gamma^(L - t) in place of gamma^(L - 1 - t), t from 0."""

    writes: ClassVar[tuple[str, ...]] = ("advantages",)

    def __post_init__(self) -> None:
        check_share("gamma", self.gamma)
        _check.one_of("baseline", self.baseline, get_args(ReinforceBaseline))
        _check.one_of("group_of_one", self.group_of_one, get_args(GroupOfOne))
        _check.one_of("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _check.one_of("kl_return", self.kl_return, get_args(KLReturn))
        check_ddof("whiten_ddof", self.whiten_ddof)
        check_bound("whiten_eps", self.whiten_eps)
        check_bound("kl_coefficient", self.kl_coefficient)
        check_bound("score_clip", self.score_clip, may_be_zero=False, may_be_none=True)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that these options need."""
        compared = {"none": (), "group": ("group_id",), "greedy": ("baseline_scores",)}[self.baseline]
        logprobs = ("old_logprobs", "ref_logprobs") if self.kl_coefficient else ()
        return ("response_mask", "scores", *compared, *logprobs)

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns `advantages` [B, T], 0 where the mask is False.

        Args:
            columns: what `reads` names: `scores`, `baseline_scores` [B] float, `group_id` [B] whole numbers,
                `old_logprobs`, `ref_logprobs`, `response_mask` [B, T].

        Raises:
            BatchError: a group has one row and `group_of_one` is `error`; or a column is missing or does not fit.
        """
        given = read_columns(columns, self.reads, "ReinforceAdvantage")
        mask = given["response_mask"]
        differences = clip_scores(given["scores"] - self._compute_baseline(given), self.score_clip)
        scored = ~differences.isnan()
        if self.discounts_last:
            differences = self.gamma * differences
        penalty = compute_penalty(given, coefficient=self.kl_coefficient, estimator=self.kl_estimator)
        advantages = spread_scores(
            differences.masked_fill(~scored, 0.0), penalty, mask, gamma=self.gamma, kl_return=self.kl_return
        )
        trained = mask & scored[:, None]
        advantages = advantages.masked_fill(~trained, 0.0)
        if self.whiten:
            advantages = whiten(advantages, trained, ddof=self.whiten_ddof, eps=self.whiten_eps)
        return {"advantages": advantages}

    def _compute_baseline(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scores = given["scores"]
        if self.baseline == "greedy":
            return given["baseline_scores"]
        baseline = torch.zeros_like(scores)
        if self.baseline == "group":
            for rows in split_groups(given["group_id"]):
                if len(rows) == 1 and self.group_of_one == "raw":
                    continue
                if len(rows) == 1 and self.group_of_one == "error":
                    refuse_group_of_one("ReinforceAdvantage", given["group_id"][rows[0]])
                baseline[rows] = scores[rows].double().nanmean().to(scores.dtype)
        return baseline
