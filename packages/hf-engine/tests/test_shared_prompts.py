"""Rows that share a prompt, computed once, against the same rows computed apart."""

from __future__ import annotations

import random
import warnings
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_engine import LoraConfig, TrainConfig, load_train_backend
from hf_engine.testing import TINY_FAMILIES, write_tiny_family
from hf_engine.testing._cases import (
    build_prompt_groups,
    check_same_results,
    compute_results,
    count_kept_masks,
    select_rows,
)
from hf_engine.training import micro_batches
from hf_engine.training.fsdp._shared_prompts import EXACT_FAMILIES, SharedPrompts
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch, plan_micro_batches
from hf_engine.training.optimizer import local_shard
from hf_engine.training.outputs import OutputRequest
from hf_engine.training.shared_prompts import MASK_BYTES, PackedRowPlanner, PromptSharing
from hf_protocols import ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=4096)
KEYS = {"llama4_text": {"attn_temperature_tuning": False}}
"""Keys of `config.json` without which a tiny family computes rows apart."""


def share(backend, *, join):
    """Has a model's packs all in one packed row, or each in one of its own, without a look at the work."""
    shared = backend._shared_prompts
    shared._costs = replace(shared._costs, pair_work=0.0)

    def keep(planner, packs, padded):
        return planner.batch([[pack] for pack in packs]), padded

    stack = ExitStack()
    stack.enter_context(mock.patch.object(micro_batches, "_CUTS", deque(maxlen=0)))  # what other ways made is not kept
    if not join:
        stack.enter_context(mock.patch.object(PackedRowPlanner, "join", keep))
    return stack


def build(model, config=CONFIG, head="lm", **changes):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    backend = load_train_backend("fsdp").build(model, topology=topology, config=replace(config, **changes), head=head)
    if head == "value":  # which starts at zero
        shard = local_shard(backend._model.get_output_embeddings().weight)
        shard.copy_(torch.linspace(-1, 1, shard.numel()).view(shard.shape))
    return backend


def results(backend, batch, head="lm"):
    """All that a backend computes of a batch, by name: scores, the loss, and every gradient."""
    found = compute_results(backend, batch, head)
    for name, parameter in backend._parameters.items():
        if parameter.grad is not None:
            grad = parameter.grad
            found[f"gradient of {name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def compare_family(model, **changes):
    """Scores and gradients of a policy, whose packs are all in one row, and of a critic with a row for each pack."""
    batch = build_prompt_groups()
    for head, shapes in (("lm", [(1, 18 + 13 + 8 + 4)]), ("value", [(3, 18), (1, 4)])):
        shared, apart = (build(model, head=head, shared_prompts=each, **changes) for each in (True, False))
        with share(shared, join=head == "lm"):
            _, packed = shared._agreed_micro_batches(batch, OutputRequest(), 1.0, needs_rows=True)
            assert [tuple(each.input_ids.shape) for each in packed] == shapes
            found = results(shared, batch, head)
        check_same_results(found, results(apart, batch, head))


@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name != "bloom"])
def test_a_family_computes_shared_prompts_as_separate_rows(ranks1, tmp_path, family):
    ranks1.run(compare_family, write_tiny_family(tmp_path, family, **KEYS.get(family, {})))


def test_only_tested_families_share_prompts():
    assert set(TINY_FAMILIES) - {"bloom"} == EXACT_FAMILIES


def compare_variants(model):
    """Recomputed layers, small micro-batches and adapters."""
    batch = build_prompt_groups()
    for changes in (
        {"activation_checkpointing": True, "shard": "layer"},
        {"micro_batch_tokens": 24},
        {"lora": LoraConfig(rank=2, targets=("q_proj", "v_proj"))},
    ):
        shared, apart = (build(model, shared_prompts=each, **changes) for each in (True, False))
        check_same_results(results(shared, batch), results(apart, batch))


def test_recomputation_small_budgets_and_adapters_change_nothing(ranks1, tmp_path):
    ranks1.run(compare_variants, write_tiny_family(tmp_path, "gemma2"))


def results_of_rank(model, cut):
    backend, batch = build(model, shared_prompts=True), build_prompt_groups()
    found = results(backend, select_rows(batch, cut[dist.get_rank()]))
    return {name: tensor for name, tensor in found.items() if name.startswith("gradient")}


def test_groups_split_over_ranks_have_the_same_gradients(ranks1, ranks2, tmp_path):
    model = write_tiny_family(tmp_path, "qwen3")
    (alone,) = ranks1.run(results_of_rank, model, [list(range(8))])
    for found in ranks2.run(results_of_rank, model, [[0, 1, 2, 3, 4], [5, 6, 7]]):
        check_same_results(found, alone)


def count_masks(model):
    backend, batch = build(model, shared_prompts=True), build_prompt_groups()
    _, packed = backend._agreed_micro_batches(batch, OutputRequest(), 1.0, needs_rows=True)
    (width,) = {each.input_ids.shape[1] for each in packed}
    return count_kept_masks(backend, batch, width)


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("olmo3", 2)])
def test_all_layers_of_a_kind_share_one_mask(ranks1, tmp_path, family, kinds):
    """OLMo 3 has windows in some layers."""
    assert ranks1.run(count_masks, write_tiny_family(tmp_path, family)) == [kinds]


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
    backend, batch = build(model, shared_prompts="auto", **changes), build_prompt_groups()
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


def measure(model, join):
    backend, batch = build(model, shared_prompts=True), build_prompt_groups()
    with share(backend, join=join):
        metrics = backend.forward_backward(batch, lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0)
    return metrics["batch/padding"], metrics["batch/shared"]


def test_the_metrics_count_padding_and_saved_tokens(ranks1, tmp_path):
    """Packed rows of 18, 13 and 8 tokens are padded to 18; of the single one's 5 tokens 4 are computed.

    Of 77 tokens of rows apart, 26 of prompts and the last ones of eight responses are saved. One row of all has no
    padding.
    """
    model = write_tiny_family(tmp_path, "llama")
    ((padding, shared),) = ranks1.run(measure, model, False)
    assert padding == (3 * 18 - 18 - 13 - 8.0, 3 * 18 + 4.0)
    assert shared == (26.0 + 8, 77.0)
    assert ranks1.run(measure, model, True) == [((0.0, 18 + 13 + 8 + 4.0), shared)]


rows = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 12), min_size=1, max_size=9)), max_size=5)


class Plan(NamedTuple):
    """A planner's decisions about groups of (prompt tokens, tokens of each response)."""

    packs: list
    apart: list  # rows that may be packed
    plain: list  # their micro-batches, before any is packed
    packed: list  # rows by micro-batch
    padded: list
    rows: list  # (prompt tokens, response tokens)

    @classmethod
    def of(cls, groups, max_tokens, sharing, enough_tokens=None):
        rows = [(prompt, length) for prompt, lengths in groups for length in lengths]
        prompts, responses = ([row[side] for row in rows] for side in (0, 1))
        numbers = iter(range(len(rows)))
        planner = PackedRowPlanner(prompts, responses, max_tokens, sharing, enough_tokens)
        packs, apart = planner.split([[next(numbers) for _ in lengths] for _, lengths in groups])
        apart = [row for row in apart if planner.fits(row)]
        plain = plan_micro_batches(prompts, responses, max_tokens, rows=apart, enough_tokens=enough_tokens)
        return cls(packs, apart, plain, *planner.join(packs, plain), rows)

    def measure(self, pack):
        return self.rows[pack[0]][0] + sum(self.rows[row][1] for row in pack)

    def tokens(self):
        """Of each packed row, by micro-batch."""
        return [[sum(map(self.measure, packs)) for packs in batch] for batch in self.packed]

    def work_of_padded(self, sharing):
        """Of rows apart, whose prompts and responses have one width each in a micro-batch."""
        widths = [sum(max(self.rows[row][side] for row in each) for side in (0, 1)) for each in self.plain]
        return sum(len(each) * sharing.work(width) for each, width in zip(self.plain, widths, strict=True))


def work_of_packed(tokens, sharing):
    return sum(len(batch) * sharing.work(max(batch)) for batch in tokens)


@given(rows, st.integers(42, 200), st.floats(1e-5, 0.2), st.floats(0, 0.2), st.booleans())
def test_packs_hold_every_row_once_within_the_budget(groups, max_tokens, work, memory, always):
    sharing = PromptSharing(pair_work=work, pair_memory=memory, always=always)
    plan = Plan.of(groups, max_tokens, sharing)
    too_long = [row for row, lengths in enumerate(plan.rows) if sharing.memory(sum(lengths)) > max_tokens]
    packed = [row for pack in plan.packs for row in pack]
    assert sorted([*plan.apart, *packed, *(row for row in too_long if row not in packed)]) == [*range(len(plan.rows))]
    assert all(len(batch) * max(map(sharing.memory, batch)) <= max_tokens for batch in plan.tokens())
    if not always:
        alone = sum(sharing.work(sum(plan.rows[row])) for pack in plan.packs for row in pack)
        assert sum(sharing.work(plan.measure(pack)) for pack in plan.packs) <= alone


@given(rows, st.integers(42, 200), st.integers(1, 250), st.floats(0, 0.2))
def test_fewer_tokens_that_are_enough_cut_no_pack(groups, max_tokens, enough, memory):
    """Prompts are shared as without that bound. It is one on the tokens of two packed rows or more, without masks."""
    sharing = PromptSharing(pair_work=1e-3, pair_memory=memory)
    plan = Plan.of(groups, max_tokens, sharing, enough)
    assert plan.packs == Plan.of(groups, max_tokens, sharing).packs
    for batch in plan.tokens():
        assert len(batch) * max(map(sharing.memory, batch)) <= max_tokens
        assert len(batch) == 1 or len(batch) * max(batch) <= enough


def test_masks_do_not_count_where_tokens_are_enough():
    """Masks of 30 tokens have the memory of 45; two rows of 30 are 60 tokens, and 150 in the budget."""
    sharing = PromptSharing(pair_work=1e-3, pair_memory=0.05)
    plan = Plan.of([(10, [10, 10])] * 4, 1000, sharing, 60)
    assert plan.tokens() == [[30, 30], [30, 30]]
    assert Plan.of([(10, [10, 10])] * 4, 150, sharing, 100).tokens() == [[30, 30], [30, 30]]
    assert Plan.of([(10, [10, 10])] * 4, 149, sharing, 100).tokens() == [[30]] * 4


@given(rows, st.integers(42, 200), st.floats(1e-5, 0.2), st.floats(0, 0.2), st.booleans())
def test_packed_rows_are_less_work_than_padding(groups, max_tokens, work, memory, always):
    sharing = PromptSharing(pair_work=work, pair_memory=memory, always=always)
    plan = Plan.of(groups, max_tokens, sharing)
    laid = sorted(list(pack) for batch in plan.packed for packs in batch for pack in packs)
    packs = sorted(map(list, plan.packs))
    if laid == packs and plan.padded == plan.plain:
        return
    assert plan.padded == []
    assert laid == sorted([*packs, *([row] for row in plan.apart)])
    apart = [
        [plan.measure(pack) for packs in batch for pack in packs] for batch in batch_alone(plan, max_tokens, sharing)
    ]
    before = work_of_packed(apart, sharing) + plan.work_of_padded(sharing)
    assert work_of_packed(plan.tokens(), sharing) <= 0.98 * before + 1e-6


@given(rows, st.integers(42, 200), st.integers(1, 250), st.floats(0.1, 60))
def test_more_passes_are_made_only_where_that_is_less_work(groups, max_tokens, enough, pass_work):
    """Each row is a pack of its own. What fits into one pass stays together: an update may go on from it."""
    pairs = [(prompt, length) for prompt, lengths in groups for length in lengths]
    prompts, responses = [prompt for prompt, _ in pairs], [length for _, length in pairs]
    sharing = PromptSharing(pair_work=1e-3, pair_memory=0.0, pass_work=pass_work)
    cut, whole = (
        PackedRowPlanner(prompts, responses, max_tokens, each, enough).batch([[[row]] for row in range(len(prompts))])
        for each in (sharing, replace(sharing, pass_work=0.0))
    )

    def work(batches):
        longest = [max(prompts[row] + responses[row] for ((row,),) in batch) for batch in batches]
        return sum(pass_work + len(batch) * sharing.work(width) for batch, width in zip(batches, longest, strict=True))

    assert sorted(row for batch in cut for ((row,),) in batch) == [*range(len(prompts))]
    assert work(cut) <= work(whole)
    assert len(whole) > 1 or cut == whole


@pytest.mark.parametrize("enough_tokens", [1024, 2048])
def test_rows_of_a_cpu_pad_below_5_percent(enough_tokens):
    """Of a model with 8.6M weights: two prompts of 32 tokens, and 8 responses of 1 to 256 to each, 40 times."""
    sharing = PromptSharing.estimate(
        attended=6 * 384, passed=6 * 384 * (4 * 384 + 3 * 1024), pair_bytes=MASK_BYTES, token_bytes=4 * 6 * 384
    )
    draw, real, computed = random.Random(0), 0, 0
    for _ in range(40):
        groups = [(32, [draw.randint(0, 255) for _ in range(8)]) for _ in range(2)]
        plan = Plan.of(groups, 8192, sharing, enough_tokens)
        widths = [sum(max(plan.rows[row][side] for row in each) for side in (0, 1)) for each in plan.padded]
        real += sum(map(sum, plan.tokens())) + sum(sum(plan.rows[row]) for each in plan.padded for row in each)
        computed += sum(len(batch) * max(batch) for batch in plan.tokens())
        computed += sum(len(each) * width for each, width in zip(plan.padded, widths, strict=True))
    assert real > 0.95 * computed


def test_padded_responses_are_bounded_too():
    """One response of 4,000 tokens next to 3,000 of one token would be a column of 12 million numbers."""
    sharing = PromptSharing(pair_work=1e-9, pair_memory=1e-9)
    plan = Plan.of([(1, [4000]), *[(1, [1])] * 3000], 16384, sharing)
    sizes = [[plan.rows[row][1] for packs in batch for pack in packs for row in pack] for batch in plan.packed]
    assert sum(map(len, sizes)) == 3001
    assert all(len(each) * max(each) <= 16 * 16384 for each in sizes)


def batch_alone(plan, max_tokens, sharing):
    """Micro-batches of a packed row for each pack."""
    prompts, responses = ([row[side] for row in plan.rows] for side in (0, 1))
    return PackedRowPlanner(prompts, responses, max_tokens, sharing).batch([[pack] for pack in plan.packs])


@pytest.mark.parametrize(
    ("prompt", "response", "expected"), [(256, 48, [8]), (6, 5, [8]), (32, 256, []), (256, 256, [2, 2, 2, 2])]
)
def test_auto_shares_where_it_saves_work(prompt, response, expected):
    """Of a model with hidden size 320: attention among many long responses costs more than their prompts."""
    sharing = PromptSharing(pair_work=1e-3, pair_memory=1e-3)
    plan = Plan.of([(prompt, [response] * 8)], 1 << 20, sharing)
    assert [len(pack) for pack in plan.packs] == expected


@pytest.mark.parametrize(("num_groups", "num_samples"), [(64, 1), (8, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_auto_pads_little_where_lengths_differ(num_groups, num_samples, seed):
    """Of a model with 7B parameters, prompts of 50 to 500 tokens and responses of 300 in the mean, at most 1,024."""
    draw = random.Random(seed)
    sharing = PromptSharing(pair_work=4e-5, pair_memory=1e-5)
    groups = [
        (draw.randint(50, 500), [min(1024, 1 + int(draw.expovariate(1 / 300))) for _ in range(num_samples)])
        for _ in range(num_groups)
    ]
    plan = Plan.of(groups, 16384, sharing)
    assert not plan.padded
    tokens = plan.tokens()
    computed = sum(len(batch) * max(batch) for batch in tokens)
    assert sum(map(sum, tokens)) > 0.95 * computed


def measure_kept(model, tokens):
    """Bytes that a forward pass on a row of so many tokens keeps for the backward pass."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(torch.arange(tokens)[None] % 64, use_cache=False)
    del outputs
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_that_attention_keeps_count_for_the_budget(tmp_path, family):
    """Bytes that grow with the square of a row's tokens are measured, and count for packed and for padded rows."""
    path = write_tiny_family(tmp_path, family, max_position_embeddings=512)
    model, sdpa = (AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval() for _ in range(2))
    short, middle, long = (measure_kept(model, tokens) for tokens in (128, 256, 512))
    pair_bytes = ((long - middle) / 256 - (middle - short) / 128) / 384
    sdpa.config._attn_implementation = "sdpa"  # transformers does not load gpt-oss with it
    shared, plain = (SharedPrompts(each, CONFIG, head="lm") for each in (model, sdpa))
    share = shared._costs.pair_memory - plain._costs.pair_memory
    passed = [each for name, each in model.model.named_parameters() if each.dim() > 1 and "embed" not in name]
    outputs = sum(each[0].numel() * 2 if each.dim() == 3 else each.numel() for each in passed) / 32
    assert share * 4 * 2 * outputs == pytest.approx(pair_bytes, rel=0.01)
    batch = shared.prepare(SequenceBatch(build_prompt_groups()))
    assert (batch.pair_memory, plain.prepare(batch).pair_memory) == (pytest.approx(share), 0.0)
