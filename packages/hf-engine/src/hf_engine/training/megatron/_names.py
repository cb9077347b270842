"""megatron-core's fused, cut parameters as views under Hugging Face names.

A tensor-parallel rank's QKV rows are `[q ... q, k, v]` for each of its KV groups or a part of one, and its first MLP
rows are `[gate, up]`. The rows of a padded vocabulary beyond the real one belong to no name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.tensor_parallel import fused_qkv_rows
from hf_protocols.models import ModelShape
from hf_protocols.topology import Coordinate, ParallelSpec

__all__ = ["EMBEDDING_NAME", "HEAD_NAME", "NamedPiece", "ParameterNames"]

HEAD_NAME = "lm_head.weight"
"""The output layer of an untied model, and a value head in its place."""

EMBEDDING_NAME = "model.embed_tokens.weight"
_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class NamedPiece:
    """A view of one tensor, and the part of a Hugging Face parameter that it is."""

    name: str
    box: Box
    view: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """Names of one rank's parameters."""

    shape: ModelShape
    train: ParallelSpec
    at: Coordinate
    first_layer: int
    """Number of the stage's first decoder layer in the whole model."""

    def pieces(self, parameter: str, tensor: torch.Tensor) -> Iterator[NamedPiece]:
        """Cuts a tensor of the shape of megatron-core's `parameter`: its values, or anything kept for each of them."""
        if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied = parameter == "embedding.word_embeddings.weight" or self.shape.tie_embeddings
            yield self._vocabulary(EMBEDDING_NAME if tied else HEAD_NAME, tensor)
        elif parameter == "decoder.final_layernorm.weight":
            yield _whole("model.norm.weight", tensor)
        elif parameter == "value_head.weight":
            yield _whole(HEAD_NAME, tensor)
        else:
            prefix, layer, rest = _split_layer(parameter)
            assert prefix == "decoder.layers.", f"unknown megatron-core parameter {parameter}"
            yield from self._layer(f"model.layers.{self.first_layer + layer}.", rest, tensor)

    def _layer(self, prefix: str, rest: str, tensor: torch.Tensor) -> Iterator[NamedPiece]:
        if rest in _REPLICATED:
            yield _whole(prefix + _REPLICATED[rest], tensor)
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._qkv(f"{prefix}self_attn.", rest.rpartition(".")[2], tensor)
        elif rest == "self_attention.linear_proj.weight":
            yield self._columns(f"{prefix}self_attn.o_proj.weight", tensor)
        elif rest == "mlp.router.weight":
            yield _whole(f"{prefix}{self._block}.gate.weight", tensor)
        elif rest.startswith("mlp.experts."):
            _, local, linear = _split_layer(rest)
            expert = self.at.ep * (self.shape.num_experts // self.train.ep_size) + local
            yield from self._mlp(f"{prefix}{self._block}.experts.{expert}.", linear, tensor)
        else:
            yield from self._mlp(f"{prefix}mlp.", rest.removeprefix("mlp."), tensor)

    @property
    def _block(self) -> str:
        return "block_sparse_moe" if self.shape.family == "mixtral" else "mlp"

    def _mlp(self, prefix: str, linear: str, tensor: torch.Tensor) -> Iterator[NamedPiece]:
        mixtral = self.shape.family == "mixtral"
        gate, upward, downward = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        if linear == "linear_fc2.weight":
            yield self._columns(f"{prefix}{downward}.weight", tensor)
            return
        assert linear == "linear_fc1.weight", f"unknown megatron-core parameter {prefix}{linear}"
        for name, part in zip((gate, upward), tensor.chunk(2), strict=True):
            yield _rows(f"{prefix}{name}.weight", self.at.tp * part.shape[0], part)

    def _qkv(self, prefix: str, kind: str, tensor: torch.Tensor) -> Iterator[NamedPiece]:
        held = fused_qkv_rows(self.shape, self.at.tp, self.train.tp_size)
        parts = torch.split(tensor, [len(rows) for _, rows in held])
        for (projection, rows), part in zip(held, parts, strict=True):
            yield _rows(f"{prefix}{projection}.{kind}", rows.start, part)

    def _vocabulary(self, name: str, tensor: torch.Tensor) -> NamedPiece:
        start = min(self.at.tp * tensor.shape[0], self.shape.vocab_size)
        return _rows(name, start, tensor[: self.shape.vocab_size - start])

    def _columns(self, name: str, tensor: torch.Tensor) -> NamedPiece:
        return NamedPiece(name, Box((0, self.at.tp * tensor.shape[1]), tuple(tensor.shape)), tensor)


def _whole(name: str, tensor: torch.Tensor) -> NamedPiece:
    return NamedPiece(name, Box.whole(tensor.shape), tensor)


def _rows(name: str, start: int, tensor: torch.Tensor) -> NamedPiece:
    return NamedPiece(name, Box((start, *(0,) * (tensor.dim() - 1)), tuple(tensor.shape)), tensor)


def _split_layer(parameter: str) -> tuple[str, int, str]:
    """Splits at the first number: "decoder.layers.3.mlp.x" is "decoder.layers.", 3, "mlp.x"."""
    parts = parameter.split(".")
    at = next(index for index, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[:at]) + ".", int(parts[at]), ".".join(parts[at + 1 :])
