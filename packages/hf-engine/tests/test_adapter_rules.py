"""Support for unmerged adapters in each backend, and the layout that holds them."""

from __future__ import annotations

import json

import pytest

from hf_engine import LoraConfig, find_merging_reason, load_rollout_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.models.adapter_rules import add_adapters_apart, find_engine_refusal, is_adapter_name
from hf_engine.resharding.model_layouts import generation_layout
from hf_engine.rollout.sglang._adapters import find_partial_stack
from hf_engine.testing import write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

LORA = LoraConfig(rank=3)


def test_every_rank_holds_both_factors_whole(tmp_path):
    shape = read_model_directory(write_tiny_model(tmp_path)).require_shape()
    base = generation_layout(shape, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)), dtype="bfloat16")
    layers = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")]
    layout = add_adapters_apart(base, layers, LORA)
    sizes = [base.shapes[f"{layer}.weight"] for layer in layers]
    for rank in (0, 1):
        added = 2 * LORA.rank * sum(rows + columns for rows, columns in sizes)
        assert layout.held_bytes(rank) == base.held_bytes(rank) + added
    assert {name for name in layout.shapes if is_adapter_name(name)} == layout.shapes.keys() - base.shapes.keys()


@pytest.mark.parametrize(
    ("family", "rank", "says"),
    [
        ("llama", 16, None),
        ("qwen2", 600, "rank = 600 is above 512, the largest of this engine"),
        ("mixtral", 16, "'mixtral' is a mixture of experts"),
        ("gpt2", 16, "adapters of model_type 'gpt2' were not tried in this engine"),
    ],
)
def test_engines_take_adapters_of_known_dense_families(tmp_path, family, rank, says):
    if family == "gpt2":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    else:
        write_tiny_model(tmp_path, family=family)
    files = read_model_directory(tmp_path, needs_weights=False)
    assert find_engine_refusal(files, LoraConfig(rank=rank)) == says


def test_other_backends_are_sent_merged_weights(tmp_path):
    files = read_model_directory(write_tiny_model(tmp_path))
    reasons = [
        find_merging_reason(load_rollout_backend(name), files, LORA, {}, on_cpu=True)
        for name in ("transformers", "server")
    ]
    assert reasons == [None, "this backend takes no adapters"]


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (None, None),
        (("o_proj", "layers.1.mlp.down_proj", "q_proj", "k_proj", "v_proj"), None),
        (("q_proj", "v_proj"), "targets has q_proj, v_proj, and SGLang takes q_proj, k_proj, v_proj of every layer"),
        (("layers.0.mlp.gate_proj", "layers.1.mlp.up_proj"), "targets has layers.0.mlp.gate_proj, layers.1.mlp.up_pro"),
    ],
)
def test_sglang_takes_whole_stacks(targets, says):
    found = find_partial_stack(LoraConfig(targets=targets))
    assert found is None if says is None else str(found).startswith(says)
