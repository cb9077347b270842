"""Families of causal language models in fsdp with transformers generation, each against transformers alone."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_testing.train_steps import train_step
from hf_engine import HybridEngine, TrainConfig, derive_shape, load_rollout_backend, load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.testing import FURTHER_FAMILIES, TINY_FAMILIES, check_family, gather_weights, write_tiny_family
from hf_protocols import BackendError, GenerationSpec, ModelShape, ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2, eps=1e-3)
"""A larger eps keeps the rounding of gradients near zero small."""


def find_difference(family, directory, config):
    """The law that a family breaks, and by how much; empty if it keeps all."""
    try:
        check_family(family, directory, **config)
    except AssertionError as error:
        return str(error) or repr(error)
    return ""


FURTHER = [pytest.param(family, marks=pytest.mark.matrix) for family in FURTHER_FAMILIES]
"""`make test-families` runs these."""


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *FURTHER])
def test_family_equals_transformers(ranks1, tmp_path, family):
    assert ranks1.run(find_difference, family, tmp_path, {}) == [""]


@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("gemma2", False), ("phi", True), ("cohere2", False)])
def test_a_head_of_the_other_kind_equals_transformers(ranks1, tmp_path, family, is_tied):
    assert ranks1.run(find_difference, family, tmp_path, {"tie_word_embeddings": is_tied}) == [""]


def build(backend, model, **options):
    topology = Topology(ParallelSpec(dp_size=torch.distributed.get_world_size()), GenerationSpec())
    if backend == "transformers":
        return load_rollout_backend(backend).build(model, topology=topology, **options)
    return load_train_backend(backend).build(model, topology=topology, config=CONFIG)


def list_refusals(model):
    """Of both backends, of the check before a start and of the start."""
    files, found = read_model_directory(model), []
    for name, load in (("fsdp", load_train_backend), ("transformers", load_rollout_backend)):
        for attempt in (partial(load(name).check_model, files, on_cpu=True), partial(build, name, model)):
            with pytest.raises(BackendError) as refused:
                attempt()
            found.append(str(refused.value))
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
def test_a_tied_head_that_files_hold_otherwise_is_refused(ranks1, tmp_path, family):
    model = write_tiny_family(tmp_path, family, tie_word_embeddings=False)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    (found,) = ranks1.run(list_refusals, model)
    message = r"config.json ties 'lm_head.weight' to .*Set tie_word_embeddings to false"
    assert [bool(re.search(message, each)) for each in found] == [True] * 4, found


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
def test_a_head_that_is_neither_tied_nor_there_is_refused(ranks1, tmp_path, family):
    model = write_tiny_family(tmp_path, family, tie_word_embeddings=True)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    (found,) = ranks1.run(list_refusals, model)
    message = r"lacks the parameters lm_head.weight.*or set tie_word_embeddings to true"
    assert [bool(re.search(message, each)) for each in found] == [True] * 4, found


def test_a_copy_of_a_tied_head_is_left_alone(ranks1, tmp_path):
    model = write_tiny_family(tmp_path, "gemma2")
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (names,) = ranks1.run(names_of_both, model)
    assert names == [False, False]


def names_of_both(model):
    """Returns, for training and generation, True if the model has a head of its own."""
    return ["lm_head.weight" in build(name, model).weight_layout().shapes for name in ("fsdp", "transformers")]


UNFIT = {
    "mamba": ({"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}, "is a MambaForCausalLM, with recurrent"),
    "rwkv": ({"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 1}, "is a RwkvForCausalLM, with r"),
    "minimax": ({"hidden_size": 32, "num_hidden_layers": 2}, r"recurrent layers \(linear_attention\)"),
    "recurrent_gemma": ({"hidden_size": 32, "num_hidden_layers": 3}, "is a RecurrentGemmaForCausalLM, with recurrent"),
    "bert": ({"hidden_size": 24, "num_hidden_layers": 1}, "has is_decoder=false"),
    "bart": ({"d_model": 16, "decoder_layers": 1}, "is a BartForCausalLM, which counts the positions of padding"),
    "roberta": (
        {"hidden_size": 24, "num_hidden_layers": 1, "is_decoder": True},
        "positions begin after the id of its p",
    ),
    "llama": ({"is_causal": False}, "has is_causal=false .* see later ones"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "has use_bidirectional_attention=true .* see later ones"),
    "gemma4_text": ({"use_bidirectional_attention": "all"}, 'has use_bidirectional_attention="all" .* see later ones'),
}


@pytest.mark.parametrize("family", UNFIT)
def test_a_model_that_padding_would_change_is_one_line(tmp_path, family):
    """By its configuration alone: no weights are needed to say so."""
    config, message = UNFIT[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 64, **config}))
    files = read_model_directory(tmp_path, needs_weights=False)
    for backend in (load_train_backend("fsdp"), load_rollout_backend("transformers")):
        with pytest.raises(BackendError, match=message) as raised:
            backend.check_model(files, on_cpu=True)
        assert "\n" not in str(raised.value)


def test_a_model_without_a_number_of_layers_is_one_line(tmp_path):
    """Its layers are of three modules: transformers' own cache does not know how many to keep."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blt"}))
    files = read_model_directory(tmp_path, needs_weights=False)
    with pytest.raises(BackendError, match=r"a BltForCausalLM: its keys and values cannot be kept: .*num_hidden_l"):
        load_rollout_backend("transformers").check_model(files, on_cpu=True)


def test_recurrent_layers_count_and_not_the_class(tmp_path):
    """Small Granite 4 models have attention in all layers of a class that transformers calls stateful."""
    model = write_tiny_family(tmp_path, "granitemoehybrid")
    backend = load_train_backend("fsdp")
    backend.check_model(read_model_directory(model), on_cpu=True)
    path = model / "config.json"
    mixed = {"layer_types": ["linear_attention", "full_attention"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | mixed))
    with pytest.raises(BackendError, match=r"recurrent layers \(linear_attention\)"):
        backend.check_model(read_model_directory(model), on_cpu=True)


def test_a_transition_of_two_ranks_keeps_the_dtype_of_buffers(ranks2, tmp_path):
    """A routing bias stays in float32 where the weights generate in bfloat16."""
    model = write_tiny_family(tmp_path / "model", "deepseek_v3")
    other = write_tiny_family(tmp_path / "other", "deepseek_v3", seed=1)
    found = ranks2.run(load_and_generate, model, other, tmp_path / "state")
    expected = AutoModelForCausalLM.from_pretrained(other, dtype=torch.bfloat16).state_dict()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert expected[name].dtype == torch.float32
    for state in found:
        assert state.keys() == expected.keys()
        assert {key for key in state if not state[key].equal(expected[key])} == set()
        assert state[name].dtype == torch.float32


def load_and_generate(model, other, state):
    train, rollout = build("fsdp", model), build("transformers", model, dtype="bfloat16")
    train.load_hf(other)
    train.save_state(state)
    train.load_hf(model)
    train.load_state(state)
    engine = HybridEngine(train, rollout, Topology(ParallelSpec(dp_size=2), GenerationSpec()))
    with engine.generation():
        state = {name: tensor.clone() for name, tensor in rollout._model.state_dict().items()}
    engine.close()
    return state


def step_of_two_ranks(model, directory):
    topology = Topology(ParallelSpec(dp_size=2))
    train = build("fsdp", model)
    train_step(train, topology, vocab_size=64)
    train.export_hf(directory)
    return gather_weights(train, topology)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_two_ranks_end_where_one_does(ranks1, ranks2, tmp_path, family):
    model = write_tiny_family(tmp_path / "model", family)
    (alone,) = ranks1.run(step_of_one_rank, model)
    together = ranks2.run(step_of_two_ranks, model, tmp_path / "export")
    for weights in together:
        assert max(float((weights[name] - alone[name]).abs().max()) for name in alone) < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert all(together[0][name].equal(parameter) for name, parameter in loaded.named_parameters())


def step_of_one_rank(model):
    topology = Topology(ParallelSpec())
    train = build("fsdp", model)
    train_step(train, topology, vocab_size=64)
    return gather_weights(train, topology)


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *FURTHER])
def test_generic_shape_is_that_of_the_model(tmp_path, family):
    model = write_tiny_family(tmp_path, family)
    shape = derive_shape(read_model_directory(model))
    built = AutoModelForCausalLM.from_pretrained(model)
    assert shape.num_parameters == sum(parameter.numel() for parameter in built.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (2, 32, 64)
    assert shape.tie_embeddings == (built.get_output_embeddings().weight is built.get_input_embeddings().weight)
    assert shape.is_generic != ModelShape.knows(json.loads((model / "config.json").read_text()))
