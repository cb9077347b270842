"""A supervised term in the optimizer step of another loss: rows of both in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_algorithms.jagged import to_jagged
from hf_algorithms.losses import SupervisedLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict

    from hf_algorithms.losses import Loss

__all__ = ["join_pretraining"]

_IS_PRETRAINING = "is_pretraining"


@dataclass(frozen=True)
class _JoinedLoss:
    """`loss` on the rows that are not for pretraining, plus `weight` times the supervised loss of those that are."""

    loss: Loss
    weight: float

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        is_learned = micro_batch[_IS_PRETRAINING]
        given, computed = (
            {str(name): each[name] for name in each.keys() if name != _IS_PRETRAINING}  # noqa: SIM118 - a TensorDict
            for each in (micro_batch, outputs)
        )
        loss, metrics = self.loss(_rows(computed, ~is_learned), _rows(given, ~is_learned))
        supervised, _ = SupervisedLoss()(_rows(computed, is_learned), _rows(given, is_learned))
        tokens = float(given["response_mask"][is_learned].sum())
        return loss + self.weight * supervised, metrics | {"ptx_loss": (float(supervised.detach()), tokens)}


def _rows(columns: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: column[chosen] for name, column in columns.items()}


def join_pretraining(
    batch: TensorDict, loss: Loss, pretraining: TensorDict, *, weight: float
) -> tuple[TensorDict, Loss]:
    """Returns the rows of both batches, and a loss that distinguishes them.

    Args:
        batch: rows of `loss`.
        loss: whose sum is divided by the caller's count.
        pretraining: rows to learn, with the columns of a supervised batch.
        weight: of the summed -log-prob of a pretraining token, in the unit of `loss`'s sum.
    """
    from tensordict import TensorDict

    columns = {str(name): _join(batch[name], pretraining, str(name)) for name, _ in batch.items()}
    columns[_IS_PRETRAINING] = torch.arange(len(batch) + len(pretraining)) >= len(batch)
    joined: Loss = _JoinedLoss(loss, weight)  # type: ignore[assignment] # an engine asks for nothing else
    return TensorDict(columns, batch_size=[len(batch) + len(pretraining)]), joined


def _join(column: torch.Tensor, pretraining: TensorDict, name: str) -> torch.Tensor:
    """Joins the column of both batches; zeros stand for a column that the pretraining rows lack."""
    if not column.is_nested:
        other = pretraining.get(name, None)
        if other is None:
            other = column.new_zeros(len(pretraining), *column.shape[1:])
        return torch.cat([column, other])
    if name in pretraining:
        return to_jagged([*column.unbind(), *pretraining[name].unbind()])
    shape = column.values().shape[1:]
    zeros = [torch.zeros(len(row), *shape, dtype=column.dtype) for row in pretraining["response_ids"].unbind()]
    return to_jagged([*column.unbind(), *zeros])
