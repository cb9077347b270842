"""Estimators with a critic: GAE, and the two passes of PPO-Lagrangian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from hf_algorithms.advantages._columns import check_bound, check_ddof, check_share, read_columns
from hf_algorithms.advantages._returns import (
    KLEstimator,
    compute_gae,
    compute_penalty,
    compute_token_rewards,
    find_last,
    whiten,
)
from hf_algorithms.advantages.shaping import TRUNCATED, clip_scores, subtract_missing_eos
from hf_protocols.errors import BatchError, ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["GAE", "LagrangianAdvantage"]

_check = Checks(ConfigError)

Bootstrap = Literal["zero", "value"]
RewardPosition = Literal["last", "after"]


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Generalized advantage estimation with a KL penalty in the token rewards (Schulman et al. 2016, eq. 16).

    The score is paid at `reward_position`. A row without a score (NaN) gets advantages 0 and its old values as
    returns; it stays out of whitening, and its tokens stay in a loss's denominator.
    """

    gamma: float = 1.0
    """Discount per trained token."""
    gae_lambda: float = 0.95
    value_lambda: float | None = None
    """The lambda of the critic's `returns` (VAPO, Yue et al. 2025); None: `gae_lambda`."""
    kl_coefficient: float = 0.0
    """0 reads neither `old_logprobs` nor `ref_logprobs`."""
    kl_estimator: KLEstimator = "k1"
    bootstrap: Bootstrap = "zero"
    """`value`: a truncated response (`finish_reason` 1) goes on with a value after its last token, not with 0.

    That value is `next_values` [B] where the batch has this column. Otherwise it is the value before the last trained
    token: critics give one value before each token, and this one is the nearest.
    """
    whiten: bool = True
    """Gives `advantages` mean 0 and variance 1 over all trained tokens of the batch; never `returns`."""
    whiten_ddof: int = 0
    whiten_eps: float = 1e-8
    """Is added to the variance, inside the root."""
    reward_clip: float | None = None
    """Cuts scores at plus and minus this size, before any penalty."""
    missing_eos_penalty: float | None = None
    """Is subtracted from the clipped score of a truncated response."""
    reward_position: RewardPosition = "last"
    """`last`: the last trained token. `after`: the position after it, in rows that have a value there (TRL's PPO).

    That value is `next_values` [B], NaN for a row without room. The position takes part in both passes like a trained
    token. Its return is `next_returns` [B], and its advantage is dropped: no token was drawn there.
    """

    def __post_init__(self) -> None:
        _check_critic_options(self)
        if self.value_lambda is not None:
            check_share("value_lambda", self.value_lambda)
        check_ddof("whiten_ddof", self.whiten_ddof)
        check_bound("whiten_eps", self.whiten_eps)
        check_bound("reward_clip", self.reward_clip, may_be_zero=False, may_be_none=True)
        check_bound("missing_eos_penalty", self.missing_eos_penalty, may_be_none=True)
        _check.one_of("reward_position", self.reward_position, get_args(RewardPosition))
        if self.reward_position == "after" and self.bootstrap == "value":
            rule = "the value after the last token is where the score stands"
            raise ConfigError(f"bootstrap={show(self.bootstrap)}: with reward_position='after' {rule}. Give 'zero'.")

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the columns that these options give."""
        return ("advantages", "returns", *(("next_returns",) if self.reward_position == "after" else ()))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that these options need; `?` marks one that may be absent."""
        names = ("response_mask", "scores", "values", *_logprobs_for(self.kl_coefficient))
        if self.bootstrap == "value":
            return (*names, "finish_reason", "next_values?")
        if self.reward_position == "after":
            names = (*names, "next_values")
        return (*names, "finish_reason") if self.missing_eos_penalty is not None else names

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns `advantages` and the `returns` before whitening, both [B, T], 0 where the mask is False.

        With `reward_position = "after"` also `next_returns` [B], NaN where a row has no value after its last token.

        Args:
            columns: what `reads` names: `scores`, `next_values` [B] float; `finish_reason` [B] (1: truncated);
                `old_logprobs`, `ref_logprobs`, `values`, `response_mask` [B, T].

        Raises:
            BatchError: a column is missing, has another shape, or is not finite on a trained token.
        """
        given = read_columns(columns, self.reads, "GAE")
        mask, values = given["response_mask"], given["values"]
        scores = clip_scores(given["scores"], self.reward_clip)
        if self.missing_eos_penalty is not None:
            scores = subtract_missing_eos(scores, given["finish_reason"], self.missing_eos_penalty)
        scored = ~scores.isnan()
        penalty = compute_penalty(given, coefficient=self.kl_coefficient, estimator=self.kl_estimator)
        paid = scores.masked_fill(~scored, 0.0)
        has_after = torch.zeros_like(scored)
        if self.reward_position == "after":
            has_after = mask.any(1) & ~given["next_values"].isnan()
        rewards = compute_token_rewards(paid.masked_fill(has_after, 0.0), penalty, mask)
        if self.reward_position == "after":
            # a column beyond all tokens: the passes go from a marked position to the next
            values = torch.cat([values, given["next_values"].masked_fill(~has_after, 0.0)[:, None].to(values.dtype)], 1)
            rewards = torch.cat([rewards, paid.masked_fill(~has_after, 0.0)[:, None].to(rewards.dtype)], 1)
        marked = torch.cat([mask, has_after[:, None]], 1)[:, : values.shape[1]]
        last_values = _values_beyond(given, "values", "next_values") if self.bootstrap == "value" else None

        def run_pass(gae_lambda: float) -> torch.Tensor:
            options = {"gamma": self.gamma, "gae_lambda": gae_lambda}
            found = compute_gae(rewards, values, marked, last_values=last_values, **options)
            return found.masked_fill(~(marked & scored[:, None]), 0.0)

        advantages = run_pass(self.gae_lambda)
        returns = values + (advantages if self.value_lambda is None else run_pass(self.value_lambda))
        width, trained = mask.shape[1], mask & scored[:, None]
        advantages = advantages[:, :width]
        if self.whiten:
            advantages = whiten(advantages, trained, ddof=self.whiten_ddof, eps=self.whiten_eps)
        answer = {"advantages": advantages, "returns": returns[:, :width]}
        if self.reward_position == "after":
            answer["next_returns"] = returns[:, width].masked_fill(~has_after, math.nan)
        return answer


@dataclass(frozen=True, kw_only=True)
class LagrangianAdvantage:
    """Advantages of PPO-Lagrangian (Dai et al. 2023, Safe RLHF; algorithm as in its code).

    Two GAE passes: over rewards, -k per token plus the score, and over costs, +k per token plus the cost, with
    k = kl_coefficient * KL estimate. A = (A_r - multiplier A_c) / (1 + multiplier), so the KL's weight in A is
    `kl_coefficient` for any multiplier. A row whose score or cost is NaN gets advantages 0, and its old values as
    returns.
    """

    multiplier: float
    """Weight lambda of the constraint, at least 0; `Multiplier` updates it between iterations."""
    gamma: float = 1.0
    gae_lambda: float = 0.95
    kl_coefficient: float = 0.02
    """0 reads neither `old_logprobs` nor `ref_logprobs`."""
    kl_estimator: KLEstimator = "k1"
    token_clip: float | None = 50.0
    """Cuts each token's reward, and each token's cost, at plus and minus this size."""
    bootstrap: Bootstrap = "zero"
    """As in `GAE`, for both passes; the columns are `next_values` and `next_cost_values`."""
    whiten: bool = False
    """Gives the combined `advantages` mean 0 and variance 1 over all trained tokens of the batch."""
    whiten_ddof: int = 0
    whiten_eps: float = 1e-8

    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns", "cost_returns")

    def __post_init__(self) -> None:
        _check_critic_options(self)
        check_bound("multiplier", self.multiplier)
        check_ddof("whiten_ddof", self.whiten_ddof)
        check_bound("whiten_eps", self.whiten_eps)
        check_bound("token_clip", self.token_clip, may_be_zero=False, may_be_none=True)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that these options need; `?` marks one that may be absent."""
        names = ("response_mask", "scores", "costs", "values", "cost_values", *_logprobs_for(self.kl_coefficient))
        return (*names, "finish_reason", "next_values?", "next_cost_values?") if self.bootstrap == "value" else names

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns `advantages`, `returns` and `cost_returns`, all [B, T], 0 where the mask is False.

        Args:
            columns: what `reads` names: `scores`, `costs` [B] float; `values`, `cost_values`, `old_logprobs`,
                `ref_logprobs`, `response_mask` [B, T].

        Raises:
            BatchError: a column is missing, has another shape, or is not finite on a trained token.
        """
        given = read_columns(columns, self.reads, "LagrangianAdvantage")
        trained = given["response_mask"] & ~(given["scores"].isnan() | given["costs"].isnan())[:, None]
        penalty = compute_penalty(given, coefficient=self.kl_coefficient, estimator=self.kl_estimator)
        of_rewards = self._run_pass(given, "scores", penalty, "values").masked_fill(~trained, 0.0)
        of_costs = self._run_pass(given, "costs", -penalty, "cost_values").masked_fill(~trained, 0.0)
        advantages = (of_rewards - self.multiplier * of_costs) / (1.0 + self.multiplier)
        if self.whiten:
            advantages = whiten(advantages, trained, ddof=self.whiten_ddof, eps=self.whiten_eps)
        return {
            "advantages": advantages,
            "returns": of_rewards + given["values"],
            "cost_returns": of_costs + given["cost_values"],
        }

    def _run_pass(
        self, given: Mapping[str, torch.Tensor], score: str, penalty: torch.Tensor, values: str
    ) -> torch.Tensor:
        mask, scores = given["response_mask"], given[score]
        signal = compute_token_rewards(scores.masked_fill(scores.isnan(), 0.0), penalty, mask)
        if self.token_clip is not None:
            signal = signal.clamp(-self.token_clip, self.token_clip)
        last_values = _values_beyond(given, values, f"next_{values}") if self.bootstrap == "value" else None
        return compute_gae(
            signal, given[values], mask, gamma=self.gamma, gae_lambda=self.gae_lambda, last_values=last_values
        )


def _check_critic_options(estimator: GAE | LagrangianAdvantage) -> None:
    check_share("gamma", estimator.gamma)
    check_share("gae_lambda", estimator.gae_lambda)
    check_bound("kl_coefficient", estimator.kl_coefficient)
    _check.one_of("kl_estimator", estimator.kl_estimator, get_args(KLEstimator))
    _check.one_of("bootstrap", estimator.bootstrap, get_args(Bootstrap))


def _logprobs_for(kl_coefficient: float) -> tuple[str, ...]:
    return ("old_logprobs", "ref_logprobs") if kl_coefficient else ()


def _values_beyond(given: Mapping[str, torch.Tensor], values: str, next_values: str) -> torch.Tensor:
    """The value [B] of the state after the last trained token: of truncated rows, else 0."""
    truncated = given["finish_reason"] == TRUNCATED
    if next_values in given:
        beyond = given[next_values]
        lacking = (truncated & beyond.isnan()).nonzero()
        if len(lacking):
            row = int(lacking[0])
            raise BatchError(f"{next_values}=nan of row {row}: a truncated response needs a number. Give its value.")
    else:
        beyond = given[values].masked_fill(~find_last(given["response_mask"]), 0.0).sum(1)
    return torch.where(truncated, beyond, 0.0)
