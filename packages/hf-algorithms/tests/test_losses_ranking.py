"""Losses of reward and cost models against plain loops, and against how the rows are cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_algorithms.losses import CostRankingLoss, RankingLoss
from hf_protocols import ConfigError

SCORES = [[1.5, -0.5], [0.2, 0.9], [-3.0, -3.0], [8.0, -2.0]]
SIGNS = [[-1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def loop_over_pairs(loss: RankingLoss | CostRankingLoss, scores: np.ndarray) -> float:
    """The sum over pairs, one number after the other."""
    total = 0.0
    for (first, second), (sign, other) in zip(scores.tolist(), SIGNS, strict=True):
        total += loss.regularization * (first**2 + second**2) / 2
        if isinstance(loss, CostRankingLoss):
            total -= log_sigmoid(second - first) + log_sigmoid(sign * first) + log_sigmoid(other * second)
        else:
            total -= log_sigmoid(first - second)
    return total


def columns(rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    return {"row_id": torch.arange(4)[rows], "signs": torch.tensor(SIGNS)[rows]}


LOSSES = {
    "pairs": RankingLoss(),
    "pairs near 0": RankingLoss(regularization=0.1),
    "costs": CostRankingLoss(),
    "costs near 0": CostRankingLoss(regularization=0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_a_plain_loop(name: str) -> None:
    loss, scores = LOSSES[name], torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    total, metrics = loss({"scores": scores}, columns())
    total.backward()
    assert total.item() == pytest.approx(loop_over_pairs(loss, np.array(SCORES)), rel=1e-12)
    assert metrics["ranking/loss"] == (pytest.approx(total.item()), 4.0)
    assert scores.grad is not None
    for place in np.ndindex(4, 2):
        step = np.zeros((4, 2))
        step[place] = 1e-6
        slope = (loop_over_pairs(loss, SCORES + step) - loop_over_pairs(loss, SCORES - step)) / 2e-6
        assert scores.grad[place].item() == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    loss, scores = LOSSES[name], torch.tensor(SCORES)
    whole, metrics = loss({"scores": scores}, columns())
    parts = [loss({"scores": scores[rows]}, columns(rows)) for rows in (slice(1), slice(1, 4))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    for metric, pair in metrics.items():
        added = np.sum([found[metric] for _, found in parts], axis=0)
        assert tuple(added) == pytest.approx(pair)
    assert loss.count(columns()) == 4.0


def test_a_tie_is_half_right() -> None:
    """Of the four pairs two are in the right order and one is a tie."""
    _, metrics = RankingLoss()({"scores": torch.tensor(SCORES)}, columns())
    assert metrics["ranking/accuracy"] == (2.5, 4.0)
    _, metrics = CostRankingLoss()({"scores": torch.tensor(SCORES)}, columns())
    assert metrics["ranking/accuracy"] == (1.5, 4.0)
    assert metrics["ranking/sign_accuracy"] == (2.0, 8.0)


def test_a_negative_regularization_is_refused() -> None:
    with pytest.raises(ConfigError, match="regularization=-1"):
        RankingLoss(regularization=-1)
