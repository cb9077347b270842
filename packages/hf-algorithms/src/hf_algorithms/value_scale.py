"""The unit of a critic: running mean and deviation of the returns that it learns. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_protocols import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["ValueScale", "add_returns", "measure_returns"]

_check = Checks(ConfigError)

_DECAY = 0.99
"""Weight of earlier batches once another one is added: about a hundred of them count."""
_LEAST_STD = 1e-4
"""Returns that hardly vary would make every error of the critic large."""


@dataclass(frozen=True, kw_only=True)
class ValueScale:
    """The affine map between a critic's output v and the value in the unit of rewards, `mean + std * v`.

    Raises:
        ConfigError: for a mean that is not finite, or a std of at most 0.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check.number("std of returns", self.std)
        if not math.isfinite(self.mean):
            raise ConfigError(f"mean of returns={show(self.mean)} is not a finite number. Look at the rewards")

    def restore(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns values in the unit of rewards, of any shape, also jagged; the scale (0, 1) changes no bit."""
        return outputs if (self.mean, self.std) == (0.0, 1.0) else outputs * self.std + self.mean

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """Returns what a critic's output must be for these values; the inverse of `restore`."""
        return values if (self.mean, self.std) == (0.0, 1.0) else (values - self.mean) / self.std

    @classmethod
    def of(cls, moments: Mapping[str, float] | None) -> ValueScale:
        """Returns the scale of `add_returns`' moments; (0, 1) before there are any."""
        if not moments or not moments["count"]:
            return cls()
        return cls(mean=moments["mean"], std=max(math.sqrt(moments["squares"] / moments["count"]), _LEAST_STD))


def measure_returns(returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Returns the moments of one whole batch's returns over trained tokens, in float64.

    Args:
        returns: [B, T].
        mask: [B, T], True on trained tokens.

    Returns:
        `count`, `mean`, and `squares`, the sum of squared distances from the mean; zeros without a trained token.
    """
    chosen = returns[mask.bool()].double()
    if not len(chosen):
        return {"count": 0.0, "mean": 0.0, "squares": 0.0}
    mean = chosen.mean()
    return {"count": float(len(chosen)), "mean": float(mean), "squares": float((chosen - mean).square().sum())}


def add_returns(moments: Mapping[str, float] | None, batch: Mapping[str, float]) -> dict[str, float]:
    """Returns running moments with those of one more batch; earlier tokens count 0.99 times what they did.

    So mean and deviation are those of all returns so far, each weighed by 0.99 to the number of batches after it.
    Moments are joined as by Chan et al. (1979), which keeps the digits of returns far from 0. A batch without trained
    tokens changes nothing.

    Args:
        moments: of an earlier call; None for the first.
        batch: of `measure_returns`.
    """
    if not batch["count"]:
        return dict(moments) if moments else {"count": 0.0, "mean": 0.0, "squares": 0.0}
    if not moments or not moments["count"]:
        return dict(batch)
    kept = _DECAY * moments["count"]
    count = kept + batch["count"]
    apart = batch["mean"] - moments["mean"]
    return {
        "count": count,
        "mean": moments["mean"] + apart * batch["count"] / count,
        "squares": _DECAY * moments["squares"] + batch["squares"] + apart**2 * kept * batch["count"] / count,
    }
