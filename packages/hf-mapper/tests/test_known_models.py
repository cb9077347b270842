"""Models that tables and configurations give by a few sizes can be cut like those they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu, map_dataflow
from hf_mapper._known_models import build_gpt, find_model, guess_model
from hf_mapper.search.parallelism import parallel_layouts
from hf_protocols import Dataflow, ModelShape

MACHINE = MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=8)
WORKLOAD = WorkloadSpec(global_batch=512, prompt_tokens=1024, response_tokens=1024)


def find_sizes(model: ModelShape) -> set[tuple[int, int]]:
    """Every pp and tp that divide the model, over 64 GPUs."""
    layouts = parallel_layouts(model, MACHINE, 64, WORKLOAD, ["megatron"], trained=True)
    return {(layout.pp_size, layout.tp_size) for layout, _ in layouts}


@pytest.mark.parametrize("hidden", [768, 2048, 2304, 4096, 5120, 6144, 12288, 20480, 25600])
def test_the_mlp_of_a_gpt_can_be_cut_as_its_heads_are(hidden: int) -> None:
    """As many weights as two matrices of 4 h, h, to less than a percent."""
    model = build_gpt("gpt", num_layers=40, hidden_size=hidden, num_heads=hidden // 32)
    assert {tp for _, tp in find_sizes(model)} == {1, 2, 4, 8}
    assert 3 * model.intermediate_size == pytest.approx(8 * hidden, rel=0.01)


def test_a_gpt_of_any_width_has_an_mlp() -> None:
    assert build_gpt("gpt", num_layers=1, hidden_size=2, num_heads=1).intermediate_size > 0


@pytest.mark.parametrize(
    ("billions", "layers", "hidden"),
    [
        (0.125, 12, 768), (0.35, 24, 1024), (0.76, 24, 1536), (1.3, 24, 2048), (2.7, 32, 2560), (6.7, 32, 4096),
        (13, 40, 5120), (30, 48, 7168), (66, 64, 9216), (175, 96, 12288), (1008, 128, 25600),
    ],
)  # fmt: skip
def test_published_gpts_are_guessed_by_their_parameters(billions: float, layers: int, hidden: int) -> None:
    """Brown et al., Table 2.1; OPT for 30 and 66 billion; Narayanan et al. for a trillion."""
    model = guess_model("guess", 1e9 * billions)
    assert (model.num_layers, model.hidden_size) == (layers, hidden)
    assert model.num_parameters == pytest.approx(1e9 * billions, rel=0.02)


@pytest.mark.parametrize("billions", [0.25, 0.5, 1, 1.5, 3, 4, 7, 8, 9.5, 14, 20, 32, 34, 40, 50, 70, 100, 405, 530])
def test_a_guess_can_be_cut_and_has_the_shape_of_a_model(billions: float) -> None:
    model = guess_model("guess", 1e9 * billions)
    tensor_sizes = {1, 2, 4} if billions < 2 else {1, 2, 4, 8}
    assert {(pp, tp) for pp in (1, 2, 4) for tp in tensor_sizes} <= find_sizes(model)
    assert model.num_parameters == pytest.approx(1e9 * billions, rel=0.02)
    assert 1.5 < model.intermediate_size / model.hidden_size < 4.5
    assert 32 <= model.hidden_size / model.num_layers <= 256


@pytest.mark.parametrize("parameters", [1, 1e5, 1e6, 1e7, 3e7, 9e14])
def test_any_number_of_parameters_has_a_guess(parameters: float) -> None:
    assert guess_model("guess", parameters).num_layers > 0


@pytest.mark.parametrize(
    ("model", "named", "apart"),
    [
        (build_gpt("gpt", num_layers=40, hidden_size=5120, num_heads=40), "llama-2-13b", 0.1),
        (guess_model("guess", 13e9), "llama-2-13b", 0.1),
        # Llama's eight KV heads take a part of the memory that a GPT's 72 take.
        (guess_model("guess", 70e9), "llama-2-70b", 0.4),
    ],
)
def test_plain_sizes_plan_as_the_named_model_does(model: ModelShape, named: str, apart: float) -> None:
    cluster = ClusterSpec(machines=(MACHINE,), inter_bandwidth_bytes_per_s=100e9)
    flow = Dataflow.preset("ppo")
    plain_s, named_s = (
        map_dataflow(flow, dict.fromkeys(flow.roles, shape), cluster, WORKLOAD).estimates.iteration_s
        for shape in (model, ModelShape.preset(named))
    )
    assert plain_s == pytest.approx(named_s, rel=apart)


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("Qwen/Qwen2-72B", "qwen2-72b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen 2.5 32B", "qwen2.5-32b"),
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen3_30B_a3B (tokendrop)", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("llama-3-405b", "llama-3-405b"),
        ("meta-llama/Llama-3.1-405B", "llama-3-405b"),
        ("LLAMA3.1_405B", "llama-3-405b"),
        ("Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("Meta-Llama-3.1-8B", "llama-3-8b"),
    ],
)
def test_models_are_known_as_tables_write_them(written: str, preset: str) -> None:
    found = find_model(written)
    assert found is not None
    assert replace(found, max_positions=1) == replace(ModelShape.preset(preset), max_positions=1)


def test_a_family_and_its_size_are_found_apart_as_together() -> None:
    blank, hyphen = (find_model(written) for written in ("Qwen 1.5 7B", "Qwen1.5-7B"))
    assert blank is not None
    assert hyphen == replace(blank, name="Qwen1.5-7B")


@pytest.mark.parametrize("written", ["Qwen2.5-8B", "qwen", "qwen3-coder-480b", "gpt", "Llama-3.2-1B", ""])
def test_other_models_are_not_mistaken(written: str) -> None:
    assert find_model(written) is None
