"""Runs that train low-rank adapters: what they leave, what they share with the reference, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_algorithms.config import load_config
from hf_algorithms.data import load_rows
from hf_algorithms.dataflow import derive_dataflow
from hf_algorithms.preflight.checks import check_run
from hf_engine import (
    HybridEngine,
    LoraConfig,
    SamplingParams,
    TrainConfig,
    load_rollout_backend,
    load_train_backend,
)
from hf_engine.model_directory import read_model_directory
from hf_engine.models.lora import adapters_off
from hf_engine.rollout.transformers import TransformersBackend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.training.fsdp import FsdpBackend
from hf_mapper import AdapterSpec, ClusterSpec, WorkloadSpec, estimate_memory
from hf_mapper.simulators.layouts import read_generation, read_layouts
from hf_mapper.simulators.memory import received_weight_bytes
from hf_protocols import GenerationSpec, ParallelSpec, Topology
from small_runs import Outcome, read_metrics

Command = Callable[..., Outcome]
IDS = torch.tensor([[3, 4, 5, 6]])
GRPO = ("--set", "algorithm.name=grpo", "--set", "rollout.samples_per_prompt=2")


@pytest.fixture
def lora_config(small_config: Path) -> Path:
    small_config.write_text(small_config.read_text() + "[model.lora]\nrank = 4\nalpha = 8.0\n")
    return small_config


def test_a_run_leaves_an_adapter_and_the_next_one_builds_on_it(hybridflow: Command, lora_config: Path) -> None:
    """GRPO from a warm start; then PPO, whose critic has adapters too, from the adapter that GRPO left."""
    folder = lora_config.parent
    options = (*GRPO, "--set", "model.lora.save_merged=true", "--set", "optimizer.actor_learning_rate=1e-2")
    done = hybridflow("train", lora_config, *options)
    assert done.exit_code == 0, done.errors
    run = folder / "run"
    assert set(json.loads((run / "plan.json").read_text())["models"]) == {"actor", "reward", "advantage"}
    first, last = read_metrics(run)
    assert first["kl/k3"] == 0.0, "the reference is the model that the iterations started from"
    assert last["kl/k1"] != 0.0 and json.loads((run / "summary.json").read_text())["kl_to_reference"]["value"] > 0
    adapter = AutoPeftModelForCausalLM.from_pretrained(run / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(run / "model" / "merged").eval()
    warm = AutoModelForCausalLM.from_pretrained(run / "warm_model").eval()
    with torch.no_grad():
        found, whole, base = (each(input_ids=IDS).logits for each in (adapter, merged, warm))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    assert not torch.allclose(found, base, atol=1e-4)
    with torch.no_grad(), adapter.disable_adapter():
        torch.testing.assert_close(adapter(input_ids=IDS).logits, base)

    given = ("--set", f"model.path={run / 'model'}", "--set", f"run.output_dir={folder / 'next'}")
    done = hybridflow("train", lora_config, *given, "--set", "warm_start.max_steps=0", "--set", "run.iterations=1")
    assert done.exit_code == 0, done.errors
    (only,) = read_metrics(folder / "next")
    assert only["kl/k3"] == 0.0 and only["critic/grad_norm"] > 0
    base = load_file(folder / "next" / "merged_models" / "model" / "model.safetensors")
    for name, tensor in load_file(run / "model" / "merged" / "model.safetensors").items():
        torch.testing.assert_close(base[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_on_ray_train_adapters(
    hybridflow: Command, lora_config: Path, cluster_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO with the actor on two ranks: the adapter that it leaves is what was trained."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # ranks import the reward function
    changes = ("run.executor=ray", f"cluster.address={cluster_address}", "cluster.gpus_per_machine=2")
    changes += ("cluster.call_timeout_s=200", "warm_start.max_steps=0", "optimizer.actor_learning_rate=1e-2")
    done = hybridflow("train", lora_config, *GRPO, *(word for each in changes for word in ("--set", each)))
    assert done.exit_code == 0, done.errors
    run = lora_config.parent / "run"
    assert json.loads((run / "plan.json").read_text())["models"]["actor"]["train"]["dp_size"] == 2
    assert "merged" not in done.output + done.errors, "transformers computes them as they are"
    first, last = read_metrics(run)
    assert first["kl/k3"] == 0.0 and last["kl/k1"] != 0.0
    adapter = AutoPeftModelForCausalLM.from_pretrained(run / "model").eval()
    factors = load_file(run / "model" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in factors.items() if ".lora_B." in name)
    with torch.no_grad():
        found = adapter(input_ids=IDS).logits
        with adapter.disable_adapter():
            assert not torch.allclose(found, adapter(input_ids=IDS).logits, atol=1e-4)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_run_sends_vllm_the_adapters_alone(hybridflow: Command, lora_config: Path) -> None:
    changes = ("rollout.backend=vllm", "rollout.options.cache_bytes=16777216", "warm_start.max_steps=0")
    changes += ("model.hidden_size=64", "model.num_heads=2", "optimizer.actor_learning_rate=1e-2")
    done = hybridflow("train", lora_config, *(word for each in changes for word in ("--set", each)))
    assert done.exit_code == 0, done.errors
    assert "merged" not in done.output + done.errors
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in read_metrics(lora_config.parent / "run"))


def test_a_sampler_that_forgets_the_adapters_is_found_at_once(
    hybridflow: Command, lora_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TransformersBackend.generate

    def generate_from_base(self: Any, batch: Any, sampling: SamplingParams) -> Any:
        with adapters_off(self._model):
            return generate(self, batch, sampling)

    monkeypatch.setattr(TransformersBackend, "generate", generate_from_base)
    done = hybridflow("train", lora_config, *GRPO, "--set", "warm_start.max_steps=0")
    assert done.exit_code == 1
    assert "the adapters of [model.lora] do not reach generation" in done.errors
    assert not read_metrics(lora_config.parent / "run")


@pytest.mark.parametrize("command", ["reward-model", "dpo", "sft"])
def test_supervised_commands_leave_adapters(
    hybridflow: Command, addition_data: Path, tmp_path: Path, command: str
) -> None:
    rows = load_rows(addition_data / "train.jsonl")[:32]
    records = [{"prompt": row.prompt, "chosen": row.answer, "rejected": f"{row.answer}7"} for row in rows]
    if command == "sft":
        records = [{"prompt": row.prompt, "answer": row.answer} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "config.toml").write_text(
        f'[run]\noutput_dir = "{tmp_path}/run"\niterations = 2\nexecutor = "in_process"\n'
        f'[data]\ntrain = "{tmp_path}/rows.jsonl"\n[model]\ntokenizer = "characters"\nhidden_size = 32\n'
        "intermediate_size = 64\nnum_layers = 1\nnum_heads = 1\nmax_positions = 16\n"
        "[model.lora]\nrank = 2\nsave_merged = true\n[algorithm]\nbatch_size = 16\n"
        "[optimizer]\ncritic_learning_rate = 1e-2\nactor_learning_rate = 1e-2\n"
        '[training]\nshard = "root"\n[cluster]\ngpus_per_machine = 1\n'
    )
    done = hybridflow(command, tmp_path / "config.toml")
    assert done.exit_code == 0, done.errors
    model = tmp_path / "run" / "model"
    scores = command == "reward-model"
    load, load_merged = (
        (AutoPeftModelForSequenceClassification, AutoModelForSequenceClassification)
        if scores
        else (AutoPeftModelForCausalLM, AutoModelForCausalLM)
    )
    adapter = load.from_pretrained(model, **({"num_labels": 1} if scores else {})).eval()
    merged = load_merged.from_pretrained(model / "merged").eval()
    with torch.no_grad():
        found, whole = (each(input_ids=IDS).logits for each in (adapter, merged))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    factors = load_file(model / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in factors.items() if ".lora_B." in name)
    placed = set(json.loads((tmp_path / "run" / "plan.json").read_text())["models"])
    assert "reference" not in placed, "the policy plays it"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["model.lora.targets=[]"],
            "model.lora.targets=[]: names no layer. Name some, or leave it out for all",
        ),
        (
            ["model.lora.targets=['q_prj']"],
            "model.lora.targets=['q_prj']: no linear layer of the model is named 'q_prj'. Did you mean q_proj",
        ),
        (["roles.critic.backend='megatron'"], "roles.critic.backend = 'megatron': it trains whole weights only"),
        (["model.lora.rank=0"], "model.lora.rank = 0: must be at least 1"),
        (["model.lora.ranks=2"], "model.lora.ranks"),
        (["model.path='{folder}/alone'"], "model.path = '{folder}/alone': is an adapter of 'absent/base'"),
    ],
)
def test_wrong_adapters_are_one_line_before_anything_starts(
    hybridflow: Command, lora_config: Path, options: list[str], says: str
) -> None:
    folder = lora_config.parent
    (folder / "alone").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "absent/base"}
    (folder / "alone" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "alone" / "adapter_model.safetensors").touch()
    given = [part for each in options for part in ("--set", each.format(folder=folder))]
    done = hybridflow("train", lora_config, *given)
    assert done.exit_code == 2
    assert says.format(folder=folder) in done.errors and "Traceback" not in done.errors
    assert not (folder / "run").exists()


def test_a_reference_with_a_path_of_its_own_keeps_its_role(lora_config: Path, tmp_path: Path) -> None:
    shared = load_config(lora_config).recipe
    assert "reference" not in shared.model_roles and shared.played["reference"][0] == "actor"
    own = load_config(lora_config, ["roles.reference.dtype='bfloat16'"])
    assert "reference" in own.recipe.model_roles and not own.recipe.played
    calls = derive_dataflow(shared, load_config(lora_config).algorithm, SamplingParams(max_new_tokens=2), num_prompts=2)
    assert ("actor", "compute_base_logprobs") in {(call.role, call.method) for call in calls.calls}
    inputs, _ = check_run(load_config(lora_config), tmp_path / "elsewhere" / "model")
    assert set(inputs.models) == {"actor", "critic"}


def count_bytes(directory: Path) -> dict[str, float]:
    """Of one of two ranks: what its backend holds, and what the way into generation receives."""
    topology, lora = Topology(ParallelSpec(dp_size=2), GenerationSpec()), LoraConfig(rank=4)
    train = load_train_backend("fsdp").build(
        directory, topology=topology, config=TrainConfig(learning_rate=1e-3, lora=lora)
    )
    engine = HybridEngine(
        train, load_rollout_backend("transformers").build(directory, topology=topology, lora=lora), topology
    )
    weights = train.local_weights()
    assert isinstance(train, FsdpBackend) and train._optimizer is not None
    return {
        "weight_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "gradient_bytes": sum(tensor.nbytes for name, tensor in weights.items() if ".lora_" in name),
        "optimizer_bytes": sum(tensor.nbytes for tensor in train._optimizer.moments()),
        "received_bytes": engine.plan.recv_bytes[dist.get_rank()],
    }


@pytest.mark.slow
def test_the_mapper_prices_what_the_engine_holds_and_receives(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", family="qwen2")
    with LocalRanks(2) as ranks:
        held = ranks.run(count_bytes, directory)
    shape, spec = read_model_directory(directory).require_shape(), ParallelSpec(dp_size=2)
    workload = WorkloadSpec(
        global_batch=2, prompt_tokens=4, response_tokens=4, dtype="float32", adapters=AdapterSpec(rank=4)
    )
    cluster = ClusterSpec.host(2, 2**34)
    found = estimate_memory(shape, cluster, spec, workload, calls=["training"], backend="fsdp").breakdown
    layouts = read_layouts(shape, spec, "fsdp")
    received = received_weight_bytes(shape, layouts, read_generation(layouts, GenerationSpec(), 1), workload)
    for name, priced in {**{each: found[each] for each in found}, "received_bytes": float(received)}.items():
        if name in held[0]:
            assert priced == pytest.approx(sum(each[name] for each in held) / 2, rel=1e-6), name
