"""AdamW over sharded parameters: global gradient norm, clipping, learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from hf_engine.backends.base import TrainConfig
from hf_engine.training.learning_rate import LearningRate

__all__ = ["ShardedAdamW", "local_shard"]


class ShardedAdamW:
    """torch's AdamW on the parameters' shards, with the schedule and the clipping of a `TrainConfig`.

    AdamW gets this rank's shards as plain tensors, which share the parameters' storages: on DTensors every step would
    dispatch in Python for each tensor that it reads, which costs a small model more than the arithmetic.

    Args:
        parameters: parameters, DTensors where they are sharded over ranks; frozen ones are left out.
        config: hyper-parameters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], config: TrainConfig) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._shards = {parameter: local_shard(parameter) for parameter in self._parameters}
        self._config = config
        self.learning_rate = LearningRate(config)
        self.steps = 0
        """Steps taken."""
        self.adamw = torch.optim.AdamW(
            self._shards.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for shard in self._shards.values():
            # torch creates moments in its first step; here they can be saved and loaded before.
            moments = {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[shard] = {"step": torch.zeros((), dtype=torch.float32, device=shard.device), **moments}

    @property
    def next_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.learning_rate.at(self.steps)

    def squared_grad_norm(self) -> float:
        """Sum of squares of this rank's gradient shards; the sum over ranks is the squared global norm."""
        norms = torch._foreach_norm(self.gradients())
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Clips by the global norm and steps."""
        if grad_norm > self._config.max_grad_norm:
            torch._foreach_mul_(self.gradients(), self._config.max_grad_norm / (grad_norm + 1e-6))
        for group in self.adamw.param_groups:
            group["lr"] = self.next_learning_rate
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else local_shard(parameter.grad)
        self.adamw.step()
        self.steps += 1

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None

    def continue_from(self, steps: int) -> None:
        """Counts on from a number of steps."""
        self.steps = steps
        for shard in self._shards.values():
            self.adamw.state[shard]["step"].fill_(float(steps))

    def moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """This rank's shard of a parameter's `exp_avg` or `exp_avg_sq`; the live one."""
        moment: torch.Tensor = self.adamw.state[self._shards[parameter]][name]
        return moment

    def moments(self) -> Iterator[torch.Tensor]:
        """This rank's shards of both moments of every parameter; the live ones."""
        for parameter in self._parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                yield self.moment(parameter, name)

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the gradients; the live ones."""
        return [local_shard(parameter.grad) for parameter in self._parameters if parameter.grad is not None]


@torch.no_grad()
def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without its history; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
