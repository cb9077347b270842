"""Costs of adapters on a frozen base, against counts made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hf_mapper import (
    AdapterSpec,
    ClusterSpec,
    WorkloadSpec,
    count_adapter_parameters,
    estimate_memory,
    map_dataflow,
    read_config,
    simulate_training,
)
from hf_mapper.simulators.layouts import read_generation, read_layouts
from hf_mapper.simulators.memory import received_weight_bytes
from hf_mapper.software import SoftwareSpec
from hf_protocols import (
    AdapterEstimate,
    ConfigError,
    Dataflow,
    GenerationSpec,
    MappingPlan,
    ModelCall,
    ModelShape,
    ParallelSpec,
)

LLAMA = ModelShape.preset("llama-2-7b")
WHOLE = WorkloadSpec(global_batch=64, prompt_tokens=512, response_tokens=512)
ADAPTED = dataclasses.replace(WHOLE, adapters=AdapterSpec(rank=16))
ALL_LINEAR = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
"""Four square matrices and three of the feed-forward layers, in each of 32 layers."""


def test_both_factors_of_every_target_are_counted() -> None:
    assert count_adapter_parameters(LLAMA, AdapterSpec(rank=16)) == ALL_LINEAR
    two = AdapterSpec(rank=8, targets=("q_proj", "layers.3.mlp.down_proj"))
    assert count_adapter_parameters(LLAMA, two) == 8 * (32 * (4096 + 4096) + (4096 + 11008))
    mixtral = ModelShape.preset("mixtral-8x7b")
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert count_adapter_parameters(mixtral, AdapterSpec(rank=1)) == 32 * attention, "experts are left out"


def test_targets_that_no_trained_model_has_are_refused() -> None:
    models = dict.fromkeys(("actor", "reference"), LLAMA)
    misspelt = dataclasses.replace(WHOLE, adapters=AdapterSpec(rank=16, targets=("q_prj",)))
    message = r"targets=\['q_prj'\] name no linear layer of actor llama-2-7b. Did you mean q_proj"
    with pytest.raises(ConfigError, match=message):
        map_dataflow(Dataflow.preset("grpo"), models, ClusterSpec.host(2, 2**40), misspelt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_base_has_no_gradients_and_no_optimizer_state(dtype: str) -> None:
    spec, cluster = ParallelSpec(dp_size=8), ClusterSpec.host(8, 2**40)
    workload = dataclasses.replace(ADAPTED, dtype=dtype)
    found = estimate_memory(LLAMA, cluster, spec, workload, calls=["training"], backend="fsdp").breakdown
    assert found["weight_bytes"] == pytest.approx(4 * (LLAMA.num_parameters + ALL_LINEAR) / 8)
    assert found["gradient_bytes"] == pytest.approx(4 * ALL_LINEAR / 8)
    assert found["optimizer_bytes"] == pytest.approx(8 * ALL_LINEAR / 8)


def test_a_backward_pass_without_weight_gradients_is_shorter() -> None:
    spec, cluster = ParallelSpec(dp_size=4), ClusterSpec.host(4, 2**40)
    for software in (SoftwareSpec(gathers="layer"), SoftwareSpec(gathers="model")):
        whole, adapted = (
            simulate_training(LLAMA, cluster, spec, dataclasses.replace(each, software=software, recompute="none"),
                              backend="fsdp")
            for each in (WHOLE, ADAPTED)
        )  # fmt: skip
        ratio = adapted.breakdown["compute_s"] / whole.breakdown["compute_s"]
        assert 2 / 3 < ratio < 0.68
        assert adapted.breakdown["optimizer_s"] < whole.breakdown["optimizer_s"] / 50
        assert adapted.memory_bytes <= whole.memory_bytes


def test_the_plan_says_what_is_trained() -> None:
    calls = [
        ModelCall(role="actor", method="generate", kind="generation", reads=("prompts",), writes=("responses",)),
        ModelCall(role="actor", method="update", kind="training", reads=("responses",), writes=()),
    ]
    tiny = dataclasses.replace(LLAMA, num_layers=2, hidden_size=64, intermediate_size=128, vocab_size=256)
    given = (Dataflow(name="one", calls=tuple(calls)), {"actor": tiny}, ClusterSpec.host(2, 2**34))
    plans = [map_dataflow(*given, each, backends={"actor": ("fsdp",)}) for each in (WHOLE, ADAPTED)]
    assert plans[0].estimates.adapters is None
    assert "adapters" not in plans[0].to_json()
    count = count_adapter_parameters(tiny, AdapterSpec(rank=16))
    assert plans[1].estimates.adapters == AdapterEstimate(rank=16, parameters={"actor": count})
    assert MappingPlan.from_json(plans[1].to_json()) == plans[1]


def test_adapters_that_are_sent_alone_are_all_that_is_received() -> None:
    layouts = read_layouts(LLAMA, ParallelSpec(dp_size=4), "fsdp")
    generation = read_generation(layouts, GenerationSpec(gen_tp_size=2), 1)
    found = {}
    for sends in ("both", "adapters", "merged"):
        workload = dataclasses.replace(ADAPTED, dtype="bfloat16", adapters=AdapterSpec(rank=16, sends=sends))
        found[sends] = float(received_weight_bytes(LLAMA, layouts, generation, workload))
    assert found["adapters"] == pytest.approx(2 * ALL_LINEAR * 3 / 4)
    assert found["merged"] == pytest.approx(2 * LLAMA.num_parameters / 2 * 3 / 4)
    assert found["both"] == pytest.approx(found["merged"] + found["adapters"] / 2)
    with pytest.raises(ConfigError, match=r"sends='nothing' is not one of 'both', 'adapters', 'merged'"):
        AdapterSpec(rank=16, sends="nothing")  # type: ignore[arg-type]


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=0 must be a whole number"):
        AdapterSpec(rank=0)


def test_a_problem_file_names_adapters(tmp_path) -> None:
    (tmp_path / "problem.toml").write_text(
        'dataflow = "ppo"\n[models]\nactor = "llama-2-7b"\ncritic = "llama-2-7b"\nreference = "llama-2-7b"\n'
        'reward = "llama-2-7b"\n[cluster]\n[[cluster.machines]]\ngpu = "a100-80"\nnum_gpus = 8\n'
        "[workload]\nglobal_batch = 8\nprompt_tokens = 8\nresponse_tokens = 8\n"
        '[workload.adapters]\nrank = 4\ntargets = ["q_proj"]\n'
    )
    assert read_config(tmp_path / "problem.toml").workload.adapters == AdapterSpec(rank=4, targets=("q_proj",))
