"""Context lengths of published models, by their config.json."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hf_protocols import ConfigError, ModelShape
from hf_protocols.positions import compute_positions

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
    "Llama-3.1-8B": ({"max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 8.0}}, 131072),
    "Llama-3.2-1B": ({"max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 32.0}}, 131072),
    "Qwen2.5 with YaRN": (
        {
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
    ),
    "Qwen3 with YaRN": (
        {
            "max_position_embeddings": 40960,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
    ),
    "DeepSeek-V3": (
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        },
        163840,
    ),
    "gpt-oss": (
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        },
        131072,
    ),
    "vicuna-16k": ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    "dynamic": ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
    "Phi-3-mini-128k": (
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", **LONG},
        },
        131072,
    ),
    "Phi-3 of old": ({"max_position_embeddings": 131072, "rope_scaling": {"type": "su", **LONG}}, 131072),
    "Gemma-3": (
        {
            "model_type": "gemma3_text",
            "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        131072,
    ),
    "Qwen2-VL": ({"max_position_embeddings": 32768, "rope_scaling": {"type": "mrope", "mrope_section": [16]}}, 32768),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_context(name: str) -> None:
    config, positions = PUBLISHED[name]
    assert compute_positions(config) == positions


def _vllm_positions(config: dict[str, Any]) -> float:
    """The rules of vLLM's `_get_and_verify_max_len`, for one dictionary of rotary parameters."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, positions = rope.get("rope_type", rope.get("type", "default")), config["max_position_embeddings"]
    if kind in ("su", "longrope", "llama3") or "gemma3" in config.get("model_type", ""):
        return float(positions)
    if kind == "yarn":
        positions = rope["original_max_position_embeddings"]
    return float(positions * rope.get("factor", 1.0))


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_are_those_that_vllm_serves(name: str) -> None:
    config, positions = PUBLISHED[name]
    assert _vllm_positions(config) == positions


@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("yarn", 4.0), ("dynamic", 2.0)])
def test_last_position_turns_no_further_than_in_pretraining(kind: str, factor: float) -> None:
    """transformers' own frequencies: over the stretched context the slowest pair turns as far as it had learnt to."""
    torch = pytest.importorskip("torch", reason="compares with transformers' tensors")
    transformers = pytest.importorskip("transformers", reason="compares with transformers' frequencies")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 2048}
    rope = {"rope_type": kind, "factor": factor, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**sizes, rope_parameters=dict(rope))
    positions = compute_positions({**sizes, "rope_parameters": rope})
    assert positions == 2048 * factor == compute_positions(config.to_dict())
    longest = torch.tensor(positions) if kind == "dynamic" else None
    stretched, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=longest)
    learnt = 1e4 ** -(62 / 64)
    turned, known = float(stretched[-1]) * positions, learnt * 2048
    assert turned < known if kind == "dynamic" else math.isclose(turned, known, rel_tol=1e-4)


@pytest.mark.parametrize("name", ["n_positions", "max_seq_len"])
def test_a_length_counts_under_the_names_that_transformers_maps(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers' configurations")
    kind = {"n_positions": transformers.GPT2Config, "max_seq_len": transformers.DbrxConfig}[name]
    config = kind(**{name: 77})
    assert config.max_position_embeddings == 77 == compute_positions(config.to_dict())
    with pytest.raises(ConfigError, match=rf"config\.json: {name}=0 must be a whole number"):
        compute_positions({name: 0})


def test_layers_of_several_kinds_have_those_of_full_attention() -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
    }
    assert compute_positions({"max_position_embeddings": 1024, "rope_parameters": nested}) == 2048
    del nested["full_attention"]
    assert compute_positions({"max_position_embeddings": 1024, "rope_parameters": nested}) == 1024


def test_yarn_without_a_length_of_pretraining_takes_the_stated() -> None:
    rope = {"rope_type": "yarn", "factor": 4}
    assert compute_positions({"max_position_embeddings": 512, "rope_parameters": rope}) == 2048
    assert compute_positions({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn"}}) == 512
    assert compute_positions({"rope_parameters": rope}) is None


def test_rope_scaling_goes_before_rope_parameters() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    assert compute_positions({"max_position_embeddings": 512, **both}) == 1024


def test_shape_has_the_stretched_context() -> None:
    tiny = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = {**tiny, "num_attention_heads": 4, "max_position_embeddings": 64}
    shape = ModelShape.from_config({**config, "rope_scaling": {"type": "linear", "factor": 2.5}})
    assert shape.max_positions == 160
    assert ModelShape.from_config(config).max_positions == 64


HEADS = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


def _longrope(short: Any, long: Any = (1.0,) * 8, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "longrope", "short_factor": short, "long_factor": list(long), **more}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": "x"}, "config.json: rope_theta='x' must be a finite number above 0"),
        ({"rope_theta": -1}, "config.json: rope_theta=-1 must be"),
        ({"rope_parameters": {"rope_theta": 0}}, "config.json: rope_parameters: rope_theta=0 must be"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": True}}, "rope_scaling: rope_theta=True must"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": -1}, "full_attention": {}}}, "rope_theta=-1 must be"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters: full_attention=3. Use an object"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": [1]}}, "sliding_attention=[1]. Use an"),
        (_longrope([1.0] * 7), "rope_parameters: short_factor has 7 numbers, the model's heads need 8"),
        (_longrope([1.0] * 8, [1.0]), "rope_parameters: long_factor has 1 numbers, the model's heads need 8"),
        (_longrope([1.0] * 8, partial_rotary_factor=0.5), "short_factor has 8 numbers, the model's heads need 4"),
        (_longrope([1.0] * 8) | {"head_dim": 32}, "short_factor has 8 numbers, the model's heads need 16"),
        (_longrope(["x"] * 8), "short_factor: a factor='x' must be a finite number above 0"),
        (_longrope(None), "short_factor=None. Use a list of numbers above 0"),
    ],
)
def test_rotary_parameters_that_no_head_has_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compute_positions(HEADS | config)
    assert message in str(refused.value)


def test_long_factors_that_fit_the_heads_are_taken() -> None:
    fitting = [_longrope([1.0] * 8), _longrope([1.0] * 4, [2] * 4) | {"partial_rotary_factor": 0.5}]
    for config in (*fitting, _longrope([1.0] * 4, [2.0] * 4) | {"qk_rope_head_dim": 8}):
        assert compute_positions(HEADS | config) == 64


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "rope_scaling: factor=None must be a number of at least 1"),
        ({"type": "yarn", "factor": 0.5}, "factor=0.5 must be"),
        ({"type": "yarn", "factor": float("inf")}, "factor=inf must be"),
        ({"type": "yarn", "factor": float("nan")}, "factor=nan must be"),
        ({"type": "yarn", "factor": True}, "factor=True must be"),
        ({"type": "yarn", "factor": 10**400}, "factor=1000"),
        ({"type": "yarn", "factor": "4"}, "factor='4' must be"),
        (
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": "x"},
            "original_max_position_embeddings='x'",
        ),
        ({"type": "ntk", "factor": 4}, "rope_type='ntk', which is not known. Known are yarn, linear"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\]"),
        ([1], r"rope_scaling=\[1\]. Use an object"),
        ("yarn", "rope_scaling='yarn'. Use an object"),
    ],
)
def test_stretching_that_is_not_understood_is_refused(rope: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compute_positions({"max_position_embeddings": 64, "rope_scaling": rope})
