"""Rows that share a prompt with megatron-core, against the same rows computed apart and against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import (
    build_prompt_groups,
    check_same_results,
    compute_results,
    reference_outputs,
    rows_of,
    select_rows,
)
from hf_engine.training.micro_batches import PackedMicroBatch
from hf_engine.training.outputs import OutputRequest
from hf_protocols import ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=4096)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_embeddings": False}
FAMILIES = {
    "llama": {"pad_token_id": 46},  # is in prompts and responses, and its embedding must not learn from there
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3_moe": {},
}


def build(model, sizes="1-1-1", head="lm", **changes):
    """A backend with a layout `pp-tp-dp`; the head of a critic, which starts at zero, has values."""
    pp_size, tp_size, dp_size = map(int, sizes.split("-"))
    topology = Topology(ParallelSpec(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size), order="megatron")
    backend = load_train_backend("megatron").build(
        model, topology=topology, config=replace(CONFIG, **changes), head=head
    )
    value_head = backend._stage.parameters.get("value_head.weight")
    if value_head is not None:
        value_head.detach().copy_(torch.linspace(-1, 1, value_head.numel()).view(value_head.shape))
    return backend


def results(model, batch, sizes="1-1-1", head="lm", **changes):
    """All that a backend computes of a batch: scores, the loss, and every gradient of this rank, summed over ranks."""
    backend = build(model, sizes, head, **changes)
    found = compute_results(backend, batch, head)
    if backend._groups.dp.size() == 1:
        backend._stage.sum_gradients()
    for name, parameter in backend._stage.parameters.items():
        gradient = parameter.main_grad.clone()
        if backend._groups.dp.size() > 1:  # whose ranks would keep a part of the sum each
            dist.all_reduce(gradient, group=backend._groups.dp)
        found[f"gradient of {name}"] = gradient
    backend.close()
    return found


def cut(model, batch, sizes="1-1-1", **changes):
    backend = build(model, sizes, **changes)
    _, found = backend._agreed_micro_batches(batch, OutputRequest(), 1.0, needs_rows=True)
    backend.close()
    return found


def compare_family(model, sizes="1-1-1", heads=("lm", "value"), **changes):
    batch = build_prompt_groups()
    packed = cut(model, batch, sizes, shared_prompts=True, **changes)
    assert any(isinstance(each, PackedMicroBatch) for each in packed)
    for head in heads:
        found, apart = (results(model, batch, sizes, head, shared_prompts=each, **changes) for each in (True, False))
        check_same_results(found, apart)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_shared_prompts_as_separate_rows(ranks1, tmp_path, family):
    model = write_tiny_model(tmp_path / "model", family=family, **SIZES | FAMILIES[family])
    ranks1.run(compare_family, model)


@pytest.mark.parametrize("sizes", ["1-2-1", "2-1-1"])
@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_ranks_of_a_replica_share_prompts_alike(ranks2, tmp_path, family, sizes):
    """With tp the 9 + 6 and more tokens of a packed row are padded to an even number, half for each rank."""
    model = write_tiny_model(tmp_path / "model", family=family, **SIZES | FAMILIES[family])
    ranks2.run(compare_family, model, sizes)


def compare_variants(model):
    for changes in ({"activation_checkpointing": True}, {"micro_batch_tokens": 24}):
        compare_family(model, **changes)


def test_recomputation_and_small_budgets_change_nothing(ranks1, tmp_path):
    ranks1.run(compare_variants, write_tiny_model(tmp_path / "model", family="qwen3", **SIZES))


def gradients_of_rank(model, cut):
    """Of the rows of all replicas, each of which has its own, with shared prompts."""
    rows = cut[dist.get_rank()]
    found = results(model, select_rows(build_prompt_groups(), rows), f"1-1-{len(cut)}", shared_prompts=True)
    return {name: each for name, each in found.items() if name.startswith("gradient")}


def test_groups_split_over_replicas_have_the_same_gradients(ranks1, ranks2, tmp_path):
    model = write_tiny_model(tmp_path / "model", family="qwen3", **SIZES)
    (alone,) = ranks1.run(gradients_of_rank, model, [list(range(8))])
    for found in ranks2.run(gradients_of_rank, model, [[0, 1, 2, 3, 4], [5, 6, 7]]):
        check_same_results(found, alone)


def score_empty_responses(model, sizes):
    """A batch of which no token is predicted."""
    batch = build_prompt_groups([(3, (0,)), (4, (0, 0))])
    backend = build(model, sizes)
    scored = backend.compute_logprobs(batch, entropy=True, top_k=2)
    metrics = backend.train_step(batch, lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0)
    backend.close()
    return [len(scored[name].values()) for name in ("logprobs", "entropy", "top_ids")], metrics["grad_norm"][0]


@pytest.mark.parametrize("sizes", ["1-2-1", "2-1-1"])
def test_rows_without_responses_have_no_scores_and_no_gradient(ranks2, tmp_path, sizes):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    assert ranks2.run(score_empty_responses, model, sizes) == [([0, 0, 0], 0.0)] * 2


def largest_difference(model):
    """Of log-probs of packed rows from those that transformers computes for each row by itself."""
    backend, batch = build(model, shared_prompts=True), build_prompt_groups()
    scored = backend.compute_logprobs(batch)["logprobs"]
    backend.close()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    differences = []
    for prompt, response, found in zip(
        *map(rows_of, (batch["prompt_ids"], batch["response_ids"], scored)), strict=True
    ):
        with torch.no_grad():
            expected = reference_outputs(reference, prompt, response).log_softmax(-1)
        differences.append(float((expected.gather(-1, response[:, None])[:, 0] - found).abs().max()))
    return max(differences)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_packed_rows_score_as_transformers_does(ranks1, tmp_path, family):
    model = write_tiny_model(tmp_path / "model", family=family, **SIZES | FAMILIES[family])
    (difference,) = ranks1.run(largest_difference, model)
    assert difference < 2e-5


def measure(model, shared):
    backend = build(model, shared_prompts=shared)
    metrics = backend.forward_backward(build_prompt_groups(), lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0)
    backend.close()
    return metrics["batch/padding"], metrics["batch/shared"]


def test_the_metrics_count_padding_and_saved_tokens(ranks1, tmp_path):
    """Of 77 tokens of rows apart, 26 of prompts and the last ones of eight responses are saved: 43 are computed."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    ((padding, shared),) = ranks1.run(measure, model, True)
    assert shared == (34.0, 77.0)
    assert padding[1] - padding[0] == 43.0
    ((_, apart),) = ranks1.run(measure, model, False)
    assert apart == (0.0, 77.0)
