"""Rows of models whose frequencies depend on the longest row of a pass, against transformers on each row alone."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_engine import SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.models.rope import NO_ROPE_LIMITS, RopeLimits, find_rope_limits
from hf_engine.testing import write_tiny_family
from hf_engine.testing._cases import reference_outputs, rows_of, select_rows
from hf_engine.training.outputs import OutputRequest
from hf_protocols import BackendError, BatchError, GenerationSpec, ParallelSpec, Topology

LIMIT = 16
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
LONG_KEYS = {"original_max_position_embeddings": LIMIT, "rope_parameters": LONG}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES = {
    "phi3": LONG_KEYS,
    "llama": {"rope_parameters": LONG},
    # It has two scales in place of two lists of factors.
    "phimoe": {"rope_parameters": LONG | {"short_mscale": 1.0, "long_mscale": 1.4}},
}
ROWS = [(4, 2), (12, 3), (11, 5), (15, 1), (12, 5), (16, 1), (3, 14), (20, 6), (1, 9)]
"""Tokens of prompts and responses: below, at and above the limit."""


def write(directory, family):
    return write_tiny_family(directory, family, **FAMILIES[family])


def write_dynamic(directory):
    return write_tiny_family(directory, "llama", max_position_embeddings=LIMIT, rope_parameters=DYNAMIC)


def jagged(rows):
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def draw_batch(sizes):
    generator = torch.Generator().manual_seed(5)
    prompts, responses = (
        [torch.randint(0, 64, (size[side],), generator=generator) for size in sizes] for side in (0, 1)
    )
    targets = [torch.randn(len(each), generator=generator) for each in responses]
    columns = {"prompt_ids": jagged(prompts), "response_ids": jagged(responses), "targets": jagged(targets)}
    return TensorDict(columns, batch_size=[len(sizes)])


def find_alone(model, batch):
    """Log-probs of every row by a pass of transformers on that row, and the gradients of `squares` by name."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    columns = (batch[key].unbind() for key in ("prompt_ids", "response_ids", "targets"))
    for prompt, response, targets in zip(*columns, strict=True):
        logprobs = reference_outputs(reference, prompt, response).log_softmax(-1)
        found.append(logprobs.gather(-1, response[:, None])[:, 0])
        (found[-1] - targets).square().sum().backward()
    gradients = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    return torch.cat(found).detach(), gradients


def squares(outputs, columns):
    return ((outputs["logprobs"] - columns["targets"]).square() * columns["response_mask"]).sum(), {}


def build(model, tokens, head="lm"):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=tokens)
    return load_train_backend("fsdp").build(model, topology=topology, config=config, head=head)


def train(model, batch, cut, tokens):
    """This rank's log-probs, the gradients of all ranks, and the lengths of each micro-batch."""
    backend, rows = build(model, tokens), select_rows(batch, cut[dist.get_rank()])
    sizes = rows["prompt_ids"].offsets().diff() + rows["response_ids"].offsets().diff()
    logprobs = backend.compute_logprobs(rows)["logprobs"].values().clone()
    _, micro_batches = backend._agreed_micro_batches(rows, OutputRequest(), 1.0, needs_rows=True)
    backend.forward_backward(rows, squares, 1.0)
    gradients = {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in backend._parameters.items()
        if each.grad is not None
    }
    return logprobs, gradients, [sizes[each.rows].tolist() for each in micro_batches]


def check_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, each in wanted.items():
        assert float((found[name] - each).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("tokens", [26, 60, 8192])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_frequencies_of_rows_alone(ranks1, tmp_path, family, tokens):
    model, batch = write(tmp_path, family), draw_batch(ROWS)
    wanted, gradients = find_alone(model, batch)
    ((logprobs, found, sizes),) = ranks1.run(train, model, batch, [range(len(ROWS))], tokens)
    torch.testing.assert_close(logprobs, wanted, atol=2e-5, rtol=0)
    check_gradients(found, gradients)
    assert all(len({length > LIMIT for length in each}) == 1 for each in sizes)
    assert tokens < 8192 or sorted(map(len, sizes)) == [4, 5]


def test_ranks_with_rows_on_one_side_stay_in_step(ranks2, tmp_path):
    """Rank 0 has two micro-batches of rows that would fit in one, rank 1 one and a dummy."""
    model, batch = write(tmp_path, "phi3"), draw_batch(ROWS)
    wanted, gradients = find_alone(model, batch)
    cut = [[3, 4, 5, 6, 7, 8], [0, 1, 2]]
    results = ranks2.run(train, model, batch, cut, 8192)
    starts = torch.split(wanted, [response for _, response in ROWS])
    for rows, (logprobs, found, sizes) in zip(cut, results, strict=True):
        torch.testing.assert_close(logprobs, torch.cat([starts[row] for row in rows]), atol=2e-5, rtol=0)
        check_gradients(found, gradients)
        assert len(sizes) == 2


def refuse_long_rows(model):
    backend = build(model, 8192)
    allowed = draw_batch([(12, 4), (3, 2), (10, 5)])
    before = backend.compute_logprobs(allowed)["logprobs"].values().clone()
    message = "row 1 has 17 tokens, above max_position_embeddings=16.*rope_type='dynamic'.*Lower data.max_prompt_tokens"
    for call in (backend.compute_logprobs, lambda rows: backend.train_step(rows, squares, 1.0)):
        with pytest.raises(BatchError, match=message):
            call(draw_batch([(12, 4), (12, 5)]))
    assert torch.equal(before, backend.compute_logprobs(allowed)["logprobs"].values())
    return before


def test_dynamic_refuses_rows_above_its_limit(ranks1, tmp_path):
    model = write_dynamic(tmp_path)
    wanted, _ = find_alone(model, draw_batch([(12, 4), (3, 2), (10, 5)]))
    (found,) = ranks1.run(refuse_long_rows, model)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


def generate(model, prompts, max_new_tokens, **options):
    backend = load_rollout_backend("transformers").build(
        model, topology=Topology(ParallelSpec(), GenerationSpec()), **options
    )
    generator = torch.Generator().manual_seed(1)
    ids = jagged([torch.randint(0, 64, (n,), generator=generator) for n in prompts])
    batch = TensorDict({"prompt_ids": ids, "row_id": torch.arange(len(prompts))}, batch_size=[len(prompts)])
    return ids, backend.generate(batch, SamplingParams(max_new_tokens=max_new_tokens, n=2, seed=3))


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_frequencies_of_rows_alone(tmp_path, family):
    """Prompts of both ranges are in one request; the longest of the lower one end at the limit."""
    model = write(tmp_path, family)
    prompts, result = generate(model, [17, 4, 12, 20, 1], 4)
    repeated = [prompt for prompt in rows_of(prompts) for _ in range(2)]
    responses = rows_of(result["response_ids"])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, response, found in zip(repeated, responses, rows_of(result["rollout_logprobs"]), strict=True):
        wanted = reference_outputs(reference, prompt, response).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(found, wanted.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("prompts", [[4, 13], [20, 16], [15]])
def test_a_response_across_the_limit_is_refused(tmp_path, prompts):
    row, prompt = len(prompts) - 1, prompts[-1]
    message = (
        f"prompt of row {row} has {prompt} tokens, with max_new_tokens=4 up to {prompt + 4}, across "
        f"original_max_position_embeddings={LIMIT}: with rope_type='longrope'"
    )
    with pytest.raises(BackendError, match=re.escape(message)):
        generate(write(tmp_path, "phi3"), prompts, 4)


def test_dynamic_generates_up_to_its_limit(tmp_path):
    model = write_dynamic(tmp_path)
    _, result = generate(model, [12, 3], 4)
    assert result["response_ids"].offsets().diff().tolist() == [4] * 4
    message = "prompt of row 0 has 13 tokens, with max_new_tokens=4 up to 17, above max_position_embeddings=16"
    with pytest.raises(BackendError, match=message):
        generate(model, [13, 3], 4)


def score(model, batch, tokens):
    return build(model, tokens, head="score").compute_scores(batch)["scores"]


def refuse_score(model, batch):
    with pytest.raises(BatchError) as refused:
        score(model, batch, 8192)
    return str(refused.value)


def test_sequences_have_the_frequencies_of_sequences_alone(ranks1, tmp_path):
    """Both sequences of a row are in one forward pass: across the limit they are refused."""
    config = AutoConfig.from_pretrained(write(tmp_path / "lm", "phi3"))
    config.num_labels, config.pad_token_id = 1, 0
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    batch = draw_batch([(4, 12), (12, 5), (3, 2), (20, 6)])
    batch["rejected_ids"] = jagged([torch.arange(1, 2 + n) for n in (3, 7, 1, 2)])
    with torch.no_grad():
        wanted = [
            [float(model(torch.cat([prompt, side])[None]).logits) for side in sides]
            for prompt, *sides in zip(
                *(rows_of(batch[f"{key}_ids"]) for key in ("prompt", "response", "rejected")), strict=True
            )
        ]
    for tokens in (60, 8192):
        (found,) = ranks1.run(score, tmp_path / "model", batch, tokens)
        torch.testing.assert_close(found, torch.tensor(wanted), atol=2e-5, rtol=1e-5)
    batch["rejected_ids"] = jagged([torch.arange(1, 2 + n) for n in (3, 7, 14, 2)])
    (refusal,) = ranks1.run(refuse_score, tmp_path / "model", batch)
    assert refusal.startswith("row 2 has sequences of 5 and 18 tokens, across original_max_position_embeddings=16")


@pytest.mark.parametrize(
    ("family", "keys", "limits"),
    [
        ("llama", {}, NO_ROPE_LIMITS),
        ("phi3", LONG_KEYS, RopeLimits(splits=(LIMIT,))),
        ("phi3", {"original_max_position_embeddings": 8, "rope_scaling": LONG | {"rope_type": "su"}},
         RopeLimits(splits=(8,))),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeLimits(longest=48)),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": LONG}},
         RopeLimits(splits=(LIMIT,))),
    ],
)  # fmt: skip
def test_limits_are_where_transformers_has_them(tmp_path, family, keys, limits):
    found = find_rope_limits(AutoConfig.from_pretrained(write_tiny_family(tmp_path, family, **keys)))
    assert found == limits
    assert [found.range_of(tokens) for tokens in (1, 8, 9, 16, 17)] == [
        sum(tokens > split for split in limits.splits) for tokens in (1, 8, 9, 16, 17)
    ]
