"""The divergence from the reference as a term of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hf_protocols import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["KLTerm"]

_check = Checks(ConfigError)

_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """Adds `coefficient` times an estimate of KL(policy || reference) to the loss of every token.

    The estimates are those of `estimate_kl`. `unbiased` multiplies them by exp(lp - sg(lp)), the score-function weight,
    whose value is 1. On average over the policy's own samples the gradient is:

    - k1 with `value`: zero, so it penalises nothing.
    - k2 with `value`, k1 and k3 with `unbiased`: that of KL(policy || reference).
    - k3 with `value`: that of KL(reference || policy), the other direction.
    - k2 with `unbiased`: that of E[d^2 / 2], which is refused.

    `ratio` multiplies by the policy's ratio exp(lp - old lp) in its place. On the first update of an iteration that is
    `unbiased`. On later ones it also weighs samples of the old policy as the current one would draw them.

    Raises:
        ConfigError: for an unknown name, a coefficient below 0, or k2 with `unbiased`.
    """

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    gradient: Literal["value", "unbiased", "ratio"] = "unbiased"

    def __post_init__(self) -> None:
        _check.number("kl_coefficient", self.coefficient, may_be_zero=True)
        _check.one_of("kl_estimator", self.estimator, ("k1", "k2", "k3"))
        _check.one_of("kl_gradient", self.gradient, ("value", "unbiased", "ratio"))
        if self.estimator == "k2" and self.gradient != "value":
            raise ConfigError(
                f"kl_gradient={show(self.gradient)}: k2 has the gradient of the KL as it is, and another one with "
                "the weight. Use kl_gradient='value'"
            )

    def __call__(
        self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, ratio: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the term of every token, [b, T].

        Args:
            logprobs: the policy's, finite, with the gradient.
            ref_logprobs: the reference's, finite.
            ratio: exp(lp - old lp) with the gradient, which the gradient `ratio` needs.
        """
        difference = logprobs - ref_logprobs
        if self.estimator == "k1":
            term = difference
        elif self.estimator == "k2":
            term = difference.square() / 2
        else:
            exponent = (-difference).clamp(max=_LARGEST_EXPONENT)
            term = torch.expm1(exponent) - exponent
        if self.gradient == "unbiased":
            term = term * (logprobs - logprobs.detach()).exp()
        elif self.gradient == "ratio":
            assert ratio is not None
            term = term * ratio
        return self.coefficient * term
