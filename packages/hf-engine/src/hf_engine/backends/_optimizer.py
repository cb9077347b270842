"""AdamW over sharded parameters: global gradient norm, clipping, learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from hf_engine.backends._base import TrainConfig
from hf_engine.backends._learning_rate import LearningRate

__all__ = ["ShardedAdamW"]


class ShardedAdamW:
    """torch's AdamW on the parameters' shards, with the schedule and the clipping of a `TrainConfig`.

    Args:
        parameters: DTensor parameters, sharded over the data-parallel ranks; frozen ones are left out.
        config: hyper-parameters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], config: TrainConfig) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config = config
        self.learning_rate = LearningRate(config)
        self.steps = 0
        """Steps taken."""
        self.adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self._parameters:
            # torch creates moments in its first step; here they can be saved and loaded before.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

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
        self.adamw.step()
        self.steps += 1

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def continue_from(self, steps: int) -> None:
        """Counts on from a number of steps."""
        self.steps = steps
        for parameter in self._parameters:
            self.adamw.state[parameter]["step"].fill_(float(steps))

    def moments(self) -> Iterator[torch.Tensor]:
        """This rank's shards of both moments of every parameter; the live ones."""
        for parameter in self._parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = self.adamw.state[parameter][name]
                yield moment.to_local() if isinstance(moment, DTensor) else moment

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the gradients; the live ones."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
