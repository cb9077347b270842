"""The critic's loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_algorithms.losses._aggregation import Aggregation
from hf_algorithms.losses._loss import Metrics
from hf_algorithms.value_scale import ValueScale
from hf_protocols import ConfigError
from hf_protocols.validation import Checks

__all__ = ["VALUE_MOMENTS", "ValueLoss", "compute_explained_variance"]

_check = Checks(ConfigError)

VALUE_MOMENTS = ("returns_mean", "returns_square", "error_mean", "squared_error")
"""Metrics of `ValueLoss` that `compute_explained_variance` reads."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Aggregates 0.5 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2), with G the returns.

    The clipped form is that of the first release of PPO's code. Without `clip` it is 0.5 (V - G)^2.

    With a `scale` the whole loss is in the critic's own unit: V is the model's output v, G becomes (G - mean) / std,
    and V_old is the model's earlier output, by the scale of that time. All metrics except the loss are in the unit of
    rewards.

    Raises:
        ConfigError: for a clip of at most 0.
    """

    clip: float | None = None
    aggregation: Aggregation = field(default_factory=Aggregation)
    scale: ValueScale = field(default_factory=ValueScale)
    """Between the model's output and values in the unit of rewards."""
    old_scale: ValueScale = field(default_factory=ValueScale)
    """The scale by which the batch's `values` were computed."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            _check.number("value_clip", self.clip)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch."""
        return (*self.aggregation.reads, "returns", *(("values",) if self.clip is not None else ()))

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns these rows' share of the denominator; see `Aggregation.count`."""
        return self.aggregation.count(columns)

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the weighted sum of the token losses and metrics; the worker puts the role's name before theirs.

        `value_loss` is aggregated. `VALUE_MOMENTS` are of G and G - V over trained tokens, of the values before the
        step. `compute_explained_variance` needs all four, reduced over micro-batches and ranks.

        Args:
            outputs: `values` [b, T], the model's output, with the gradient.
            micro_batch: the columns of `reads`, padded.
        """
        mask = self.aggregation.select(micro_batch)
        # Before anything is computed: the gradient of a masked NaN would be NaN.
        values = outputs["values"].masked_fill(~mask, 0.0)
        returns = micro_batch["returns"].masked_fill(~mask, 0.0)
        targets = self.scale.normalize(returns)
        squared = (values - targets) ** 2
        if self.clip is not None:
            old = self.old_scale.normalize(micro_batch["values"]).masked_fill(~mask, 0.0)
            clipped = torch.clamp(values, old - self.clip, old + self.clip)
            squared = torch.maximum(squared, (clipped - targets) ** 2)
        loss = (self.aggregation.weigh(mask, micro_batch).to(squared.dtype) * 0.5 * squared).sum()
        with torch.no_grad():
            count = float(mask.sum())
            wanted = returns[mask].double()
            error = wanted - self.scale.restore(values[mask].double())
            metrics = {
                "value_loss": (float(loss), self.aggregation.count(micro_batch)),
                "returns_mean": (float(wanted.sum()), count),
                "returns_square": (float(wanted.square().sum()), count),
                "error_mean": (float(error.sum()), count),
                "squared_error": (float(error.square().sum()), count),
            }
        return loss, metrics


def compute_explained_variance(metrics: Mapping[str, float]) -> float | None:
    """Returns the explained variance, 1 - Var(G - V) / Var(G) over all trained tokens.

    A ratio of variances is not a mean over micro-batches, ranks or updates. It is formed once, from the means of the
    moments that `ValueLoss` reports: Var(x) = mean(x^2) - mean(x)^2.

    Args:
        metrics: has the four moments, each divided by its count.

    Returns:
        1 for a perfect critic, 0 for one as good as the mean, below 0 for a worse one; None where returns do not vary.
    """
    returns_square, squared_error = metrics["returns_square"], metrics["squared_error"]
    variance = returns_square - metrics["returns_mean"] ** 2
    # The difference of two equal float64 numbers leaves rounding errors of this size.
    if not math.isfinite(variance) or variance <= 1e-12 * returns_square:
        return None
    return 1 - (squared_error - metrics["error_mean"] ** 2) / variance
