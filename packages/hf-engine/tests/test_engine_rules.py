"""Rules of the engines for a model by its files alone: families, sizes and kernels that they run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_testing.engine_families import write_engine_family
from hf_engine.model_directory import read_model_directory
from hf_engine.rollout.engine_rules import check_sglang_runs, check_vllm_runs, window_override
from hf_engine.testing import write_tiny_family, write_tiny_model
from hf_protocols import ModelError


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model", tie_embeddings=False)


def change(directory, **entries):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(("family", "seen"), [("cohere2", {"sliding_window": 7}), ("mistral", {})])
def test_engines_see_the_window_of_cohere2_without_the_token(tmp_path, family, seen):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "sliding_window": 8}))
    assert window_override(read_model_directory(tmp_path, needs_weights=False)) == seen


@pytest.mark.parametrize(
    ("rule", "config", "on_cpu", "message"),
    [
        (check_vllm_runs, {"head_dim": 48}, True, r"has head_dim=48; vLLM on a CPU runs [32, 64, 80"),
        (check_vllm_runs, {"head_dim": 48}, False, None),
        (check_vllm_runs, {"family": "mixtral"}, True, None),
        (check_vllm_runs, {"family": "qwen2", "num_attention_heads": 4}, False, "heads of [16], its config says 32"),
        (check_vllm_runs, {"family": "qwen2"}, True, None),
        (check_vllm_runs, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, False, "has rope_type=dynamic"),
        (check_vllm_runs, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, True, None),
        (check_sglang_runs, {"family": "mixtral"}, True, "a mixture of experts: SGLang's experts are wrong on a CPU"),
        (check_sglang_runs, {"family": "mixtral"}, False, None),
        (check_sglang_runs, {"family": "mistral", "sliding_window": 8}, False, "sliding_window=8, which SGLang leaves"),
        (
            check_sglang_runs,
            {"family": "mistral", "sliding_window": 8},
            True,
            "at most 8 positions (rollout.options.max_positions",
        ),
        (check_sglang_runs, {"family": "mistral", "sliding_window": None}, True, None),
        (check_sglang_runs, {"family": "mistral", "max_position_embeddings": 4097}, True, "has sliding_window=4096"),
        (check_sglang_runs, {"family": "qwen2", "sliding_window": 8, "use_sliding_window": False}, True, None),
    ],
)
def test_engines_say_from_files_what_they_do_not_run(tmp_path, rule, config, on_cpu, message):
    files = read_model_directory(write_tiny_model(tmp_path, **config))
    if message is None:
        assert rule(files, on_cpu=on_cpu) == files.require_shape()
        return
    with pytest.raises(ModelError) as refused:
        rule(files, on_cpu=on_cpu)
    assert message in str(refused.value) and "'transformers'" in str(refused.value)


def test_engines_want_a_family_whose_layout_is_known(model):
    change(model, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match=r"its files hold 'transformer.*' in other parts .* 'transformers'"):
        check_vllm_runs(read_model_directory(model), on_cpu=False)


def test_engines_leave_out_layers_that_predict_further_tokens(tmp_path):
    model = write_tiny_family(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert check_vllm_runs(read_model_directory(model), on_cpu=False).num_layers == 2
    change(model, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"holds model.layers.2.eh_proj.weight \(1 such\), for which a Glm4MoeFor"):
        check_vllm_runs(read_model_directory(model), on_cpu=False)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", None),
        ("phi3", None),
        ("olmo2", None),
        ("glm4_moe", None),
        ("gpt_oss", None),
        ("apertus", None),
        ("cohere2", None),
        ("deepseek_v3", None),
        ("phimoe", "is a PhimoeForCausalLM, which vLLM does not run"),
    ],
)
def test_vllm_takes_families_that_it_loads(tmp_path, family, message):
    files = read_model_directory(write_tiny_family(tmp_path, family))
    if message is None:
        assert check_vllm_runs(files, on_cpu=False).is_generic
        return
    with pytest.raises(ModelError, match=message) as refused:
        check_vllm_runs(files, on_cpu=False)
    assert "'transformers'" in str(refused.value)


@pytest.mark.parametrize(
    ("family", "config", "ranks", "message"),
    [
        ("gpt_oss", {}, 1, None),
        (
            "gpt_oss",
            {},
            2,
            "experts of intermediate_size=96, 48 on each rank with gen_tp_size=2; vLLM on a CPU runs mult",
        ),
        ("gpt_oss", {"intermediate_size": 128}, 2, None),
        ("mixtral", {}, 2, None),
        (
            "mixtral",
            {"hidden_size": 48},
            1,
            "has hidden_size=48; vLLM on a CPU runs experts where it is a multiple of",
        ),
    ],
)
def test_experts_without_a_kernel_on_a_cpu_are_refused(tmp_path, family, config, ranks, message):
    files = read_model_directory(write_engine_family(tmp_path, family, **config))
    check_vllm_runs(files, on_cpu=False, gen_tp_size=ranks)
    if message is None:
        check_vllm_runs(files, on_cpu=True, gen_tp_size=ranks)
        return
    with pytest.raises(ModelError, match=message) as refused:
        check_vllm_runs(files, on_cpu=True, gen_tp_size=ranks)
    assert "'transformers'" in str(refused.value)


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "on_cpu", "message"),
    [
        ({}, True, None),
        ({"kv_lora_rank": 256}, True, "has kv_lora_rank=256 and qk_rope_head_dim=64; vLLM on a CPU runs latent"),
        ({"kv_lora_rank": 256}, False, None),
        ({"rope_parameters": PLAIN}, True, "without rope_type='yarn': on a CPU its log-probs in"),
        ({"rope_parameters": PLAIN}, False, None),
        (
            {"rope_parameters": {**YARN, "truncate": False}},
            False,
            "has truncate=false in rope_parameters, which vLLM ignores in latent",
        ),
    ],
)
def test_latent_attention_in_vllm_is_refused_where_it_is_wrong(tmp_path, config, on_cpu, message):
    files = read_model_directory(write_engine_family(tmp_path, "deepseek_v3", **config))
    if message is None:
        assert check_vllm_runs(files, on_cpu=on_cpu).is_generic
        return
    with pytest.raises(ModelError, match=message) as refused:
        check_vllm_runs(files, on_cpu=on_cpu)
    assert "'transformers'" in str(refused.value)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("olmoe", None),
        ("llama4_text", "of model_type='llama4_text', whose weights SGLang's loader was not seen to take"),
        ("bloom", "is a BloomForCausalLM, which SGLang does not run"),
        ("phi", "has a bias in its output layer, which SGLang leaves out"),
        ("gemma2", None),
        ("exaone4", None),
    ],
)
def test_sglang_takes_families_that_its_loaders_know(tmp_path, family, message):
    files = read_model_directory(write_tiny_family(tmp_path, family))
    if message is None:
        assert check_sglang_runs(files, on_cpu=False).is_generic
        return
    with pytest.raises(ModelError, match=message) as refused:
        check_sglang_runs(files, on_cpu=False)
    assert "'transformers'" in str(refused.value)


def test_sglang_takes_a_window_that_its_positions_do_not_exceed(tmp_path):
    files = read_model_directory(write_tiny_model(tmp_path, family="mistral", sliding_window=8))
    check_sglang_runs(files, on_cpu=True, max_positions=8)
    with pytest.raises(ModelError, match="has sliding_window=8, which SGLang leaves out"):
        check_sglang_runs(files, on_cpu=True, max_positions=9)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", "has attn_logit_softcapping in its configuration, which SGLang has on devices only"),
        ("exaone4", "is a Exaone4ForCausalLM, which SGLang runs on devices only"),
        ("olmo3", None),
    ],
)
def test_sglang_refuses_on_a_cpu_what_has_no_kernel_there(tmp_path, family, message):
    files = read_model_directory(write_tiny_family(tmp_path, family))
    if message is None:
        assert check_sglang_runs(files, on_cpu=True).is_generic
        return
    with pytest.raises(ModelError, match=message):
        check_sglang_runs(files, on_cpu=True)
