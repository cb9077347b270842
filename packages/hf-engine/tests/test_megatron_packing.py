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
    count_kept_masks,
    reference_outputs,
    rows_of,
    select_rows,
)
from hf_engine.training.fsdp._shared_prompts import SharedPrompts
from hf_engine.training.megatron._config import estimate_sharing
from hf_engine.training.micro_batches import PackedMicroBatch
from hf_engine.training.outputs import OutputRequest
from hf_protocols import ModelShape, ParallelSpec, Topology

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


def build(model, sizes="1-1-1", head="lm", ep_size=1, **changes):
    """A backend with a layout `pp-tp-dp`; the head of a critic, which starts at zero, has values."""
    pp_size, tp_size, dp_size = map(int, sizes.split("-"))
    train = ParallelSpec(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size, ep_size=ep_size)
    topology = Topology(train, order="megatron")
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
@pytest.mark.parametrize(("family", "num_groups"), [("mistral", 2), ("qwen3_moe", 2), ("qwen2", 1)])
def test_ranks_of_a_replica_share_prompts_alike(ranks2, tmp_path, family, num_groups, sizes):
    """With tp the tokens of a packed row are padded to an even number, half for each rank.

    A single group of keys and values is for the heads of both ranks.
    """
    changes = FAMILIES[family] | {"num_key_value_heads": num_groups}
    model = write_tiny_model(tmp_path / "model", family=family, **SIZES | changes)
    ranks2.run(compare_family, model, sizes)


def compare_experts(model):
    """Experts on two ranks of data: the norm of all gradients, where both ranks have the same rows."""
    norms = []
    for shared in (True, False):
        backend = build(model, "1-1-2", ep_size=2, shared_prompts=shared)
        metrics = backend.train_step(build_prompt_groups(), square_distance, 20.0)
        norms.append(metrics["grad_norm"][0])
        backend.close()
    return norms


def square_distance(outputs, micro_batch):
    mask = micro_batch["response_mask"]
    return ((outputs["logprobs"] - micro_batch["targets"]).square() * mask).sum(), {}


def test_experts_on_two_ranks_share_prompts(ranks2, tmp_path):
    model = write_tiny_model(tmp_path / "model", family="qwen3_moe", **SIZES)
    for shared, apart in ranks2.run(compare_experts, model):
        assert shared == pytest.approx(apart, rel=5e-6)


def score_in_16_bits(model):
    batch, found, norms = build_prompt_groups(), [], []
    for shared in (True, False):
        backend = build(model, dtype="bfloat16", shared_prompts=shared)
        found.append(backend.compute_logprobs(batch)["logprobs"].values())
        norms.append(backend.train_step(batch, square_distance, 10.0)["grad_norm"][0])
        backend.close()
    return float((found[0] - found[1]).abs().max()), norms


def test_packed_rows_of_16_bits_differ_by_their_rounding(ranks1, tmp_path):
    """Logits are below 8, where the last bit of bfloat16 is 1/32; two of them may differ by it."""
    model = write_tiny_model(tmp_path / "model", family="mistral", sliding_window=4, **SIZES)
    ((difference, norms),) = ranks1.run(score_in_16_bits, model)
    assert difference <= 2 / 32
    assert norms[0] == pytest.approx(norms[1], rel=2**-6)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_costs_are_those_of_the_same_model_with_fsdp(tmp_path, family):
    """With pp and tp of two a mask is for half of the layers, and a token has half of its memory."""
    directory = write_tiny_model(tmp_path / "model", family=family, num_hidden_layers=4, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    expected = SharedPrompts(model, CONFIG, head="lm")._costs
    shape = ModelShape.from_config(directory / "config.json")
    alone = estimate_sharing(shape, ParallelSpec(dp_size=8), CONFIG)
    assert (alone.pair_work, alone.pair_memory) == pytest.approx((expected.pair_work, expected.pair_memory))
    halved = estimate_sharing(shape, ParallelSpec(pp_size=2, tp_size=2), CONFIG)
    assert halved.pair_memory == pytest.approx(4 * expected.pair_memory)
    assert halved.pair_work == pytest.approx(expected.pair_work)
    assert estimate_sharing(shape, ParallelSpec(), replace(CONFIG, shared_prompts=False)) is None


def count_masks(model):
    backend = build(model, shared_prompts=True)
    (packed,) = cut(model, build_prompt_groups(), shared_prompts=True)
    found = count_kept_masks(backend, build_prompt_groups(), packed.input_ids.shape[1])
    backend.close()
    return found


def test_all_layers_share_one_mask(ranks1, tmp_path):
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=3, **SIZES)
    assert ranks1.run(count_masks, model) == [1]


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
    critic = build(model, sizes, head="value")
    assert len(critic.compute_values(batch)["values"].values()) == 0
    critic.close()
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
