from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_engine.resharding import checking
from hf_engine.resharding.checking import check_conversion
from hf_engine.resharding.layouts import fsdp_layout, replicated_layout
from hf_engine.resharding.model_layouts import generation_layout, megatron_layout
from hf_engine.testing import write_tiny_model
from hf_protocols.errors import ModelError, ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie_embeddings=False, num_key_value_heads=2)


def layouts(directory, train="2-2-1", gen="1-2"):
    shape = ModelShape.from_config(directory)
    topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(gen))
    return megatron_layout(shape, topology), generation_layout(shape, topology)


def test_a_real_model_goes_there_and_back(model):
    source, target = layouts(model)
    report = check_conversion(model, source, target)
    stored = load_file(model / "model.safetensors")
    assert report.num_parameters == len(stored) == len(report.digests)
    assert report.parameter_bytes == sum(tensor.nbytes for tensor in stored.values())
    # There: every rank receives the other stage's half of the model. Back: what it needs it holds.
    assert 0 < report.moved_bytes < 4 * report.parameter_bytes


def test_the_way_back_moves_nothing_to_nested_training_shards(model):
    shape = ModelShape.from_config(model)
    topology = Topology(ParallelSpec(dp_size=4), GenerationSpec())
    source = fsdp_layout(shape.parameters(), range(4))
    report = check_conversion(model, source, generation_layout(shape, topology))
    assert report.moved_bytes == 3 * report.parameter_bytes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks the parameters model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "holds extra, for which a LlamaForCausalLM"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"which is \(3,\) and must be \(64,\)"),
    ],
)
def test_weights_that_do_not_match_the_config_are_refused(model, tmp_path, damage, message):
    tensors = load_file(model / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        check_conversion(tmp_path, *layouts(tmp_path))


def copy_with(model, directory, **more):
    """The model with more tensors in its file, as older libraries wrote them."""
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | more, directory / "model.safetensors")
    (directory / "config.json").write_text((model / "config.json").read_text())
    return directory


def test_buffers_that_are_not_parameters_are_left_out(model, tmp_path):
    more = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in range(2)}
    copy = copy_with(model, tmp_path, **more)
    assert check_conversion(copy, *layouts(copy)) == check_conversion(model, *layouts(model))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    tied = write_tiny_model(tmp_path / "tied", num_key_value_heads=2)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    for name, head in (("equal", embedding.clone()), ("other", embedding + 1), ("short", embedding[1:].clone())):
        directory = tmp_path / name
        directory.mkdir()
        copy_with(tied, directory, **{"lm_head.weight": head})
        if name == "equal":
            assert check_conversion(directory, *layouts(tied)) == check_conversion(tied, *layouts(tied))
        else:
            with pytest.raises(ModelError, match=r"config.json ties 'lm_head.weight' to 'model.embed_tokens.weight'"):
                check_conversion(directory, *layouts(tied))


def test_an_empty_directory_and_a_damaged_file_are_refused(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ModelError, match="no safetensors"):
        check_conversion(tmp_path, *layouts(model))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        check_conversion(tmp_path, *layouts(model))


def write_in_two_files(model, directory):
    """The model as transformers writes what is larger than one file; the index."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (name in names[len(names) // 2 :])}-of-00002.safetensors" for name in names}
    for file in sorted({*files.values()}):
        save_file({name: tensors[name] for name in names if files[name] == file}, directory / file)
    (directory / "config.json").write_text((model / "config.json").read_text())
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def test_a_model_in_several_files_goes_there_and_back(model, tmp_path):
    write_in_two_files(model, tmp_path)
    # Not in the index: adapters and the like.
    save_file({"adapter": torch.zeros(2)}, tmp_path / "adapter.safetensors")
    assert check_conversion(tmp_path, *layouts(tmp_path)) == check_conversion(model, *layouts(model))


def test_a_missing_file_and_a_wrong_index_are_one_error(model, tmp_path):
    index = write_in_two_files(model, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ModelError, match=r"index.json names model-00002-of-00002.safetensors \(1 of 2 files\), which"):
        check_conversion(tmp_path, *layouts(model))
    (tmp_path / "kept").rename(tmp_path / "model-00002-of-00002.safetensors")
    text = index.read_text()
    index.write_text(text.replace("model-00002", "model-00001"))
    with pytest.raises(ModelError, match=r"in model-00001-of-00002\.safetensors, which lacks it"):
        check_conversion(tmp_path, *layouts(model))
    for text in ("[]", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 3}}'):
        index.write_text(text)
        with pytest.raises(ModelError, match=r"not an index of safetensors files|is not a JSON object but a list"):
            check_conversion(tmp_path, *layouts(model))


def test_a_plan_that_loses_a_piece_does_not_pass(model, monkeypatch):
    """The proof can fail: a message left out leaves other bits."""

    def lossy(source, target):
        plan = real(source, target)
        largest = max(plan.transfers, key=lambda transfer: transfer.box.numel, default=None)
        if largest is None:
            return plan
        less = replace(largest, names=largest.names[:-1])
        return replace(plan, transfers=tuple(less if s is largest else s for s in plan.transfers))

    real = checking.plan_reshard
    monkeypatch.setattr(checking, "plan_reshard", lossy)
    with pytest.raises(ReshardError, match="holds other bits"):
        check_conversion(model, *layouts(model))


def test_bits_that_moved_within_a_tensor_are_found():
    """A sum of the bits is the same for both; the comparison is of every one."""
    whole = torch.eye(64, dtype=torch.float64)
    layout = replicated_layout({"weight": (64, 64)}, [0])
    checking._compare(whole, "weight", layout, {0: [whole.clone()]})
    for moved in (whole.flip(0), whole.roll(3, 0), -whole):
        with pytest.raises(ReshardError, match="rank 0 holds other bits of 'weight'"):
            checking._compare(whole, "weight", layout, {0: [moved]})
