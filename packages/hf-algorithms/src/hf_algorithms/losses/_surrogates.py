"""Surrogates: the loss of each token whose gradient improves the policy, before any aggregation.

Each returns `(loss, clips)`: the loss [b, T] to minimise, and bool [b, T] masks by metric name, of the tokens where a
clip is active. A is the advantage, lp the log-prob, r = exp(lp - old lp), and sg stops the gradient.

Surrogates of a whole sequence's ratio are in token form: token t carries the value of the sequence and the gradient of
its own log-prob. Where the advantages and weights of a row are equal this is the gradient of the sequence's ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hf_protocols import ConfigError
from hf_protocols.validation import Checks, show

__all__ = [
    "CISPO",
    "DPPOTV",
    "GMPO",
    "SAPO",
    "Clip",
    "Reinforce",
    "SequenceClip",
    "SequenceProductClip",
    "Surrogate",
    "Tokens",
]

_check = Checks(ConfigError)

_Answer = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Columns of a micro-batch that a surrogate reads: [b, T] each, 0 where the mask is False."""

    logprobs: torch.Tensor
    """With the gradient."""
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True on trained tokens."""
    log_ratio_clamp: float | None
    """Largest size of the logarithm of a ratio."""
    rollout_logprobs: torch.Tensor | None = None
    """The sampler's, where a surrogate reads them."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """The current log-prob less the old one, not clamped."""
        return self.logprobs - self.old_logprobs

    def bound(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of a ratio, clamped; beyond the clamp it has no gradient."""
        limit = self.log_ratio_clamp
        return log_ratio if limit is None else log_ratio.clamp(-limit, limit)

    def compute_ratio(self) -> torch.Tensor:
        """Returns r, clamped."""
        return self.bound(self.log_ratio).exp()

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sums over trained tokens, [b, 1]."""
        return values.masked_fill(~self.mask, 0.0).sum(1, keepdim=True)

    def count_rows(self) -> torch.Tensor:
        """Returns the number of trained tokens, at least 1, [b, 1]."""
        return self.mask.sum(1, keepdim=True).clamp(min=1).to(self.logprobs.dtype)


class Surrogate(Protocol):
    """The loss of each token: a frozen object of the caller's own may stand for those here."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it uses: `old_logprobs`, `rollout_logprobs`, both, or none."""

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss, [b, T], and active clips by metric name, bool [b, T]."""


class _OfRatio:
    """A surrogate of the ratio to the old log-probs."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it uses."""
        return ("old_logprobs",)


@dataclass(frozen=True, kw_only=True)
class _Ranged(_OfRatio):
    """A surrogate that clips to a range below and above."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check.number("clip_low", self.low, may_be_zero=True)
        _check.number("clip_high", self.high, may_be_zero=True)


@dataclass(frozen=True, kw_only=True)
class Clip(_Ranged):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, Schulman et al. 2017, eq. 7; DAPO with high > low).

    Raises:
        ConfigError: for a negative range, a `dual` of at most 1, or a `ratio_cap` of at most 0.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    """Bounds the loss where A < 0: it is at most -A dual (dual clip, Ye et al. 2020, eq. 5)."""
    ratio_cap: float | None = None
    """A ratio above it weighs that much, with the gradient of `ratio_cap` * lp (truncated importance sampling).

    For old log-probs of another engine: where A < 0 the clip lets their rare large ratios through.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None:
            _check.number("dual_clip", self.dual)
            if self.dual <= 1:
                raise ConfigError(f"dual_clip={show(self.dual)}: must be above 1. Use about 3")
        if self.ratio_cap is not None:
            _check.number("ratio_cap", self.ratio_cap)

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips, also `clip_dual` and `truncated_fraction` where these are on."""
        ratio = tokens.compute_ratio() if self.ratio_cap is None else _truncate(tokens.log_ratio, self.ratio_cap)
        clips = _find_clips(ratio, tokens.advantages, 1 - self.low, 1 + self.high)
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        if self.dual is not None:
            clips["clip_dual"] = (tokens.advantages < 0) & (ratio > self.dual)
            bounded = torch.where(clips["clip_dual"], self.dual, bounded)
        loss = -tokens.advantages * torch.where(_any(clips), bounded, ratio)
        if self.ratio_cap is not None:
            clips["truncated_fraction"] = tokens.log_ratio.exp() > self.ratio_cap
        return loss, clips


@dataclass(frozen=True, kw_only=True)
class SequenceClip(_Ranged):
    """The clip on the sequence's ratio s = exp(mean_t(lp - old lp)) (GSPO, Zheng et al. 2025, eq. 5, 7).

    Token form, GSPO-token (eq. 13): the ratio of token t is sg(s) lp / sg(lp), as probabilities. The paper aggregates
    by `seq-mean-token-mean`.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips."""
        log_ratio = tokens.sum_rows(tokens.log_ratio) / tokens.count_rows()
        return _clip_sequences(tokens, log_ratio, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class SequenceProductClip(_Ranged):
    """The clip on the sequence's ratio s = exp(sum_t(lp - old lp)) (RLOO as TRL has it; Ahmadian et al. 2024).

    Token form: token t has the value of the loss over L, the row's trained tokens, and s times the gradient of its own
    lp. With `seq-mean-token-sum` this is the mean over sequences of max(-A s, -A clip(s)), in value and gradient.
    """

    low: float = 0.2
    high: float = 0.2

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips."""
        return _clip_sequences(
            tokens, tokens.sum_rows(tokens.log_ratio), self.low, self.high, divisor=tokens.count_rows()
        )


@dataclass(frozen=True, kw_only=True)
class CISPO(_Ranged):
    """-sg(clip(r, 1 - low, 1 + high)) A lp: every token keeps a gradient (MiniMax-M1 2025, eq. 4).

    The default bounds are 0 and 5. A clip counts as active wherever r is outside of them.
    """

    low: float = 1.0
    high: float = 4.0

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips."""
        ratio = tokens.compute_ratio().detach()
        clips = {"clip_low": ratio < 1 - self.low, "clip_high": ratio > 1 + self.high}
        return -ratio.clamp(1 - self.low, 1 + self.high) * tokens.advantages * tokens.logprobs, clips


@dataclass(frozen=True, kw_only=True)
class SAPO(_OfRatio):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip (Gao et al. 2025).

    tau is `tau_positive` where A > 0 and `tau_negative` elsewhere. No clip is ever active.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        _check.number("tau_positive", self.tau_positive)
        _check.number("tau_negative", self.tau_negative)

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss, and no clips."""
        ratio = tokens.compute_ratio()
        tau = torch.full_like(ratio, self.tau_negative).masked_fill(tokens.advantages > 0, self.tau_positive)
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages, {}


@dataclass(frozen=True, kw_only=True)
class GMPO(_Ranged):
    """-A exp(mean_t d), d = lp - old lp clipped to -low ... high (GMPO, Zhao et al. 2025).

    The clip is in log space and on the side that A's sign names: above where A > 0, below where A < 0. Token form: a
    clipped token has no gradient, the others the geometric mean's. The paper aggregates by `seq-mean-token-mean`.
    """

    low: float = 0.4
    high: float = 0.4

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips."""
        log_ratio = tokens.log_ratio.detach()
        clips = _find_clips(log_ratio, tokens.advantages, -self.low, self.high)
        clipped = torch.where(_any(clips), log_ratio.clamp(-self.low, self.high), log_ratio)
        mean = tokens.sum_rows(clipped) / tokens.count_rows()
        ratio = tokens.bound(mean).exp()
        is_fixed = _any(clips) | (tokens.bound(mean) != mean)
        return -tokens.advantages * ratio * (1 + _move(tokens).masked_fill(is_fixed, 0.0)), clips


@dataclass(frozen=True, kw_only=True)
class DPPOTV:
    """-A sg(min(r, ratio_cap)) lp where the token's probability stays close to the sampler's, else 0.

    This is DPPO-Binary-TV (Qi et al. 2026). With p = exp(lp) and q the anchor's: a token counts if A > 0 and p - q <=
    threshold, or A <= 0 and p - q >= -threshold. |p - q| is the total variation of the token against all others.

    The anchor and the ratio are two things. q is the sampler's probability by default. r = exp(lp - old lp) is taken to
    the old log-probs. The paper's is taken to the sampler, as here where old log-probs are the sampler's own.
    """

    threshold: float = 0.2
    ratio_cap: float = 20.0
    """Largest r that weighs a token, for either sign of A; the weight has no gradient."""
    anchor: Literal["sampler", "old"] = "sampler"
    """q's log-probs: `rollout_logprobs`, as in the paper, or the old ones, as in verl."""

    def __post_init__(self) -> None:
        _check.number("threshold", self.threshold)
        _check.number("ratio_cap", self.ratio_cap)
        if self.anchor not in ("sampler", "old"):
            raise ConfigError(f"anchor={show(self.anchor)}: is not a known anchor. Use 'sampler' or 'old'")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it uses."""
        return ("old_logprobs", *(("rollout_logprobs",) if self.anchor == "sampler" else ()))

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss and the clips."""
        anchor = tokens.rollout_logprobs if self.anchor == "sampler" else tokens.old_logprobs
        assert anchor is not None
        change = tokens.logprobs.detach().exp() - anchor.exp()
        clips = _find_clips(change, tokens.advantages, -self.threshold, self.threshold)
        weight = tokens.compute_ratio().detach().clamp(max=self.ratio_cap).masked_fill(_any(clips), 0.0)
        return -tokens.advantages * weight * tokens.logprobs, clips


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """-A lp, without a ratio: exact for one update on samples of the current policy (Williams 1992)."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it uses."""
        return ()

    def __call__(self, tokens: Tokens) -> _Answer:
        """Returns the loss, and no clips."""
        return -tokens.advantages * tokens.logprobs, {}


def _find_clips(values: torch.Tensor, advantages: torch.Tensor, least: float, most: float) -> dict[str, torch.Tensor]:
    """The tokens whose loss a clip of `values` to least ... most changes: below where A < 0, above where A > 0."""
    return {"clip_low": (advantages < 0) & (values < least), "clip_high": (advantages > 0) & (values > most)}


def _any(clips: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(clips.values())).any(0)


def _move(tokens: Tokens) -> torch.Tensor:
    """Zeros, with the gradient of the token's log-prob."""
    return tokens.logprobs - tokens.logprobs.detach()


def _clip_sequences(
    tokens: Tokens, log_ratio: torch.Tensor, low: float, high: float, *, divisor: torch.Tensor | float = 1.0
) -> _Answer:
    """The clipped loss of sequence ratios [b, 1] in token form, its values over `divisor`."""
    bounded = tokens.bound(log_ratio.detach())
    ratio = bounded.exp()
    clips = _find_clips(ratio, tokens.advantages, 1 - low, 1 + high)
    value = torch.where(_any(clips), ratio.clamp(1 - low, 1 + high), ratio) / divisor
    is_fixed = _any(clips) | (bounded != log_ratio.detach())
    return -tokens.advantages * (value + ratio * _move(tokens).masked_fill(is_fixed, 0.0)), clips


def _truncate(log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """exp(log_ratio), above `cap` the value `cap` with the gradient of `cap * log_ratio`."""
    limit = math.log(cap)
    below = log_ratio.clamp(max=limit).exp()
    return torch.where(log_ratio > limit, cap * (log_ratio - log_ratio.detach()).exp(), below)
