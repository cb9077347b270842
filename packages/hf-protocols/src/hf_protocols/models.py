"""Shapes of models: every parameter by its Hugging Face name, from a `config.json` or a preset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_protocols._presets import PRESETS
from hf_protocols.errors import ConfigError
from hf_protocols.outer_files import read_json_object
from hf_protocols.positions import compute_positions
from hf_protocols.similar_names import describe_choices
from hf_protocols.validation import Checks, show

__all__ = ["ModelShape"]

_check = Checks(ConfigError)

# What the configuration class of each family assumes where a config.json is silent.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
_WITHOUT_WINDOWS = ("llama", "gemma")
_WITH_LAYER_TYPES = ("qwen2", "qwen3")
_WITH_ATTENTION_BIAS = ("llama", "qwen3", "gemma", "qwen3_moe")
_WITH_QK_NORM = ("qwen3", "qwen3_moe")
_SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
_COUNTS = ("num_experts", "num_experts_per_token")
_LISTED = ("num_layers", "num_heads", "num_kv_heads", *_COUNTS)
_MOST_LISTED, _MOST = 10**5, 2**31 - 1
"""Limits above any known model: a plan lists layers, heads and experts one by one, and counts other sizes."""
_FLAGS = ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "keeps_scores")
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model, dense or mixture of experts.

    `num_experts` is 0 for a dense model; `intermediate_size` is one expert's width where there are experts.
    `max_positions` includes stretched rotary embeddings: see `hf_protocols.positions`.
    `keeps_scores`: transformers has no fused kernel for the model's attention, as for a cap on its logits or for sinks.
    `listed_parameters` is empty where names and shapes follow from the sizes; see `from_parameters`.

    Raises:
        ConfigError: for a size that is not a whole number or below 1, heads that do not divide evenly, more experts per
            token than the model has, a mixture with 0 experts per token, or values of other kinds.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 4096
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    family: str = "llama"
    listed_parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    keeps_scores: bool = False

    def __post_init__(self) -> None:
        _check.name("a model's name", self.name)
        for flag in _FLAGS:
            _check.kind(f"{self.name}: {flag}", getattr(self, flag), bool, "True or False")
        for size in _SIZES:
            _check.count(f"{self.name}: {size}", getattr(self, size))
        for count in _COUNTS:
            _check.count(f"{self.name}: {count}", getattr(self, count), least=0)
        for name in (*_SIZES, *_COUNTS):
            most = _MOST_LISTED if name in _LISTED else _MOST
            if getattr(self, name) > most:
                raise ConfigError(f"{self.name}: {name}={show(getattr(self, name))} must be at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"{self.name}: num_experts_per_token={self.num_experts_per_token} is above "
                f"num_experts={self.num_experts}"
            )

        if self.num_experts and not self.num_experts_per_token:
            raise ConfigError(
                f"{self.name}: num_experts={self.num_experts} with num_experts_per_token=0. Set how many of them each "
                "token chooses, at least 1"
            )

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """Returns the shape of a published model by name, such as `"llama-2-7b"`.

        Raises:
            ConfigError: for an unknown name, with the nearest known ones.
        """
        _check.kind("model preset", name, str, "a name, such as 'llama-2-7b'")
        if name not in PRESETS:
            raise ConfigError(f"model preset {show(name)} is unknown. {describe_choices(name, sorted(PRESETS))}")
        return replace(cls.from_config(PRESETS[name]), name=name)

    @classmethod
    def knows(cls, config: Mapping[str, Any]) -> bool:
        """True for a model whose parameters follow from its `config.json`; others have `from_parameters`."""
        family = config.get("model_type", "llama")
        return isinstance(family, str) and family in _FAMILIES and not _mixes_layers(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> ModelShape:
        """Reads a Hugging Face `config.json`: a mapping, the file, or the directory that holds it.

        A key that the file leaves out has the family's default.

        Raises:
            ConfigError: for a missing or unreadable file, a missing size, a value of another kind, or a model whose
                parameters are unknown.
        """
        if not isinstance(config, Mapping):
            _check.kind("config", config, str | Path, "a config.json: its path, its directory, or its keys")
            config = _read_config(Path(config))
        family = config.get("model_type", "llama")
        if not isinstance(family, str) or family not in _FAMILIES:
            raise ConfigError(f"model_type={show(family)} is not supported. Use a model of {', '.join(_FAMILIES)}")
        missing = [key for key in _REQUIRED if key not in config]
        if missing:
            raise ConfigError(f"the model's config.json lacks {', '.join(missing)}")
        for key in _REQUIRED:
            _check.count(f"config.json: {key}", config[key])
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            _check.kind(f"config.json: {key}", config.get(key), bool | None, "true or false")
        _check.kind("config.json: _name_or_path", config.get("_name_or_path"), str | None, "a name")
        if _mixes_layers(config):
            raise ConfigError("mlp_only_layers and decoder_sparse_step mix dense and expert layers: not known here")
        _refuse_unused(family, config)
        config = {**_FAMILIES[family], **config}
        heads = config["num_attention_heads"]
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        width = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
        kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
        if head_dim is None and config["hidden_size"] % heads:
            raise ConfigError(
                f"config.json: hidden_size={config['hidden_size']} does not divide by num_attention_heads={heads}. "
                "Set head_dim, or choose sizes that do"
            )
        attention_bias = family in _WITH_ATTENTION_BIAS and bool(config.get("attention_bias"))
        return cls(
            name=config.get("_name_or_path") or family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=width,
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=config["hidden_size"] // heads if head_dim is None else head_dim,
            vocab_size=config["vocab_size"],
            max_positions=compute_positions(config) or 4096,
            tie_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
            qk_norm=family in _WITH_QK_NORM,
            num_experts=experts,
            num_experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
            family=family,
        )

    @classmethod
    def from_parameters(
        cls,
        config: Mapping[str, Any],
        parameters: Mapping[str, Sequence[int]],
        *,
        embedding: str,
        head: str,
        keeps_scores: bool = False,
    ) -> ModelShape:
        """Returns the generic shape of a model of any family, built from its parameters.

        It counts experts as one dense layer, as wide as those that a token visits: enough to place a model.

        Args:
            config: keys of its `config.json`, or of its `text_config`, with the defaults of its family.
            parameters: shape of every parameter by name; a tied embedding once.
            embedding: name of the token embedding among them.
            head: name of the output layer, which is absent from `parameters` where it is the embedding.
            keeps_scores: whether transformers computes its attention without a fused kernel.

        Raises:
            ConfigError: for a configuration without a number of layers, or sizes that are not plausible.
        """
        vocab_size, hidden_size = parameters[embedding]
        family = config.get("model_type")
        return cls(
            name=family if isinstance(family, str) and family else "model",
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_positions=compute_positions(config) or 4096,
            tie_embeddings=head not in parameters,
            family=str(family),
            keeps_scores=keeps_scores,
            listed_parameters=tuple((name, tuple(shape)) for name, shape in parameters.items()),
            **_read_family_sizes(config, hidden_size),
        )

    @property
    def is_generic(self) -> bool:
        """True for a shape of `from_parameters`: layouts that shard layers by name do not support it."""
        return bool(self.listed_parameters)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameters().values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token adds over all layers, at 2 bytes an element."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its Hugging Face name, in the model's order."""
        if self.listed_parameters:
            return dict(self.listed_parameters)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in self._layer())
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for projection, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            yield from _linear(f"self_attn.{projection}", rows, hidden, bias=self.qkv_bias)
        yield from _linear("self_attn.o_proj", hidden, query, bias=self.o_bias)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield from self._mlp()
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)

    def _mlp(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, hidden = self.intermediate_size, self.hidden_size
        if not self.num_experts:
            yield from _linear("mlp.gate_proj", width, hidden, bias=self.mlp_bias)
            yield from _linear("mlp.up_proj", width, hidden, bias=self.mlp_bias)
            yield from _linear("mlp.down_proj", hidden, width, bias=self.mlp_bias)
            return
        mixtral = self.family == "mixtral"
        block = "block_sparse_moe" if mixtral else "mlp"
        gate, upward, downward = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        yield from _linear(f"{block}.gate", self.num_experts, hidden)
        for expert in range(self.num_experts):
            yield from _linear(f"{block}.experts.{expert}.{gate}", width, hidden)
            yield from _linear(f"{block}.experts.{expert}.{upward}", width, hidden)
            yield from _linear(f"{block}.experts.{expert}.{downward}", hidden, width)


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _mixes_layers(config: Mapping[str, Any]) -> bool:
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


def _refuse_unused(family: str, config: Mapping[str, Any]) -> None:
    """Keys that change the model in engines but not in transformers' training layers, so that the two would differ."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    types, rotated = config.get("layer_types"), config.get("partial_rotary_factor")
    if isinstance(rope, Mapping):
        rotated = rope.get("partial_rotary_factor", rotated)
    is_mixed = isinstance(types, list | tuple) and any(kind != "full_attention" for kind in types)
    unused = {
        "sliding_window": config.get("sliding_window") if family in _WITHOUT_WINDOWS else None,
        "layer_types": types if is_mixed and family not in _WITH_LAYER_TYPES else None,
        "attention_chunk_size": config.get("attention_chunk_size"),
        "partial_rotary_factor": rotated if rotated != 1 else None,
    }
    for key, value in unused.items():
        if value is not None:
            raise ConfigError(
                f"config.json: {key}={show(value)} with model_type={show(family)}, whose layers in transformers "
                "do not have it, while engines use it. Remove it, or set the model_type of a family that has it"
            )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(ConfigError, path / "config.json" if path.is_dir() else path)
    except ConfigError as error:
        raise ConfigError(f"{error}. Pass a config.json or the model's directory") from None
    except (OSError, ValueError) as error:  # of a path that is too long, or holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{str(path)!r:.300} cannot be read: {reason}. Pass a config.json or the model's directory"
        ) from None


_FAMILY_NAMES: Mapping[str, Sequence[str]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "width": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "chosen_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
_PARTS_OF_HEADS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes of attention with latent keys and values: the cache holds keys of the first two, values of the third."""


def _read_family_sizes(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Returns sizes of attention and MLP, by the names that `ModelShape` has for them.

    Experts count as one dense layer, as wide as those that a token visits. Keys and values of different sizes
    count with their mean.

    Args:
        config: keys of a `config.json`, with the defaults of its family.
        hidden_size: columns of the embedding.

    Raises:
        ConfigError: for a configuration without a number of layers.
    """
    layers, heads = _find_size(config, "num_layers"), _find_size(config, "num_heads") or 1
    if layers is None:
        raise ConfigError(f"the model's config.json has none of {', '.join(_FAMILY_NAMES['num_layers'])}")
    kv_heads = 1 if config.get("multi_query") is True else _find_size(config, "num_kv_heads") or heads
    head_dim = _read_whole(config.get("head_dim")) or max(1, hidden_size // heads)
    parts = [_read_whole(config.get(name)) for name in _PARTS_OF_HEADS]
    if all(parts):
        kv_heads, head_dim = heads, -(-sum(part or 0 for part in parts) // 2)
    return {
        "num_layers": layers,
        "intermediate_size": _active_width(config) or 4 * hidden_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": head_dim,
    }


def _active_width(config: Mapping[str, Any]) -> int | None:
    width, chosen = _find_size(config, "width"), _find_size(config, "chosen_experts")
    if chosen is None:
        return width
    each = _find_size(config, "expert_width") or width or 0
    shared = _find_size(config, "shared_width") or each * (_find_size(config, "shared_experts") or 0)
    return chosen * each + shared or None


def _find_size(config: Mapping[str, Any], size: str) -> int | None:
    return next((found for name in _FAMILY_NAMES[size] if (found := _read_whole(config.get(name))) is not None), None)


def _read_whole(value: object) -> int | None:
    """The value as a size; None for what is not one."""
    return value if type(value) is int and value > 0 else None
