"""Parts of the source model that an export keeps: dtypes, the generation configuration, and padding ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.backends.jagged import to_jagged
from hf_engine.model_directory import ExportSource, read_model_directory
from hf_engine.testing import gather_weights, write_tiny_model
from hf_protocols import BackendError, ParallelSpec, Topology

TOPOLOGY = Topology(ParallelSpec())
GENERATION = '{"eos_token_id":   [2, 7],\n  "temperature": 0.9, "do_sample": false}'


def write_model(directory: Path, kept: str = "norm", **options) -> Path:
    """Weights in bfloat16, except those whose names have `kept`; a generation configuration that nobody formatted."""
    model = write_tiny_model(directory, **{"tie_embeddings": False, "dtype": "bfloat16", **options})
    weights = load_file(model / "model.safetensors")
    cast = {name: each if kept in name else each.bfloat16() for name, each in weights.items()}
    save_file(cast, model / "model.safetensors", metadata={"format": "pt"})
    (model / "generation_config.json").write_text(GENERATION)
    return model


def build(name, model):
    return load_train_backend(name).build(model, topology=TOPOLOGY, config=TrainConfig(learning_rate=1e-2))


def train(backend, prompt=(3, 9)):
    ids, mask = torch.tensor([2, 11, 5]), torch.ones(3, dtype=torch.bool)
    ends = torch.tensor([0, 3])
    columns = {"prompt_ids": to_jagged(torch.tensor(prompt), torch.tensor([0, len(prompt)]))}
    columns |= {"response_ids": to_jagged(ids, ends), "response_mask": to_jagged(mask, ends)}

    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    backend.train_step(TensorDict(columns, batch_size=[1]), loss, 3.0)


def export(name, model, directory):
    backend = build(name, model)
    backend.export_hf(directory / "before")
    backend.export_hf(directory / "float16", dtype="float16")
    train(backend)
    backend.export_hf(directory / "after")
    backend.export_hf(directory / "exact", dtype="float32")
    weights = gather_weights(backend, TOPOLOGY)
    with pytest.raises(BackendError, match="dtype='int8' is not one of 'source', 'float32', 'bfloat16', 'float16'"):
        backend.export_hf(directory / "never", dtype="int8")
    backend.close()
    return weights


@pytest.mark.parametrize(
    ("name", "options"),
    [("fsdp", {}), ("megatron", {}), ("fsdp", {"family": "mixtral", "kept": "experts.1."})],
    ids=["fsdp", "megatron", "stacked experts"],
)
def test_exports_keep_dtypes_and_generation_settings(ranks1, tmp_path, name, options):
    model = write_model(tmp_path / "model", **options)
    source = load_file(model / "model.safetensors")
    assert {each.dtype for each in source.values()} == {torch.bfloat16, torch.float32}
    (weights,) = ranks1.run(export, name, model, tmp_path)
    found = {folder: load_file(tmp_path / folder / "model.safetensors") for folder in ("before", "float16", "after")}
    for key, tensor in source.items():
        assert torch.equal(found["before"][key], tensor) and found["before"][key].dtype == tensor.dtype, key
        wanted = torch.float32 if tensor.dtype == torch.float32 else torch.float16
        assert found["float16"][key].dtype == wanted, key
        assert torch.equal(found["after"][key], weights[key].to(tensor.dtype)), key
    assert [each.keys() for each in found.values()] == [source.keys()] * 3
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    assert all(torch.equal(exact[key], weights[key]) for key in source)
    assert any(not torch.equal(exact[key], found["after"][key].float()) for key in source)
    stated = [json.loads((tmp_path / each / "config.json").read_text())["dtype"] for each in ("after", "float16")]
    assert stated == ["bfloat16", "float16"]
    assert (tmp_path / "after" / "generation_config.json").read_text() == GENERATION
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "after").generation_config.eos_token_id == [2, 7]


def test_names_that_lack_the_models_prefix_keep_their_dtype(tmp_path):
    source = ExportSource.of(read_model_directory(write_model(tmp_path)))
    assert source.main_dtype == "bfloat16"
    assert source.dtype_of("wrapper.model.norm.weight", "source") == "float32"
    assert source.dtype_of("model.norm.weight", "bfloat16") == "float32"
    assert source.dtype_of("value_head.weight", "source") == "bfloat16"
    assert source.dtype_of("value_head.weight", "float16") == "float16"


def step_from(name, model):
    """A step in which the end of a turn, token 2, is also in the prompt."""
    backend = build(name, model)
    train(backend, prompt=(3, 2, 9))
    weights = gather_weights(backend, TOPOLOGY)
    backend.close()
    return weights


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_an_end_that_is_the_padding_learns_like_any_token(ranks1, tmp_path, name):
    found = {}
    for pad in (None, 2, 50):
        model = write_tiny_model(tmp_path / str(pad), tie_embeddings=False, eos_token_id=[2], pad_token_id=pad)
        (found[pad],) = ranks1.run(step_from, name, model)
    before = load_file(tmp_path / "50" / "model.safetensors")
    assert not torch.equal(found[2]["model.embed_tokens.weight"][2], before["model.embed_tokens.weight"][2])
    for pad in (None, 50):
        assert all(torch.equal(found[2][key], found[pad][key]) for key in before), pad
