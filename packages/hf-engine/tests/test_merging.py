"""Whole models made of adapters, against peft's own sum of base and adapter on plain transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from peft import LoraConfig as PeftConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_engine import merge_adapter
from hf_engine.model_directory import read_model_directory
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, ModelError

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def write_adapter_of(base, directory, **options):
    """Writes an adapter with peft, whose factors are all drawn."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = PeftConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    config.base_model_name_or_path = str(base)
    get_peft_model(model, config).save_pretrained(directory)
    return directory


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def is_merged_as_peft_does(adapter, target):
    """True if the merged model computes what peft does, and something else than the base."""
    merge_adapter(adapter, target)
    wanted = logits_of(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32))
    found, base = (
        logits_of(AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32))
        for each in (target, read_base(adapter))
    )
    is_close = torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    return is_close and float((wanted - base).abs().max()) > 1e-2


def read_base(adapter):
    return json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)  # fmt: skip
def test_adapters_of_a_tied_head_are_merged_for_one_use(tmp_path, options):
    """Embedding and head share their memory in the base: an adapter of one must not change the other."""
    base = write_tiny_model(tmp_path / "base", tie_embeddings=True)
    assert is_merged_as_peft_does(write_adapter_of(base, tmp_path / "adapter", **options), tmp_path / "merged")


def test_merged_models_without_adapted_head_stay_tied(tmp_path):
    base = write_tiny_model(tmp_path / "base", tie_embeddings=True)
    merge_adapter(write_adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"]), tmp_path / "merged")
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def test_adapters_of_stacked_experts_are_merged(tmp_path):
    base = write_tiny_model(tmp_path / "base", family="mixtral")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=experts)
    assert is_merged_as_peft_does(adapter, tmp_path / "merged")


@pytest.fixture(scope="module")
def base_and_adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = write_tiny_model(folder / "base")
    return base, write_adapter_of(base, folder / "adapter", target_modules=["q_proj"])


def copy_of(base_and_adapter, folder):
    return shutil.copytree(base_and_adapter[1], folder / "adapter")


def test_adapter_next_to_its_bases_config_is_merged(base_and_adapter, tmp_path):
    adapter = copy_of(base_and_adapter, tmp_path)
    shutil.copy(base_and_adapter[0] / "config.json", adapter)
    assert is_merged_as_peft_does(adapter, tmp_path / "merged")


def test_adapter_next_to_whole_weights_is_refused(base_and_adapter, tmp_path):
    """transformers would load the adapter's base, and engines these weights."""
    adapter = copy_of(base_and_adapter, tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base_and_adapter[0] / name, adapter)
    with pytest.raises(ModelError, match=r"next to a whole model's weights.*\. Move one of the two to a directory of"):
        read_model_directory(adapter)


def test_adapters_that_lack_factors_are_refused(base_and_adapter, tmp_path):
    adapter = copy_of(base_and_adapter, tmp_path)
    path = adapter / "adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if ".layers.0." in name}
    save_file(kept, path)
    with pytest.raises(BackendError, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight \(2 such\), which its file"):
        merge_adapter(adapter, tmp_path / "merged")


def test_adapters_of_another_base_are_refused(base_and_adapter, tmp_path):
    adapter = copy_of(base_and_adapter, tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace(".layers.1.", ".layers.7."): tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(BackendError, match=r"no place for \S*layers\.7\.\S* \(2 such\)\. Correct base_model_name"):
        merge_adapter(adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-8], r"adapter_model\.safetensors cannot be read: it has .* Fetch it again"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", r"adapter_model\.safetensors .*[Gg]it.?LFS"),
    ],
)
def test_damaged_adapters_are_named(base_and_adapter, tmp_path, damage, message):
    adapter = copy_of(base_and_adapter, tmp_path)
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        merge_adapter(adapter, tmp_path / "merged", label="model.path = 'adapter'")
