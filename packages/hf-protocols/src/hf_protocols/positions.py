"""Count a model's positions, with the factors that stretch its rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_protocols.errors import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["compute_positions"]

_check = Checks(ConfigError)

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys that state a length, as configurations of different families name it: GPT-2 and GPT-J, then DBRX and MPT."""
_ORIGINAL = "original_max_position_embeddings"
_STRETCHED = ("yarn", "linear", "dynamic")
_STATED = ("default", "mrope", "llama3", "longrope", "su", "proportional", "axial")
"""Types whose configurations state the stretched length in `max_position_embeddings`."""
_BASES = ("rope_theta", "rope_local_base_freq")
_ALREADY_STRETCHED = ("gemma3", "gemma3_text")
"""Families whose configurations count a linear factor in `max_position_embeddings`; engines make the same exception."""


def compute_positions(config: Mapping[str, Any]) -> int | None:
    """Returns the positions of a model by its `config.json`; None if the configuration states no length.

    Below, `max_position_embeddings` also stands for `n_positions` and `max_seq_len`.

    transformers computes rotary embeddings for any position, so the configuration alone says where a model ends:

    - `yarn`, `linear`, `dynamic`: `factor` times the length of pretraining. That length is
      `original_max_position_embeddings`, else `max_position_embeddings`, which transformers takes in its place. Some
      models state the product in `max_position_embeddings` (DeepSeek-V3: 163840 = 40 x 4096), others state the length
      of pretraining (Qwen2.5: 32768 with factor 4). The larger of the product and the stated value is right for both.
    - `llama3`, `longrope`: the value of `max_position_embeddings`. Llama 3.1 and Phi-3 state the stretched length, and
      `factor` belongs to frequencies: Llama 3.2 has 131072 positions with 32 x 8192.

    vLLM's `_get_and_verify_max_len` follows the same rules, Gemma 3's exception included. Where layers of several kinds
    have rotary embeddings of their own, those of full attention count: sliding layers see their window only.

    Args:
        config: keys of a `config.json`, or of its `text_config`; `rope_scaling` goes before `rope_parameters`, as in
            transformers.

    Raises:
        ConfigError: for a type that is not known, a length or factor that is not a number of at least 1, a base that is
            not a number above 0, or lists of factors that do not fit the heads.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    _check.kind(f"config.json: {key}", rope, Mapping, "an object with rope_type and factor, or null")
    layers = _read_layers(f"config.json: {key}", rope)
    _check_bases("config.json", config)
    for each in layers.values():
        _check_bases(f"config.json: {key}", each)
        _check_long_factors(f"config.json: {key}", each, config)
    name = next((name for name in _KEYS if config.get(name) is not None), None)
    if name is None:
        return None
    stated: Any = config[name]
    _check.count(f"config.json: {name}", stated)
    rope = layers.get("full_attention") or next(iter(layers.values()), rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in (*_STRETCHED, *_STATED):
        known = ", ".join((*_STRETCHED, "llama3", "longrope", "default"))
        raise ConfigError(f"config.json: {key} has rope_type={show(kind)}, which is not known. Known are {known}")
    factor = rope.get("factor")
    if factor is not None or kind in ("linear", "dynamic"):
        _check_factor(f"config.json: {key}: factor", factor)
    original: Any = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or stated
    _check.count(f"config.json: {key}: {_ORIGINAL}", original)
    if kind in _STATED or factor is None or config.get("model_type") in _ALREADY_STRETCHED:
        return int(stated)
    return int(max(stated, original * factor))


def _read_layers(name: str, rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rotary parameters by kind of layer; one entry without a kind where all layers have the same."""
    for kind, each in rope.items():
        if kind.endswith("_attention") and each is not None:
            _check.kind(f"{name}: {kind}", each, Mapping, "an object with rope_type, or null")
    return {kind: each for kind, each in rope.items() if isinstance(each, Mapping)} or {"": rope}


def _check_bases(name: str, rope: Mapping[str, Any]) -> None:
    """Checks every base: transformers prefers those of layers to the one at the top; some engines do the opposite."""
    for key in _BASES:
        if rope.get(key) is not None:
            _check.number(f"{name}: {key}", rope[key])


def _check_long_factors(name: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Checks the factors of longrope, one for each frequency of a head: half as many as sizes that are rotated."""
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return
    wanted = _count_frequencies(rope, config)
    for key in ("short_factor", "long_factor"):
        factors: Any = rope.get(key)
        _check.kind(f"{name}: {key}", factors, list, "a list of numbers above 0")
        for factor in factors:
            _check.number(f"{name}: {key}: a factor", factor)
        if wanted is not None and len(factors) != wanted:
            raise ConfigError(
                f"{name}: {key} has {len(factors)} numbers, the model's heads need {wanted}. Give {wanted}"
            )


def _count_frequencies(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Number of frequencies of one head; None if sizes are missing, or are refused elsewhere."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("qk_rope_head_dim") or config.get("head_dim")
    if size is None and type(hidden) is int and type(heads) is int and heads > 0:
        size = hidden // heads
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    turned = 1.0 if turned is None or config.get("qk_rope_head_dim") else turned
    if type(size) is not int or isinstance(turned, bool) or not isinstance(turned, int | float) or not 0 < turned <= 1:
        return None
    return (int(size * turned) + 1) // 2


def _check_factor(name: str, factor: object) -> None:
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 1 <= factor <= 2**31:  # type: ignore[operator]
        raise ConfigError(f"{name}={show(factor)} must be a number of at least 1")
