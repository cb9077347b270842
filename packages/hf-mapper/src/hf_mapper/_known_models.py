"""Shapes of models that measured tables name without sizes: a preset, or sizes as published."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace

from hf_protocols import ConfigError, ModelShape

__all__ = ["build_gpt", "find_model", "guess_model"]

_GPT_VOCABULARY = 51200
_LONG = 2**20
_MOST_PARAMETERS = 1e15
_WIDTH_STEP = 16
"""The width of an MLP is a multiple of this number, so that tensor parallelism divides it as evenly as the heads."""

_PUBLISHED_GPTS = {
    0.125e9: (12, 64), 0.35e9: (24, 64), 0.76e9: (24, 96), 1.3e9: (24, 128), 2.7e9: (32, 80), 6.7e9: (32, 128),
    13e9: (40, 128), 30e9: (48, 128), 66e9: (64, 128), 175e9: (96, 128), 1008e9: (128, 160),
}  # fmt: skip
"""Layers and a head's size by parameters: GPT-3 (Brown et al., Table 2.1), OPT's 30B and 66B, and Megatron's 1T."""

_PRESETS = (
    (r"llama-?2-7b", "llama-2-7b"),
    (r"llama-?2-13b", "llama-2-13b"),
    (r"llama-?2-70b", "llama-2-70b"),
    (r"codellama-34b|llama-?2-34b", "codellama-34b"),
    (r"llama-?3(\.1)?-8b", "llama-3-8b"),
    (r"llama-?3(\.[13])?-70b", "llama-3-70b"),
    (r"llama-?3(\.1)?-405b", "llama-3-405b"),
    (r"mixtral-8x7b", "mixtral-8x7b"),
)
"""Names that are spelled in several ways; those of other presets are tried as they are."""

# Layers, hidden, MLP width (of a gated MLP with as many weights where the model's is not gated), heads, KV heads,
# vocabulary, and positions where runs exceed them.
_SIZES = (
    (r"megatron-22b", (48, 6144, 16384, 64, 64, 51200)),
    (r"gpt3-175b", (96, 12288, 32768, 96, 96, 51200)),
    (r"turing-530b", (105, 20480, 54613, 128, 128, 51200)),
    (r"megatron-1t", (128, 25600, 68267, 160, 160, 51200)),
    (r"bloom-176b", (70, 14336, 38229, 112, 112, 250880)),
    (r"bloom-7b1", (30, 4096, 10923, 32, 32, 250880, 2048)),
    (r"internlm-20b", (60, 5120, 13824, 40, 40, 103168)),
    (r"^llama-7b", (32, 4096, 11008, 32, 32, 32000, 2048)),
    (r"mistral-7b", (32, 4096, 14336, 32, 8, 32000)),
    (r"decilm-7b", (32, 4096, 14336, 32, 2, 32000)),
    (r"aquila-7b", (32, 4096, 11008, 32, 32, 100008, 2048)),
    (r"qwen1\.5-7b", (32, 4096, 11008, 32, 32, 151936)),
    (r"opt-6\.7b", (32, 4096, 10923, 32, 32, 50272, 2048)),
    (r"gpt-j-6b", (28, 4096, 10923, 16, 16, 50400, 2048)),
)


def find_model(name: str) -> ModelShape | None:
    """The model that a table calls `name`, None where the name is unknown."""
    plain = re.sub(r"[\s_]+", "-", name.rsplit("/", 1)[-1].lower()).removeprefix("meta-")
    plain = re.sub(r"^qwen-(?=\d)", "qwen", plain)
    for pattern, preset in _PRESETS:
        if re.search(pattern, plain):
            return replace(ModelShape.preset(preset), max_positions=_LONG)
    for pattern, (layers, hidden, width, heads, kv_heads, vocabulary, *positions) in _SIZES:
        if re.search(pattern, plain):
            return ModelShape(
                name=name, num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads,
                num_kv_heads=kv_heads, head_dim=hidden // heads, vocab_size=vocabulary,
                max_positions=positions[0] if positions else _LONG,
            )  # fmt: skip
    return _find_preset(plain)


def _find_preset(name: str) -> ModelShape | None:
    """The preset that `name` begins with, before words such as "instruct"; of several the longest."""
    words = name.split("-")
    for end in range(len(words), 0, -1):
        with suppress(ConfigError):
            return replace(ModelShape.preset("-".join(words[:end])), max_positions=_LONG)
    return None


def build_gpt(
    name: str, *, num_layers: int, hidden_size: int, num_heads: int, vocab_size: int | None = None
) -> ModelShape:
    """A GPT: its 4 h MLP as the gated one with as many weights and FLOPs, 8 h / 3 wide; 51,200 tokens by default."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_round_width(8 * hidden_size / 3),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=vocab_size or _GPT_VOCABULARY,
        max_positions=_LONG,
    )


def guess_model(name: str, parameters: float) -> ModelShape:
    """A plausible GPT of so many parameters, with layers and heads like those of the nearest published one, tied ends.

    The number of heads is rounded so that tensor groups divide it. The MLP, 8 h / 3 wide at first, takes up the
    parameters that this rounding leaves over.

    Raises:
        ConfigError: for a number that no model has.
    """
    if not 0 < parameters < _MOST_PARAMETERS:
        raise ConfigError(
            f"{name}: {parameters:g} parameters are beyond any model. Choose a number below {_MOST_PARAMETERS:g}"
        )
    nearest = min(_PUBLISHED_GPTS, key=lambda size: abs(math.log(parameters / size)))
    layers, head_dim = _PUBLISHED_GPTS[nearest]
    # The root of 12 l h^2 + v h = parameters.
    hidden = (math.sqrt(_GPT_VOCABULARY**2 + 48 * layers * parameters) - _GPT_VOCABULARY) / (24 * layers)
    heads = _round_heads(hidden / head_dim)
    model = build_gpt(name, num_layers=layers, hidden_size=heads * head_dim, num_heads=heads)
    others = (_GPT_VOCABULARY + 4 * layers * model.hidden_size) * model.hidden_size
    width = _round_width((parameters - others) / (3 * layers * model.hidden_size))
    return replace(model, intermediate_size=width, tie_embeddings=True)


def _round_width(width: float) -> int:
    return _WIDTH_STEP * max(1, round(width / _WIDTH_STEP))


def _round_heads(heads: float) -> int:
    """To eights, below 24 to fours, below 6 to any number."""
    step = 8 if heads >= 24 else 4 if heads >= 6 else 1
    return step * max(1, round(heads / step))
