"""Names of tensors in files, against the files that transformers writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_engine import derive_shape
from hf_engine.model_directory import read_model_directory
from hf_engine.models.conversions import buffers_in_files, read_file_names
from hf_engine.models.shapes import derive_layout
from hf_engine.models.stacked_experts import FilePart, layout_in_files, shapes_in_files, tensors_in_files
from hf_engine.resharding.layouts import fsdp_layout
from hf_engine.resharding.model_layouts import fsdp_model_layout
from hf_engine.resharding.moving import storage_bytes
from hf_engine.testing import TINY_FAMILIES, write_tiny_family
from hf_protocols import ParallelSpec, Topology

EXPERTS = tuple(name for name, config in TINY_FAMILIES.items() if any("expert" in key for key in config))


@pytest.mark.parametrize("family", [*EXPERTS, "gpt_neox", "gpt2", "phi3"])
def test_tensors_have_the_names_and_contents_of_the_files(tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, family), dtype=torch.float32)
    files = load_file(tmp_path / "model.safetensors")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named = tensors_in_files(read_file_names(model), parameters)
    assert storage_bytes(named.values()) == storage_bytes(parameters.values())
    buffers = buffers_in_files(model)
    assert {**named, **buffers}.keys() == files.keys()
    assert all(torch.equal({**named, **buffers}[name], tensor) for name, tensor in files.items())
    shape, state = derive_layout(read_model_directory(tmp_path))
    assert shape.parameters() == {name: tuple(tensor.shape) for name, tensor in named.items()}
    assert state == buffers.keys()


@pytest.mark.parametrize("size", [1, 3])
def test_a_plan_knows_which_experts_a_rank_holds(tmp_path, size):
    """The layout that is planned from files is that of the parameters that FSDP cuts."""
    model = AutoModelForCausalLM.from_pretrained(write_tiny_family(tmp_path, "olmoe"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = layout_in_files(read_file_names(model), fsdp_layout(shapes, range(size)))
    planned = fsdp_model_layout(
        derive_shape(read_model_directory(tmp_path)), Topology(ParallelSpec(dp_size=size)), dtype=held.dtype
    )
    for rank in range(size):
        assert dict(held.boxes_of(rank)) == dict(planned.boxes_of(rank))


def test_what_files_hold_merged_keeps_the_name_of_its_module():
    """A query projection and a gate that files hold as one tensor: no view of either is that tensor."""
    config = AutoConfig.for_model(
        "hrm_text", vocab_size=16, hidden_size=16, intermediate_size=16, num_attention_heads=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = read_file_names(model)
    merged = next(name for name, _ in model.named_parameters() if name.endswith("gate_proj.weight"))
    assert merged not in names
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes_in_files(names, shapes)[merged] == shapes[merged]


def test_a_module_of_another_library_keeps_its_names():
    model = torch.nn.Linear(2, 3)
    assert read_file_names(model) == {}
    assert tensors_in_files({}, {"weight": model.weight})["weight"] is model.weight
    assert tensors_in_files({"weight": (FilePart("w"),)}, {"weight": model.weight})["w"] is model.weight
