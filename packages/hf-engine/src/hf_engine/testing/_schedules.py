"""Learning rates by torch's own schedulers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from hf_engine.backends.base import TrainConfig

__all__ = ["schedule_rates"]


def schedule_rates(config: TrainConfig, num_steps: int) -> list[float]:
    """The learning rates of the first steps, by torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    decay_steps = max(1, config.total_steps - config.warmup_steps)
    warmup: LRScheduler = LinearLR(
        optimizer, start_factor=1 / max(1, config.warmup_steps), total_iters=max(1, config.warmup_steps - 1)
    )
    decays: dict[str, Callable[[], LRScheduler]] = {
        "constant": lambda: ConstantLR(optimizer, factor=1.0),
        "linear": lambda: LinearLR(optimizer, start_factor=1.0, end_factor=config.floor, total_iters=decay_steps),
        "cosine": lambda: CosineAnnealingLR(optimizer, decay_steps, eta_min=config.floor * config.learning_rate),
    }
    scheduler = SequentialLR(optimizer, [warmup, decays[config.schedule]()], milestones=[config.warmup_steps])
    rates = []
    for _ in range(num_steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates
