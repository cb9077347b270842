"""Directories of language models that transformers takes only in part."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, T5Config

from hf_engine import TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.models.causal_lm import build_without_memory, load_causal_lm, save_causal_lm
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, GenerationSpec, ModelShape, ParallelSpec, Topology


def build(model):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    return load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))


def export(model, directory):
    backend = build(model)
    backend.export_hf(directory)
    backend.close()


def test_contradicting_generation_settings_are_exported_as_given(ranks2, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    path = model / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "do_sample": False, "eos_token_id": [2, 7]}))
    ranks2.run(export, model, tmp_path / "exported")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").generation_config
    assert (read.temperature, read.top_p, read.do_sample, read.eos_token_id) == (0.9, 0.6, False, [2, 7])


def load_without_a_head(model, incomplete):
    backend = build(model)
    before = {name: shard.clone() for name, shard in backend.local_weights().items()}
    with pytest.raises(BackendError, match=r"incomplete': lacks the parameters lm_head.weight. Give"):
        backend.load_hf(incomplete)
    assert all(torch.equal(shard, before[name]) for name, shard in backend.local_weights().items())
    backend.close()
    for load in (build, build_rollout):
        with pytest.raises(BackendError, match=r"incomplete': lacks the parameters lm_head.weight. Give"):
            load(incomplete)


def build_rollout(model):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    return load_rollout_backend("transformers").build(model, topology=topology)


def build_rollout_and_close(model):
    build_rollout(model).close()


def refuse_configurations(model, change, message):
    path = model / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | change))
    try:
        for load in (build, build_rollout):
            with pytest.raises(BackendError, match=message):
                load(model)
    finally:
        path.write_text(json.dumps(stated))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": "7"}, "config.json has eos_token_id='7'. Use a token id"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"is quantised \(quant_method='gptq' in its"),
        ({"sliding_window": 4}, "has sliding_window=4 in its config.json, which no layer of a LlamaForCausalLM has"),
        ({"attention_chunk_size": 4}, "has attention_chunk_size=4 in its config.json, which no layer of a Llama"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"has layer_types=\['sliding_attention', 'full_att"),
    ],
)
def test_a_configuration_unusable_by_transformers_is_one_error(ranks1, tmp_path, change, message):
    ranks1.run(refuse_configurations, write_tiny_model(tmp_path / "model"), change, message)


def refuse_both(model, message):
    for load in (build, build_rollout):
        with pytest.raises(BackendError, match=message):
            load(model)


@pytest.mark.parametrize("text", ["{", "\ufffe"])
def test_a_damaged_generation_config_is_an_error(ranks1, tmp_path, text):
    """transformers goes on without it: responses would not end where the model's end."""
    model = write_tiny_model(tmp_path)
    (model / "generation_config.json").write_text(text, encoding="utf-16")
    ranks1.run(refuse_both, model, "generation_config.json is not valid JSON: it is not UTF-8")
    (model / "generation_config.json").write_text(text)
    ranks1.run(refuse_both, model, "generation_config.json is not valid JSON: ")


def test_layers_of_full_attention_are_a_model_like_any(ranks1, tmp_path):
    model = write_tiny_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"] * 2}))
    ranks1.run(build_rollout_and_close, model)
    assert ModelShape.from_config(model).num_layers == 2


def test_keys_that_change_a_models_outputs_are_not_read(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    path, keys = model / "config.json", {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    build_without_memory(read_model_directory(model))
    loaded = load_causal_lm(model, torch.float32).model
    output = loaded(torch.tensor([[1, 2]]))
    assert (output.logits.shape[:2], output.attentions, output.hidden_states) == ((1, 2), None, None)
    save_causal_lm(loaded, loaded.state_dict(), tmp_path / "exported", head="lm_head.weight")
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert [written.get(key, keys[key] is False) for key in keys] == [True, False, False]


def test_files_that_lack_a_parameter_are_not_loaded(ranks2, tmp_path):
    model = write_tiny_model(tmp_path / "model", tie_embeddings=False)
    incomplete = write_tiny_model(tmp_path / "incomplete", tie_embeddings=False, seed=1)
    (file,) = incomplete.glob("*.safetensors")
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    ranks2.run(load_without_a_head, model, incomplete)


def refuse_other_sizes(model):
    topology = Topology(ParallelSpec(), GenerationSpec())
    message = (
        r"holds other weights than its config.json says: 1 of 20 .* 'model.embed_tokens.weight', which is \(64, 64\)"
    )
    with pytest.raises(BackendError, match=message):
        build(model)
    with pytest.raises(BackendError, match=message):
        load_rollout_backend("transformers").build(model, topology=topology)


def test_a_config_of_other_sizes_than_the_files_is_refused(ranks1, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    ranks1.run(refuse_other_sizes, model)


@pytest.mark.parametrize("num_layers", [0, -1])
def test_a_model_has_layers(ranks1, tmp_path, num_layers):
    model = write_tiny_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    with pytest.raises(RuntimeError, match=f"num_hidden_layers={num_layers} in its config.json. Use a whole number"):
        ranks1.run(build, model)


def write_gemma(path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=40, num_key_value_heads=1, head_dim=8, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_a_family_without_a_table_is_compared_with_its_modules(tmp_path):
    model = write_gemma(tmp_path / "model")
    build_without_memory(read_model_directory(model))
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    removed = weights.pop(name)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=rf"lacks the parameters {name}\. Give a whole directory of one model"):
        build_without_memory(read_model_directory(model))
    weights |= {name: removed, "model.extra.weight": removed.clone()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=r"holds model\.extra\.weight \(1 such\), for which a Gemma2ForCausalLM has"):
        build_without_memory(read_model_directory(model))
    del weights["model.extra.weight"]
    weights[name] = removed[:4].contiguous()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=rf"1 parameters differ, such as '{name}', which is \(4, 16\) and must be"):
        build_without_memory(read_model_directory(model))


def test_another_kind_of_model_is_one_short_line(tmp_path):
    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=r"'t5' in its config.json, which is not a causal language model") as refused:
        build_without_memory(read_model_directory(tmp_path, needs_weights=False))
    assert len(str(refused.value)) < 300 + len(str(tmp_path))
