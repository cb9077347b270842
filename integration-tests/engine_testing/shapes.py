"""Shapes of models that are small enough to hold many times."""

from __future__ import annotations

from dataclasses import dataclass

from hf_protocols.models import ModelShape

__all__ = ["UniformShape", "tiny_shape", "uniform_shape"]


@dataclass(frozen=True, kw_only=True)
class UniformShape(ModelShape):
    """A model of tensor-parallel matrices only, the same in every layer: the case of the paper's formulas."""

    def parameters(self) -> dict[str, tuple[int, ...]]:
        shape = (self.intermediate_size, self.hidden_size)
        return {
            f"model.layers.{layer}.mlp.{matrix}.weight": shape
            for layer in range(self.num_layers)
            for matrix in ("up_proj", "down_proj")
        }


def uniform_shape(num_layers: int = 16, size: int = 64) -> UniformShape:
    """Two square matrices of `size` rows in every layer."""
    return UniformShape(
        name="uniform",
        num_layers=num_layers,
        hidden_size=size,
        intermediate_size=size,
        num_heads=size,
        num_kv_heads=size,
        head_dim=1,
        vocab_size=1,
    )


def tiny_shape(**sizes: int | bool | str) -> ModelShape:
    """A Llama of two layers with two key-value heads, whose vocabulary is not a multiple of the padding."""
    tiny = {
        "num_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 70,
    }
    return ModelShape(**{"name": "tiny", **tiny, **sizes})  # type: ignore[arg-type]
