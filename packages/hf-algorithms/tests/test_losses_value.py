"""The critic's loss against loops, and explained variance as one number of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_algorithms.losses import Aggregation, ValueLoss, compute_explained_variance
from hf_protocols import ConfigError, merge_metrics


def make_batch(seed: int, offset: float = 0.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = np.random.default_rng(seed)
    mask = generator.random((5, 6)) < 0.6
    mask[0, 0], mask[3] = True, False
    values, old, returns = (np.where(mask, generator.normal(0, 1, (5, 6)) + offset, np.nan) for _ in range(3))
    batch = {"values": torch.tensor(old), "returns": torch.tensor(returns), "response_mask": torch.tensor(mask)}
    return torch.tensor(values), batch


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_follows_its_formula(clip: float | None, mode: str) -> None:
    values, batch = make_batch(1)
    loss = ValueLoss(clip=clip, aggregation=Aggregation(mode=mode))  # type: ignore[arg-type]
    found, metrics = loss({"values": values}, batch)
    wanted = 0.0
    mask = batch["response_mask"].numpy()
    for i, t in np.argwhere(mask):
        v, old, g = float(values[i, t]), float(batch["values"][i, t]), float(batch["returns"][i, t])
        squared = (v - g) ** 2
        if clip is not None:
            squared = max(squared, (min(max(v, old - clip), old + clip) - g) ** 2)
        wanted += 0.5 * squared / (mask[i].sum() if mode == "seq-mean-token-mean" else 1)
    assert float(found) == pytest.approx(wanted, rel=1e-12)
    assert metrics["value_loss"] == (float(found), loss.count(batch))
    assert ("values" in loss.reads) == (clip is not None)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_gradients_pass_gradcheck(clip: float | None) -> None:
    values, batch = make_batch(2)
    own = values.nan_to_num().requires_grad_()
    loss = ValueLoss(clip=clip)
    assert torch.autograd.gradcheck(lambda x: loss({"values": x}, batch)[0], (own,))


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[4, 1], [3], [0, 2]]])
def test_explained_variance_is_of_the_whole_batch(parts: list[list[int]], offset: float) -> None:
    values, batch = make_batch(3, offset)
    answers = []
    for rows in parts:
        micro_batch = {name: column[rows] for name, column in batch.items()}
        answers.append(ValueLoss()({"values": values[rows]}, micro_batch)[1])
    means = {name: total / count for name, (total, count) in merge_metrics(answers).items()}
    mask = batch["response_mask"]
    returns, error = batch["returns"][mask].numpy(), (batch["returns"] - values)[mask].numpy()
    assert compute_explained_variance(means) == pytest.approx(1 - error.var() / returns.var(), rel=1e-8)


def test_explained_variance_of_known_critics() -> None:
    returns = torch.tensor([[1.0, 2.0, 4.0]])
    batch = {"returns": returns, "response_mask": torch.ones(1, 3, dtype=torch.bool)}

    def explained(values: torch.Tensor, batch: dict[str, torch.Tensor]) -> float | None:
        _, metrics = ValueLoss()({"values": values}, batch)
        return compute_explained_variance({name: total / count for name, (total, count) in metrics.items()})

    assert explained(returns, batch) == 1.0
    assert explained(returns - 7, batch) == pytest.approx(1.0)  # an offset is not an error of the shape
    assert explained(torch.full((1, 3), 7 / 3), batch) == pytest.approx(0.0)
    assert explained(-returns, batch) == pytest.approx(-3.0)
    assert explained(returns, {**batch, "returns": torch.full((1, 3), 0.1)}) is None


def test_value_loss_refuses_a_clip_without_a_range() -> None:
    with pytest.raises(ConfigError, match=r"value_clip=0\.0"):
        ValueLoss(clip=0.0)
