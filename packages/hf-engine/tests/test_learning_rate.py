"""The learning rate of every step against torch's and transformers' schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from transformers import get_scheduler

from hf_engine import TrainConfig
from hf_engine.training.learning_rate import LearningRate
from hf_protocols import BackendError, ConfigError

NUM_STEPS = 12


def rates_of(config, num_steps=NUM_STEPS):
    rate = LearningRate(config)
    return [rate.at(step) for step in range(num_steps)]


def rates_of_scheduler(build):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    scheduler, rates = build(optimizer), []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def torch_schedule(schedule, warmup_steps, floor):
    """`warmup_steps` that grow to the whole rate, and then what is left of `NUM_STEPS`."""
    left = NUM_STEPS - warmup_steps

    def build(optimizer):
        decay = {
            "constant": lambda: ConstantLR(optimizer, factor=1.0),
            "linear": lambda: LinearLR(optimizer, start_factor=1.0, end_factor=floor, total_iters=left),
            "cosine": lambda: CosineAnnealingLR(optimizer, T_max=left, eta_min=floor * 1e-3),
        }
        if warmup_steps == 0:
            return decay[schedule]()
        warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=max(1, warmup_steps - 1))
        return SequentialLR(optimizer, [warmup, decay[schedule]()], milestones=[warmup_steps])

    return build


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 2, 5])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_every_schedule_is_torchs(schedule, warmup_steps, floor):
    config = TrainConfig(
        learning_rate=1e-3, warmup_steps=warmup_steps, schedule=schedule, total_steps=NUM_STEPS, floor=floor
    )
    expected = rates_of_scheduler(torch_schedule(schedule, warmup_steps, floor))
    assert rates_of(config) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "name", "floor"),
    [
        ("constant", "constant_with_warmup", 0.0),
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine", "cosine_with_min_lr", 0.2),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_after_warm_up_every_schedule_is_that_of_transformers(schedule, name, floor, warmup_steps):
    """In the warm-up ours is one step ahead: transformers' first step has a rate of zero and changes nothing."""
    options = {"scheduler_specific_kwargs": {"min_lr_rate": floor}} if floor else {}
    expected = rates_of_scheduler(
        lambda optimizer: get_scheduler(
            name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=NUM_STEPS, **options
        )
    )
    config = TrainConfig(
        learning_rate=1e-3, warmup_steps=warmup_steps, schedule=schedule, total_steps=NUM_STEPS, floor=floor
    )
    found = rates_of(config)
    assert found[warmup_steps:] == pytest.approx(expected[warmup_steps:], rel=1e-9)
    assert found[:warmup_steps] == pytest.approx(expected[1 : warmup_steps + 1], rel=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_its_last_step_a_schedule_stays_at_its_floor(schedule):
    config = TrainConfig(learning_rate=1e-3, warmup_steps=1, schedule=schedule, total_steps=4, floor=0.25)
    assert rates_of(config)[4:] == pytest.approx([0.25e-3] * 8)


def test_another_rate_has_the_same_schedule():
    rate = LearningRate(TrainConfig(learning_rate=1e-3, warmup_steps=2, schedule="linear", total_steps=6))
    rate.set(1e-2)
    assert [rate.at(step) for step in range(6)] == pytest.approx([5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
    for wrong in (-1.0, float("nan"), "fast"):
        with pytest.raises(BackendError, match="learning_rate="):
            rate.set(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "step"}, "schedule='step'. Use constant, linear or cosine"),
        ({"schedule": "cosine"}, "schedule='cosine' with total_steps=0. .* above warmup_steps=2"),
        ({"schedule": "linear", "total_steps": 2}, "total_steps=2. .* above warmup_steps=2"),
        ({"total_steps": -1}, "total_steps=-1"),
        ({"floor": 1.5}, "floor=1.5 must be at most 1"),
        ({"floor": -0.1}, "floor=-0.1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(learning_rate=1e-3, warmup_steps=2, **changes)


def test_a_constant_rate_has_no_schedule_until_it_is_reset():
    config = TrainConfig(learning_rate=1e-3, warmup_steps=2, schedule="linear", total_steps=6)
    rate = LearningRate(config)
    rate.set(1e-2, constant=True)
    assert [rate.at(step) for step in (0, 1, 2, 5, 50)] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 1e-2])
    rate.reset()
    scheduled = [LearningRate(config).at(step) for step in range(8)]
    assert [rate.at(step) for step in range(8)] == scheduled
    rate.set(1e-2, constant=True)
    rate.set(1e-3)
    assert [rate.at(step) for step in range(8)] == scheduled
