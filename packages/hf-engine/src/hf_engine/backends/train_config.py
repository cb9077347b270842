"""Computation and optimizer settings of a training backend."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from hf_engine.backends.lora_config import LoraConfig
from hf_protocols.errors import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["AttentionFunction", "TrainConfig"]

AttentionFunction = Literal["auto", "eager", "sdpa", "flex_attention"]

_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Computation and optimizer settings of a training backend.

    Raises:
        ConfigError: for a value out of range.
    """

    learning_rate: float
    """After warm-up, before it decays."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped; infinity turns clipping off."""
    warmup_steps: int = 0
    """Step k of the first ones takes k / warmup_steps of the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down a line or half a cosine to its floor."""
    total_steps: int = 0
    """Optimizer steps, warm-up included, after which a schedule has reached its floor; needed unless it is constant."""
    floor: float = 0.0
    """Share of the learning rate at which a schedule ends and stays."""
    micro_batch_tokens: int = 8192
    """Bound on rows x padded (prompt + response) length of one forward pass.

    On a CPU `fsdp` puts several rows or packs in one pass up to 1,024 tokens for each of torch's threads: larger passes
    are not faster. With `shard="layer"` on several ranks only this bound holds, because each pass gathers every layer.
    """
    dtype: str = "float32"
    """dtype of the computation; masters and optimizer state of a trained model are float32."""
    activation_checkpointing: bool = False
    """Recompute every decoder layer in the backward pass."""
    shard: Literal["root", "layer"] = "root"
    """Gather the whole model and reduce its gradients once a step (faster), or one decoder layer at a time in every
    micro-batch (smaller peak). A trained model of at most 256 MiB stays gathered from a scoring to the update."""

    compile: bool = False
    """Compile the decoder layers with torch.compile (`fsdp`): minutes at first, and a C++ compiler is needed."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the weights as they are (`fsdp`); None: train the weights."""
    attn_implementation: AttentionFunction = "auto"
    """Function of attention, by transformers' name: `"auto"` is transformers' own choice, or `"eager"` where that would
    leave out a cap on logits. `"flex_attention"` needs a GPU; it skips what packed rows do not see. `megatron` has
    `"sdpa"` only, which is its `"auto"`."""
    shared_prompts: Literal["auto"] | bool = "auto"
    """Compute a prompt once for all responses to it in a batch: where that saves work, wherever it fits, or never.
    `"auto"` and True also put rows of different lengths in one packed row, where that is less work than padding.
    Models of which it would change more than rounding compute rows apart."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite, or above `explode_above`, is an error or is left out. Weights,
    moments and the number of steps stay as they are either way."""
    explode_above: float = inf
    """Bound on the size of the loss and on the gradient norm before clipping."""

    def __post_init__(self) -> None:
        _check.kind("lora", self.lora, LoraConfig | None, "a LoraConfig, or None")
        _check.number("learning_rate", self.learning_rate)
        _check.number("eps", self.eps)
        _check.number("weight_decay", self.weight_decay, may_be_zero=True)
        if self.max_grad_norm != inf:
            _check.number("max_grad_norm", self.max_grad_norm)
        _check.count("warmup_steps", self.warmup_steps, least=0)
        self._check_schedule()
        _check.count("micro_batch_tokens", self.micro_batch_tokens)
        _check.kind("betas", self.betas, tuple | list, "two numbers, (0.9, 0.95)")
        for beta in self.betas:
            _check.number(f"betas={self.betas}: beta", beta, may_be_zero=True)
        if [beta < 1 for beta in self.betas] != [True, True]:
            raise ConfigError(f"betas={self.betas}. Use two numbers below 1, such as (0.9, 0.95)")
        for switch in ("activation_checkpointing", "compile"):
            _check.kind(switch, getattr(self, switch), bool, "True or False")
        if self.shared_prompts != "auto":
            _check.kind("shared_prompts", self.shared_prompts, bool, "'auto', True or False")
        if self.explode_above != inf:
            _check.number("explode_above", self.explode_above)
        choices = {
            "attn_implementation": get_args(AttentionFunction),
            "dtype": ("float32", "bfloat16"),
            "shard": ("root", "layer"),
            "on_nonfinite": ("stop", "skip"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={show(getattr(self, name))}. Use {' or '.join(known)}")

    def _check_schedule(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule={show(self.schedule)}. Use constant, linear or cosine")
        _check.count("total_steps", self.total_steps, least=0)
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule={show(self.schedule)} with total_steps={self.total_steps}. Use the steps of the whole run, "
                f"above warmup_steps={self.warmup_steps}"
            )
        _check.number("floor", self.floor, may_be_zero=True)
        if self.floor > 1:
            raise ConfigError(f"floor={self.floor} must be at most 1")
