"""Learning rates by torch's own schedulers, and a state's files read by safetensors alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from hf_engine.backends.base import TrainConfig

__all__ = ["read_whole_state", "schedule_rates"]


def read_whole_state(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Whole weights and moments, by kind and by Hugging Face name, put together by the boxes that `state.json` names.

    Raises:
        AssertionError: if an element is stored twice or not at all, or a file holds what no box names.
    """
    described = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    whole = {
        kind: {name: torch.full(shape, torch.nan) for name, shape in described["parameters"].items()}
        for kind in described["kinds"]
    }
    for kind, tensors in whole.items():
        for rank, stored in enumerate(described["ranks"]):
            path = directory / f"{kind}-{rank:05d}.safetensors"
            found = load_file(path) if stored["boxes"] else {}
            for name, boxes in stored["boxes"].items():
                for offset, shape in boxes:
                    key = name if len(boxes) == 1 else f"{name}@{','.join(map(str, offset))}"
                    place = tensors[name][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
                    assert place.isnan().all(), f"{kind} of {name} are stored twice"
                    place.copy_(found.pop(key))
            assert not found, f"{path} holds {sorted(found)}, which state.json does not name"
        lacking = [name for name, tensor in tensors.items() if tensor.isnan().any()]
        assert not lacking, f"{kind} of {lacking} are not stored"
    return whole


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
