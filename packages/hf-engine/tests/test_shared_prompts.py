"""Rows that share a prompt, computed once, against the same rows computed apart."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from hf_engine import LoraConfig, TrainConfig, load_train_backend
from hf_engine.testing import TINY_FAMILIES, write_tiny_family
from hf_engine.testing._cases import select_rows
from hf_engine.training.fsdp._shared_prompts import EXACT_FAMILIES
from hf_engine.training.micro_batches import MicroBatch
from hf_engine.training.optimizer import local_shard
from hf_engine.training.outputs import OutputRequest
from hf_engine.training.shared_prompts import PromptSharing, batch_packs, plan_packs
from hf_protocols import ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=4096)
GROUPS = [(9, [5, 1, 6]), (7, [4, 4]), (3, [2]), (1, [6, 3])]
"""Tokens of each prompt, above the tiny windows of 4, and of the responses to it."""
KEYS = {"llama4_text": {"attn_temperature_tuning": False}}
"""Keys of `config.json` without which a tiny family computes rows apart."""


def jagged(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def build_groups(groups=GROUPS, vocab_size=64, seed=0):
    """Rows of several groups, not in their order."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for prompt, lengths in groups:
        ids = torch.randint(0, vocab_size, (prompt,), generator=generator)
        for length in lengths:
            prompts.append(ids)
            responses.append(torch.randint(0, vocab_size, (length,), generator=generator))
    order = torch.randperm(len(prompts), generator=generator).tolist()
    targets = [torch.randn(len(responses[row]), generator=generator) for row in order]
    columns = {
        "prompt_ids": jagged([prompts[row] for row in order]),
        "response_ids": jagged([responses[row] for row in order]),
        "targets": jagged(targets),
        "candidate_ids": jagged(
            [torch.stack([row, (row + 1) % vocab_size], 1) for row in map(responses.__getitem__, order)]
        ),
    }
    return TensorDict(columns, batch_size=[len(order)])


def build(model, config=CONFIG, head="lm", **changes):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    backend = load_train_backend("fsdp").build(model, topology=topology, config=replace(config, **changes), head=head)
    if head == "value":  # which starts at zero
        shard = local_shard(backend._model.get_output_embeddings().weight)
        shard.copy_(torch.linspace(-1, 1, shard.numel()).view(shard.shape))
    return backend


def results(backend, batch, head="lm"):
    """All that a backend computes of a batch, by name: scores, the loss, and every gradient."""

    def loss(outputs, micro_batch):
        mask = micro_batch["response_mask"]
        found = outputs["values" if head == "value" else "logprobs"]
        total = ((found - micro_batch["targets"]).square() * mask).sum()
        if head == "lm":
            total = total - 0.1 * (outputs["entropy"] * mask).sum()
            total = total + 0.1 * (outputs["candidate_logprobs"].sum(-1) * mask).sum()
        return total, {"loss": (float(total.detach()), 1.0)}

    if head == "value":
        found = {"values": backend.compute_values(batch)["values"].values()}
    else:
        scored = backend.compute_logprobs(batch, temperature=0.7, entropy=True, top_k=3)
        found = {name: scored[name].values() for name in ("logprobs", "entropy", "top_logprobs")}
    options = {} if head == "value" else {"temperature": 0.7, "entropy": True, "candidates": True}
    metrics = backend.forward_backward(batch, loss, 10.0, **options)
    found["loss"] = torch.tensor(metrics["loss"][0])
    for name, parameter in backend._parameters.items():
        if parameter.grad is not None:
            grad = parameter.grad
            found[f"gradient of {name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def check_close(found, expected, scale=5e-6):
    """Differences are bounded by the float32 rounding of sums in another order; the largest seen is 2.2e-6."""
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for name, each in expected.items() if name.startswith("gradient"))
    for name, each in expected.items():
        size = largest if name.startswith("gradient") else max(1.0, float(each.abs().max()))
        off = float((found[name] - each).abs().max())
        assert off <= scale * size, f"{name} is {off} off, of {size}"


def compare_family(model, **changes):
    batch = build_groups()
    for head in ("lm", "value"):
        shared, apart = (build(model, head=head, shared_prompts=each, **changes) for each in (True, False))
        _, packed = shared._agreed_micro_batches(batch, OutputRequest(), 1.0, needs_rows=True)
        assert sorted(len(each.rows) for each in packed) == [1, 7]
        check_close(results(shared, batch, head), results(apart, batch, head))


@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name != "bloom"])
def test_a_family_computes_shared_prompts_as_separate_rows(ranks1, tmp_path, family):
    ranks1.run(compare_family, write_tiny_family(tmp_path, family, **KEYS.get(family, {})))


def test_only_tested_families_share_prompts():
    assert set(TINY_FAMILIES) - {"bloom"} == EXACT_FAMILIES


def compare_variants(model):
    """Recomputed layers, small micro-batches and adapters."""
    batch = build_groups()
    for changes in (
        {"activation_checkpointing": True, "shard": "layer"},
        {"micro_batch_tokens": 24},
        {"lora": LoraConfig(rank=2, targets=("q_proj", "v_proj"))},
    ):
        shared, apart = (build(model, shared_prompts=each, **changes) for each in (True, False))
        check_close(results(shared, batch), results(apart, batch))


def test_recomputation_small_budgets_and_adapters_change_nothing(ranks1, tmp_path):
    ranks1.run(compare_variants, write_tiny_family(tmp_path, "gemma2"))


def results_of_rank(model, cut):
    backend, batch = build(model, shared_prompts=True), build_groups()
    found = results(backend, select_rows(batch, cut[dist.get_rank()]))
    return {name: tensor for name, tensor in found.items() if name.startswith("gradient")}


def test_groups_split_over_ranks_have_the_same_gradients(ranks1, ranks2, tmp_path):
    model = write_tiny_family(tmp_path, "qwen3")
    (alone,) = ranks1.run(results_of_rank, model, [list(range(8))])
    for found in ranks2.run(results_of_rank, model, [[0, 1, 2, 3, 4], [5, 6, 7]]):
        check_close(found, alone)


OBSTACLES = {
    "bloom": ({}, "ALiBi"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "llama4_text": ({}, "attn_temperature_tuning"),
    "phi3": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                             "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}},
        "rope_type='longrope'",
    ),
}  # fmt: skip


def list_notices(model, **changes):
    """Warnings of two passes over rows that could share prompts, and what the rows of their micro-batches are."""
    backend, batch = build(model, shared_prompts="auto", **changes), build_groups()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            backend.compute_logprobs(batch)
        _, found = backend._agreed_micro_batches(batch, OutputRequest(), 1.0, needs_rows=True)
    shared = [str(each.message) for each in caught if "shared_prompts" in str(each.message)]
    return shared, [type(each) is MicroBatch for each in found]


@pytest.mark.parametrize("family", OBSTACLES)
def test_a_family_that_cannot_share_says_so_once(ranks1, tmp_path, family):
    keys, reason = OBSTACLES[family]
    ((notices, are_plain),) = ranks1.run(list_notices, write_tiny_family(tmp_path, family, **keys))
    assert all(are_plain)
    assert len(notices) == 1
    assert reason in notices[0]


def measure(model):
    backend, batch = build(model, shared_prompts=True), build_groups()
    metrics = backend.forward_backward(batch, lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0)
    return metrics["batch/padding"], metrics["batch/shared"]


def test_the_metrics_count_padding_and_saved_tokens(ranks1, tmp_path):
    """Packed rows of 18, 13 and 8 tokens are padded to 18; of the single one's 5 tokens 4 are computed.

    Of 77 tokens of rows apart, 26 of prompts and the last ones of eight responses are saved.
    """
    ((padding, shared),) = ranks1.run(measure, write_tiny_family(tmp_path, "llama"))
    assert padding == (3 * 18 - 18 - 13 - 8.0, 3 * 18 + 4.0)
    assert shared == (26.0 + 8, 77.0)


rows = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 12), min_size=1, max_size=9)), max_size=5)


@given(rows, st.integers(42, 200), st.floats(1e-5, 0.2), st.floats(0, 0.2), st.booleans())
def test_packs_hold_every_row_once_within_the_budget(groups, max_tokens, work, memory, always):
    sharing = PromptSharing(pair_work=work, pair_memory=memory, always=always)
    prompts = [prompt for prompt, lengths in groups for _ in lengths]
    responses = [length for _, lengths in groups for length in lengths]
    numbers = iter(range(len(prompts)))
    packs, apart = plan_packs(
        [[next(numbers) for _ in lengths] for _, lengths in groups], prompts, responses, max_tokens, sharing
    )
    batches = batch_packs(packs, prompts, responses, max_tokens, sharing)
    batched = [pack for batch in batches for pack in batch]
    assert sorted(batched) == sorted(packs)
    assert sorted([*apart, *(row for pack in packs for row in pack)]) == list(range(len(prompts)))
    tokens = {tuple(pack): prompts[pack[0]] + sum(responses[row] for row in pack) for pack in packs}
    for batch in batches:
        assert len(batch) * max(sharing.memory(tokens[tuple(pack)]) for pack in batch) <= max_tokens
    if not always:
        packed = sum(map(sharing.work, tokens.values()))
        alone = sum(sharing.work(prompts[row] + responses[row]) for pack in packs for row in pack)
        assert packed <= alone


@pytest.mark.parametrize(
    ("prompt", "response", "expected"), [(256, 48, [8]), (6, 5, [8]), (32, 256, []), (256, 256, [2, 2, 2, 2])]
)
def test_auto_shares_where_it_saves_work(prompt, response, expected):
    """Of a model with hidden size 320: attention among many long responses costs more than their prompts."""
    sharing = PromptSharing(pair_work=1e-3, pair_memory=1e-3)
    packs, _ = plan_packs([range(8)], [prompt] * 8, [response] * 8, 1 << 20, sharing)
    assert [len(pack) for pack in packs] == expected
