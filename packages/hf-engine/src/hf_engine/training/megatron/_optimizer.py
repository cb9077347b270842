"""megatron-core's DistributedOptimizer: AdamW whose float32 masters and moments are sharded over data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_engine.backends.base import TrainConfig
from hf_engine.training.learning_rate import LearningRate
from hf_engine.training.megatron._core import OptimizerConfig, get_megatron_optimizer, quiet
from hf_engine.training.megatron._gather import WeightGather

__all__ = ["DistributedAdamW", "OptimizerShard"]


@dataclass(frozen=True)
class OptimizerShard:
    """Part of one parameter that this rank's optimizer keeps: elements start to stop of the flat tensor."""

    start: int
    stop: int
    tensors: Mapping[str, torch.Tensor]
    """Flat float32 tensors `master`, `exp_avg` and `exp_avg_sq`, the live ones."""


class DistributedAdamW:
    """AdamW with the schedule and the clipping of a `TrainConfig`.

    Args:
        model: a stage wrapped in megatron-core's DistributedDataParallel; its parameters get storages of their own.
        config: hyper-parameters.
        dtype: of the model's parameters.
    """

    def __init__(self, model: Any, config: TrainConfig, dtype: torch.dtype) -> None:
        self._config = config
        self.learning_rate = LearningRate(config)
        self.steps = 0
        """Steps taken."""
        self._model = model
        self._gather = WeightGather(model)
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        # Without overrides every parameter decays, biases and norms included, as in torch's AdamW.
        self._optimizer = get_megatron_optimizer(options, [model], config_overrides={}, use_gloo_process_groups=False)
        for inner in self._inner():
            for parameter in _parameters_of(inner):
                # torch creates moments in its first step; here they can be saved before.
                state = inner.optimizer.state[parameter]
                state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
                if isinstance(inner.optimizer, torch.optim.AdamW):
                    state["step"] = torch.zeros((), dtype=torch.float32)

    @property
    def next_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.learning_rate.at(self.steps)

    def take_gradients(self) -> float:
        """Takes the summed gradients of the model; their global norm, every element counted once. Collective."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Clips the taken gradients by the global norm, steps, and gathers the new weights. Collective."""
        clip = self._config.max_grad_norm / (grad_norm + 1e-6) if grad_norm > self._config.max_grad_norm else None
        for inner in self._inner():
            if clip is not None:
                torch._foreach_mul_([p.grad for p in _parameters_of(inner) if p.grad is not None], clip)
            for group in inner.param_groups:
                group["lr"] = self.next_learning_rate
        # Not megatron-core's own step, which writes and gathers weights in the one storage that they had.
        with quiet():
            for inner in self._inner():
                inner.optimizer.step()
        for parameter in self._model.parameters():
            if parameter.dtype != torch.float32:
                shard = self.shard(parameter)
                parameter.view(-1)[shard.start : shard.stop].copy_(shard.tensors["master"])
        self._gather.run()
        self.steps += 1

    def zero_grad(self) -> None:
        """Drops what was taken."""
        self._optimizer.zero_grad()

    def shard(self, parameter: torch.nn.Parameter) -> OptimizerShard:
        """Returns this rank's part of a parameter of the model; an empty shard where other ranks keep all of it."""
        for inner in self._inner():
            if parameter in inner.model_param_group_index_map:
                kept = inner._get_model_param_range_map(parameter)["param"]
                state = inner._get_main_param_and_optimizer_states(parameter)
                tensors = {"master": state["param"].detach(), **{n: state[n] for n in ("exp_avg", "exp_avg_sq")}}
                return OptimizerShard(kept.start, kept.end, tensors)
        empty = torch.empty(0, device=parameter.device)
        return OptimizerShard(0, 0, dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), empty))

    @torch.no_grad()
    def restart(self) -> None:
        """As built: no steps, no moments, the configured learning rate."""
        self.learning_rate.reset()
        for inner in self._inner():
            for parameter in _parameters_of(inner):
                inner.optimizer.state[parameter]["exp_avg"].zero_()
                inner.optimizer.state[parameter]["exp_avg_sq"].zero_()
        self.continue_from(0)

    @torch.no_grad()
    def continue_from(self, steps: int) -> None:
        """Counts on from a number of steps."""
        self.steps = steps
        for inner in self._inner():
            for parameter in _parameters_of(inner):
                state = inner.optimizer.state[parameter]
                if "step" in state:
                    state["step"].fill_(float(steps))
            for group in inner.param_groups:
                group["step"] = steps  # there the fused optimizers of Transformer Engine and Apex count

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Masters and moments of this rank; the masters of float32 parameters are the parameters themselves."""
        for inner in self._inner():
            for parameter in _parameters_of(inner):
                yield parameter.detach()
                yield inner.optimizer.state[parameter]["exp_avg"]
                yield inner.optimizer.state[parameter]["exp_avg_sq"]

    def _inner(self) -> list[Any]:
        return [inner for inner in self._optimizer.chained_optimizers if not inner.is_stub_optimizer]


def _parameters_of(inner: Any) -> list[torch.nn.Parameter]:
    parameters: list[torch.nn.Parameter] = inner.get_parameters()
    return parameters
