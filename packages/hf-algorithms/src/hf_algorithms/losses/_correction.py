"""Weights for samples that another engine, or an older policy, drew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hf_algorithms.kl import estimate_kl
from hf_protocols import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["Correction", "CorrectionKind", "measure_mismatch"]

_check = Checks(ConfigError)

CorrectionKind = Literal["tis", "icepop", "sequence_mask"]

_LARGEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights token losses by w = exp(old_logprobs - rollout_logprobs), without gradient.

    The exponent is clamped at -20 and 20.

    - `tis`: w clamped to low ... high (truncated importance sampling, Ionides 2008; Yao et al. 2025). Usual: 0 ... 2.
    - `icepop`: w where low <= w <= high, else 0 (IcePop, Ling team 2025). Usual: 0.5 ... 5.
    - `sequence_mask`: 0 on every token of a row whose statistic is outside low ... high, else see `statistic`.

    The denominator of the loss stays the one without weights. To divide by the kept tokens would inflate them. The
    weights apply to the surrogate, not to a KL term.

    Where old log-probs are the sampler's own, w is 1, and the surrogate's ratio holds the whole difference.

    Raises:
        ConfigError: for an unknown kind, or bounds that are not 0 <= low < high.
    """

    kind: CorrectionKind
    low: float = 0.0
    high: float = 2.0
    statistic: Literal["geometric", "product"] = "geometric"
    """Of a row, for `sequence_mask`.

    `geometric`: exp(mean log w), and kept tokens weigh their own w (OpenRLHF, NeMo). Usual: 0.999 ... 1.002.
    `product`: exp(sum log w), and kept tokens weigh that (TRL). Usual: 0 ... 3.
    """

    def __post_init__(self) -> None:
        _check.one_of("correction", self.kind, get_args(CorrectionKind))
        _check.one_of("statistic", self.statistic, ("geometric", "product"))
        _check.number("correction_low", self.low, may_be_zero=True)
        _check.number("correction_high", self.high)
        if self.low >= self.high:
            raise ConfigError(
                f"correction_low={show(self.low)}: is not below correction_high={show(self.high)}. Lower it"
            )

    @torch.no_grad()
    def weigh(self, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the weights [b, T], 0 where the mask is False.

        Args:
            old: log-probs of the policy at the start of the update, [b, T].
            rollout: the sampler's.
            mask: bool [b, T], trained tokens.
        """
        log_weight = (old - rollout).masked_fill(~mask, 0.0)
        weight = _exp(log_weight)
        if self.kind == "tis":
            weight = weight.clamp(self.low, self.high)
        elif self.kind == "icepop":
            weight = weight.masked_fill((weight < self.low) | (weight > self.high), 0.0)
        else:
            total = log_weight.sum(1, keepdim=True)
            if self.statistic == "geometric":
                statistic = _exp(total / mask.sum(1, keepdim=True).clamp(min=1))
            else:
                weight = statistic = _exp(total).expand_as(weight)
            weight = weight.masked_fill((statistic < self.low) | (statistic > self.high), 0.0)
        return weight.masked_fill(~mask, 0.0)


@torch.no_grad()
def measure_mismatch(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None
) -> dict[str, tuple[float, float]]:
    """Returns metrics of the difference between sampler and trainer: (sum, count) over trained tokens, by name.

    `rollout/mismatch_k3` estimates KL(sampler || old policy) in nats. `rollout/weight_mean` and `rollout/weight_max`
    are of w before any bound. `rollout/masked` is the share of tokens whose weight a correction made 0.

    Args:
        old: log-probs of the policy at the start of the update, [b, T].
        rollout: the sampler's.
        mask: bool [b, T], trained tokens.
        weights: of a correction, [b, T].
    """
    count = float(mask.sum())
    weight = _exp((old - rollout)[mask])
    return {
        "rollout/mismatch_k3": (float(estimate_kl(rollout[mask], old[mask])["k3"].sum()), count),
        "rollout/weight_mean": (float(weight.sum()), count),
        "rollout/weight_max": (float(weight.max()), 1.0) if count else (0.0, 0.0),
        "rollout/masked": (0.0 if weights is None else float((weights[mask] == 0).sum()), count),
    }


def _exp(log_weight: torch.Tensor) -> torch.Tensor:
    return log_weight.clamp(-_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT).exp()
