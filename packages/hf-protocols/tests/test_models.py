from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_protocols import ConfigError, ModelShape
from hf_protocols._presets import PRESETS

# Totals that the Hugging Face hub states for the published weights, without buffers and tied copies.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "codellama-34b": 33_743_970_304,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2 tied": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    "qwen3 with biases": {"model_type": "qwen3", "num_key_value_heads": 2, "attention_bias": True},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
    "gemma with biases": {"model_type": "gemma", "num_key_value_heads": 4, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 3},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "moe_intermediate_size": 24,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
}
DENSE = {name: config for name, config in FAMILIES.items() if "mixtral" not in name and "moe" not in name}


# ------------------------------------------------------------------------------------------- published and saved models


def test_every_preset_is_compared_with_its_publication() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    shape = ModelShape.preset(name)
    assert shape.name == name
    assert shape.num_parameters == PUBLISHED[name]


def _huggingface_model(config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    model_type = config["model_type"]
    given = {**TINY, **{key: value for key, value in config.items() if key != "model_type"}}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **given))


@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_parameters_are_those_of_hugging_face_in_order(config: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="compares with meta-device models, which need torch")
    with torch.device("meta"):
        model = _huggingface_model(config)
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert list(ModelShape.from_config({**TINY, **config}).parameters().items()) == expected


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_parameters_are_those_of_a_saved_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    """Experts too, which a model may fuse in memory and a checkpoint names one by one."""
    model = _huggingface_model(config)
    model.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    saved = {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    for source in (tmp_path, str(tmp_path / "config.json"), model.config.to_dict()):
        shape = ModelShape.from_config(source)
        assert shape.parameters() == saved
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe"])
def test_a_key_left_out_has_the_default_of_hugging_face(family: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with meta-device models, which need torch")
    heads = {"hidden_size": 64, "num_attention_heads": 32}  # a multiple of every family's default of KV heads
    with torch.device("meta"):
        model = _huggingface_model({"model_type": family, **heads})
    shape = ModelShape.from_config({"model_type": family, **TINY, **heads})
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_kv_heads == model.config.num_key_value_heads
    assert shape.tie_embeddings == model.config.tie_word_embeddings


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_a_small_model_by_hand() -> None:
    shape = ModelShape.from_config({**TINY, "num_key_value_heads": 2})
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32 + 2 * 32
    assert shape.num_parameters == 2 * 40 * 32 + 2 * layer + 32
    assert shape.parameters()["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert (shape.family, shape.name, shape.head_dim) == ("llama", "llama", 8)
    assert shape.num_parameters == sum(math.prod(size) for size in shape.parameters().values())


def test_keys_and_values_of_a_token() -> None:
    # Llama-2 7B: 2 * 32 layers * 32 heads * 128 * 2 bytes = 512 KiB; 70B has 8 KV heads on 80 layers: 320 KiB.
    assert ModelShape.preset("llama-2-7b").kv_bytes_per_token == 512 * 1024
    assert ModelShape.preset("llama-2-70b").kv_bytes_per_token == 320 * 1024


def test_experts_have_their_own_width() -> None:
    shape = ModelShape.preset("qwen3-30b-a3b")
    assert (shape.num_experts, shape.num_experts_per_token, shape.intermediate_size) == (128, 8, 768)
    assert ModelShape.preset("llama-3-8b").num_experts == 0


# ------------------------------------------------------------------------------------------------------------ errors


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model preset 'llama-2-7B' is unknown\. Did you mean llama-2-7b"):
        ModelShape.preset("llama-2-7B")
    for name in ("", "resnet-50"):
        with pytest.raises(ConfigError, match=f"'{name}' is unknown. Use one of .*codellama-34b"):
            ModelShape.preset(name)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model_type='gpt2' is not supported. Use a model of llama, mistral"):
        ModelShape.from_config({"model_type": "gpt2", **TINY})


@pytest.mark.parametrize("key", TINY)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        ModelShape.from_config({name: size for name, size in TINY.items() if name != key})


def test_heads_divide_the_hidden_size_unless_theirs_is_given() -> None:
    sizes = {"model_type": "llama", **TINY, "hidden_size": 64, "num_attention_heads": 7}
    with pytest.raises(ConfigError, match=r"hidden_size=64 does not divide by num_attention_heads=7. Set head_dim"):
        ModelShape.from_config(sizes)
    assert ModelShape.from_config({**sizes, "head_dim": 16}).head_dim == 16


@pytest.mark.parametrize("mixed", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_layers_of_both_kinds_are_refused(mixed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers and decoder_sparse_step"):
        ModelShape.from_config({"model_type": "qwen3_moe", **TINY, **mixed})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number of at least 1"),
        ({"num_attention_heads": 128}, "does not divide by num_attention_heads=128. Set head_dim"),
        ({"head_dim": 0}, "head_dim=0 must be a whole number of at least 1"),
        ({"num_key_value_heads": 0}, "num_kv_heads=0 must be a whole number of at least 1"),
        ({"num_key_value_heads": -1}, "num_kv_heads=-1 must be a whole number of at least 1"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be a whole number of at least 1"),
        ({"num_experts": 4}, "num_experts=4 with num_experts_per_token=0. Set how many"),
        ({"num_experts": -8}, "num_experts=-8 must be a whole number of at least 0"),
        ({"sliding_window": 4}, "sliding_window=4 with model_type='llama'.*Remove it, or set the model_type of"),
        ({"model_type": "gemma", "sliding_window": 4}, "sliding_window=4 with model_type='gemma'"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types=\['sliding_attention'\] with model_type='llama'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size=8192 with model_type='llama'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 with model_type='llama'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 with model_type='llama'"),
        ({"num_hidden_layers": 10**30}, f"num_layers={10**30} must be at most 100000"),
        ({"vocab_size": 10**30}, f"vocab_size={10**30} must be at most 2147483647"),
        ({"num_experts": 10**6}, "num_experts=1000000 must be at most 100000"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config({**TINY, **change})


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", "two"), ("hidden_size", 64.5), ("vocab_size", True)])
def test_sizes_that_are_not_whole_numbers_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"={value!r} must be a whole number")):
        ModelShape.from_config({**TINY, key: value})


def test_other_than_a_configuration_or_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config=3. Use a config\.json"):
        ModelShape.from_config(3)
    with pytest.raises(ConfigError, match=r"^model preset=3. Use a name"):
        ModelShape.preset(3)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xf8\x00\x80")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelShape.from_config(tmp_path / "model.safetensors")


def test_files_that_hold_no_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config\.json does not exist\. Pass a config\.json or the model's directory"
    ):
        ModelShape.from_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelShape.from_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object but a list"):
        ModelShape.from_config(str(file))


MIXTRAL = {"model_type": "mixtral", **TINY, "num_key_value_heads": 4, "num_local_experts": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": "false"}, "config.json: tie_word_embeddings='false'. Use true or false"),
        ({"attention_bias": "no"}, "config.json: attention_bias='no'. Use true or false"),
        ({"mlp_bias": 3}, "config.json: mlp_bias=3. Use true or false"),
        ({"_name_or_path": 5}, "config.json: _name_or_path=5. Use a name"),
        ({"_name_or_path": ["x"]}, r"config.json: _name_or_path=\['x'\]. Use a name"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported. Use a model of llama"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "mixtral: num_experts_per_token=9 is above num_experts=4"),
    ],
)
def test_values_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ModelShape.from_config({**TINY, **change})


def test_null_is_false_and_no_name() -> None:
    silent = dict.fromkeys(["tie_word_embeddings", "attention_bias", "mlp_bias", "_name_or_path"])
    assert ModelShape.from_config({**TINY, **silent}) == ModelShape.from_config(TINY)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""], ids=["NUL", "long", "directory"])
def test_paths_that_cannot_be_read_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read: .*\. Pass a config\.json or the model's directory"):
        ModelShape.from_config(tmp_path / name)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"vocab_size": ' + "1" * 5000 + "}"], ids=["deep", "integer"])
def test_json_that_cannot_be_held_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON: (it nests too deeply|.*integer)"):
        ModelShape.from_config(tmp_path)


def test_a_shape_is_made_of_flags_and_a_name() -> None:
    shape = ModelShape.from_config(TINY)
    with pytest.raises(ConfigError, match=r"^llama: qkv_bias='no'. Use True or False$"):
        replace(shape, qkv_bias="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^a model's name=5. Use a name$"):
        replace(shape, name=5)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- the generic shape

GENERIC: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8},
    "gpt2": {},
    "phi": {"num_key_value_heads": 2},
    "bloom": {},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
}


@pytest.mark.parametrize("family", GENERIC)
def test_the_generic_shape_has_the_models_parameters(family: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with meta-device models, which need torch")
    with torch.device("meta"):
        model = _huggingface_model({"model_type": family, **GENERIC[family]})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    embedding = names[id(model.get_input_embeddings().weight)]
    head = "lm_head.weight"
    shape = ModelShape.from_parameters(model.config.to_dict(), parameters, embedding=embedding, head=head)
    assert shape.is_generic
    assert shape.parameters() == parameters
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.family, shape.name) == (family, family)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (2, 32, 40)
    assert shape.tie_embeddings == (head not in parameters)
    assert shape.num_kv_heads == {"phi": 2, "gemma2": 4, "falcon": 1}.get(family, 4)
    assert not ModelShape.knows(model.config.to_dict())


def _generic(**config: Any) -> ModelShape:
    parameters = {"wte": (40, 32), "head": (40, 32)}
    return ModelShape.from_parameters({"num_layers": 2, **config}, parameters, embedding="wte", head="head")


def test_generic_shape_counts_experts_that_a_token_visits() -> None:
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 3, "intermediate_size": 99, "n_shared_experts": 2}
    shape = _generic(num_attention_heads=4, **experts)
    assert (shape.intermediate_size, shape.num_experts) == (5 * 16, 0)
    assert _generic(intermediate_size=99, num_experts_per_tok=2).intermediate_size == 198
    assert _generic(shared_expert_intermediate_size=7, **{**experts, "n_shared_experts": None}).intermediate_size == 55
    assert _generic().intermediate_size == 4 * 32


def test_generic_shape_averages_latent_keys_and_values() -> None:
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 1}
    shape = _generic(num_attention_heads=4, **latent)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 9)
    assert _generic(num_attention_heads=4, num_key_value_heads=3).num_kv_heads == 4


def test_the_generic_shape_needs_a_number_of_layers() -> None:
    with pytest.raises(ConfigError, match=r"config\.json has none of num_hidden_layers, n_layer"):
        ModelShape.from_parameters({}, {"wte": (40, 32)}, embedding="wte", head="wte")


def test_mixed_layers_are_not_known() -> None:
    config = {"model_type": "qwen3_moe", **TINY}
    assert ModelShape.knows(config)
    assert not ModelShape.knows({**config, "mlp_only_layers": [0]})
    assert not ModelShape.knows({"model_type": ["llama"]})
