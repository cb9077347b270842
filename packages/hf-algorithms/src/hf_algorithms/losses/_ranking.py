"""Losses of reward models and cost models, which compare the scores of two responses to one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from hf_algorithms.losses._loss import Metrics
from hf_protocols import ConfigError
from hf_protocols.validation import Checks

__all__ = ["CostRankingLoss", "RankingLoss"]

_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class RankingLoss:
    """Mean over pairs of -log sigmoid(chosen - rejected), the likelihood of Bradley and Terry (1952).

    Args:
        regularization: weight of the mean square of both scores, which keeps them near 0.

    Raises:
        ConfigError: for a negative weight.
    """

    regularization: float = 0.0

    def __post_init__(self) -> None:
        _check.number("regularization", self.regularization, may_be_zero=True)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch: one number a pair."""
        return ("row_id",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model."""
        return ("scores",)

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns the number of these pairs."""
        return float(len(columns["row_id"]))

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the sum over pairs, and means: `ranking/loss`, `.../accuracy`, `.../margin` and `.../score`.

        A pair of equal scores counts as half a right one.

        Args:
            outputs: `scores` [b, 2], chosen and rejected, with the gradient.
            micro_batch: the columns of `reads`.
        """
        scores = outputs["scores"]
        margin = scores[:, 0] - scores[:, 1]
        loss = (softplus(-margin) + self.regularization * scores.square().mean(1)).sum()
        return loss, _measure(loss, margin, scores)


@dataclass(frozen=True, kw_only=True)
class CostRankingLoss:
    """The loss of a cost model, above 0 for what is unwanted (Dai et al. 2023, eq. 7).

    For each pair -log sigmoid(rejected - chosen), where the chosen response is the safer one; on both sides
    -log sigmoid(sign score), +1 for unsafe and -1 for safe; and `regularization` times the mean square of both.

    Args:
        regularization: the authors' code has 0.001.

    Raises:
        ConfigError: for a negative weight.
    """

    regularization: float = 0.001

    def __post_init__(self) -> None:
        _check.number("regularization", self.regularization, may_be_zero=True)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch."""
        return ("signs",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model."""
        return ("scores",)

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns the number of these pairs."""
        return float(len(columns["signs"]))

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the sum over pairs, and means as `RankingLoss` does; `ranking/sign_accuracy` is over responses.

        Args:
            outputs: `scores` [b, 2] of the safer and the other response, with the gradient.
            micro_batch: `signs` [b, 2], +1 for an unsafe response and -1 for a safe one.
        """
        scores, signs = outputs["scores"], micro_batch["signs"]
        signed = signs.to(scores.dtype) * scores
        margin = scores[:, 1] - scores[:, 0]
        loss = (softplus(-margin) + softplus(-signed).sum(1) + self.regularization * scores.square().mean(1)).sum()
        right = (float((signed > 0).sum()), float(signed.numel()))
        return loss, _measure(loss, margin, scores) | {"ranking/sign_accuracy": right}


def _measure(loss: torch.Tensor, margin: torch.Tensor, scores: torch.Tensor) -> Metrics:
    pairs = float(len(margin))
    return {
        "ranking/loss": (float(loss.detach()), pairs),
        "ranking/accuracy": (float((margin > 0).sum()) + float((margin == 0).sum()) / 2, pairs),
        "ranking/margin": (float(margin.detach().sum()), pairs),
        "ranking/score": (float(scores.detach().sum()), 2 * pairs),
    }
