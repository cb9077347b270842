"""The unit of a critic: running moments against numpy, the loss in it, and critics that end where others do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.jagged import pad_rows, to_jagged
from hf_algorithms.losses import ValueLoss
from hf_algorithms.recipes import RECIPES
from hf_algorithms.value_scale import ValueScale, add_returns, measure_returns
from hf_engine import SamplingParams
from hf_protocols import ConfigError, merge_metrics
from tabular_roles import TableCritic, TablePolicy, TableReward, TableRun, Trained

NAN = float("nan")


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_running_moments_are_those_of_all_weighted_tokens(offset: float) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(offset, 2.0, (5, 4)), rng.random((5, 4)) < 0.5) for _ in range(30)]
    moments: dict[str, float] | None = None
    for returns, mask in batches:
        spoiled = torch.from_numpy(np.where(mask, returns, NAN))
        moments = json.loads(json.dumps(add_returns(moments, measure_returns(spoiled, torch.from_numpy(mask)))))
    tokens = np.concatenate([returns[mask] for returns, mask in batches])
    weights = np.concatenate([np.full(mask.sum(), 0.99 ** (29 - place)) for place, (_, mask) in enumerate(batches)])
    mean = np.average(tokens - offset, weights=weights) + offset
    std = np.sqrt(np.average((tokens - mean) ** 2, weights=weights))
    scale = ValueScale.of(moments)
    assert scale.mean == pytest.approx(mean, rel=1e-12)
    assert scale.std == pytest.approx(std, rel=1e-6)


def test_without_returns_the_scale_stays() -> None:
    empty = measure_returns(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert ValueScale.of(None) == ValueScale.of(add_returns(None, empty)) == ValueScale()
    one = measure_returns(torch.tensor([[3.0]]), torch.tensor([[True]]))
    assert add_returns(add_returns(None, one), empty) == one
    assert ValueScale.of(one) == ValueScale(mean=3.0, std=1e-4)


def test_restore_is_the_inverse_and_takes_jagged_rows() -> None:
    scale = ValueScale(mean=3.0, std=0.5)
    values = torch.tensor([1.0, -2.0, 7.0], dtype=torch.float64)
    np.testing.assert_allclose(scale.restore(scale.normalize(values)), values)
    rows = scale.restore(to_jagged([values, values[:1]]))
    np.testing.assert_allclose(pad_rows(rows)[0], 3.0 + 0.5 * values)


@pytest.mark.parametrize(("mean", "std"), [(NAN, 1.0), (float("inf"), 1.0), (0.0, 0.0), (0.0, NAN)])
def test_a_scale_that_cannot_be_is_refused(mean: float, std: float) -> None:
    with pytest.raises(ConfigError, match="of returns="):
        ValueScale(mean=mean, std=std)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_loss_has_the_critics_unit_and_metrics_that_of_rewards(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    mask = rng.random((6, 5)) < 0.7
    mask[:, 0] = True
    scale, old_scale = ValueScale(mean=5.0, std=4.0), ValueScale(mean=3.0, std=2.0)
    outputs, returns = rng.normal(size=(6, 5)), rng.normal(5.0, 4.0, (6, 5))
    old_outputs = outputs + rng.normal(0.0, 0.5, (6, 5))
    columns = {
        "response_mask": torch.tensor(mask),
        "returns": torch.tensor(np.where(mask, returns, NAN)),
        "values": torch.tensor(np.where(mask, 3.0 + 2.0 * old_outputs, NAN)),
    }
    loss = ValueLoss(clip=clip, scale=scale, old_scale=old_scale)
    given = torch.tensor(outputs).requires_grad_()
    total, metrics = loss({"values": given}, columns)
    (gradient,) = torch.autograd.grad(total, given)
    targets = (returns - 5.0) / 4.0
    squares, slopes = (outputs - targets) ** 2, outputs - targets
    if clip is not None:
        clipped = np.clip(outputs, old_outputs - clip, old_outputs + clip)
        cut = (clipped - targets) ** 2 > squares
        squares = np.maximum(squares, (clipped - targets) ** 2)
        slopes = np.where(cut, np.where(clipped == outputs, slopes, 0.0), slopes)
    assert float(total.detach()) == pytest.approx(0.5 * squares[mask].sum(), rel=1e-12)
    np.testing.assert_allclose(gradient, np.where(mask, slopes, 0.0), atol=1e-12)
    error = returns - (5.0 + 4.0 * outputs)
    assert metrics["squared_error"][0] == pytest.approx((error[mask] ** 2).sum(), rel=1e-12)
    assert metrics["returns_mean"][0] == pytest.approx(returns[mask].sum(), rel=1e-12)
    parts = [loss({"values": given[rows]}, {name: column[rows] for name, column in columns.items()})
             for rows in ([0, 3], [1], [2, 4, 5])]  # fmt: skip
    assert sum(float(part.detach()) for part, _ in parts) == pytest.approx(float(total.detach()), rel=1e-12)
    merged = merge_metrics([part for _, part in parts])
    for name, pair in metrics.items():
        np.testing.assert_allclose(merged[name], pair, rtol=1e-9)


CUT, GOES_ON, DISCOUNT = 3, 0.75, 0.9


def train_chain(
    name: str, unit: float, shift: float, iterations: int, cost_of_cut: float = 0.0, **keys: Any
) -> Trained:
    """Ends with probability 1/4 at every token, for a reward; after three tokens it is cut, for nothing but `shift`."""
    table = [[unit + shift, shift]]
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [np.log([1 - GOES_ON, GOES_ON]).tolist()], "ends": True}),
        "critic": (TableCritic, {"num_positions": CUT, "learning_rate": 1.0}),
        "reward": (TableReward, {"table": table}),
    }
    if name == "safe_rlhf":
        workers["cost_critic"] = workers["critic"]
        workers["cost"] = (TableReward, {"table": [[-2 * unit, cost_of_cut]]})
    algorithm = {"kl_coefficient": 0.0, "gamma": DISCOUNT, "gae_lambda": 1.0, "critic_warmup": 1000, **keys}
    return TableRun(
        recipe=RECIPES[name],
        algorithm=algorithm,
        workers=workers,
        iterations=iterations,
        samples=4**CUT,  # hits every probability exactly
        sampling=SamplingParams(max_new_tokens=CUT),
    ).train()


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("unit", "shift"), [(1.0, 0.0), (100.0, -40.0)])
def test_a_normalised_critic_has_the_same_values(unit: float, shift: float, epochs: int) -> None:
    """The fixed point of the chain in closed form, in any unit of the reward."""
    decay = DISCOUNT * GOES_ON
    ends = np.array([(1 - GOES_ON) * (1 - decay**left) / (1 - decay) for left in range(CUT, 0, -1)])
    pays = np.array([DISCOUNT ** (left - 1) * GOES_ON**left for left in range(CUT, 0, -1)])
    wanted = (unit + shift) * ends + shift * pays
    trained = train_chain("ppo", unit, shift, 4, normalize_values=True, value_clip=None, epochs=epochs)
    scale = ValueScale.of(trained.state["critic.returns"])
    assert trained.values is not None
    np.testing.assert_allclose(scale.mean + scale.std * trained.values[0], wanted, atol=1e-3 * unit)
    # the output itself is of size 1: deviations of the states from the mean return
    assert np.abs(trained.values).max() < 3.0
    assert trained.metrics[-1]["critic/value_loss"] < 0.6


def test_every_critic_has_a_unit_of_its_own() -> None:
    trained = train_chain("safe_rlhf", 10.0, 0.0, 2, normalize_values=True, value_clip=None)
    of_rewards, of_costs = (trained.state[f"{role}.returns"] for role in ("critic", "cost_critic"))
    assert of_costs["mean"] == pytest.approx(-2 * of_rewards["mean"], rel=1e-9)
    assert of_costs["squares"] == pytest.approx(4 * of_rewards["squares"], rel=1e-9)


def test_no_critic_takes_the_unit_of_rows_that_lack_a_score() -> None:
    """Responses that were cut have a reward and no cost: both critics would learn their own values there."""
    trained = train_chain("safe_rlhf", 10.0, 0.0, 1, float("nan"), normalize_values=True, value_clip=None)
    ended = [round(4**CUT * GOES_ON ** (tokens - 1) * (1 - GOES_ON)) for tokens in range(1, CUT + 1)]
    num_tokens = sum(number * tokens for tokens, number in enumerate(ended, 1))
    returns = sum(10.0 * DISCOUNT**left * sum(ended[left:]) for left in range(CUT))
    for role, factor in (("critic", 1.0), ("cost_critic", -2.0)):
        moments = trained.state[f"{role}.returns"]
        assert moments["count"] == num_tokens
        assert moments["mean"] == pytest.approx(factor * returns / num_tokens, rel=1e-6)
