"""An engine that nobody can read and that generates from other weights is refused when a block ends."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from engine_testing.packed_engine import PackedEngine
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.hybrid_engine.sampler_check import SamplerCheck
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_engine.training import offload
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
PROMPTS = build_prompts(6, vocab_size=VOCAB_SIZE)


def build(model, layout, spoils_from, *, config=None, **options):
    topology = Topology(ParallelSpec.parse(layout), GenerationSpec())
    name = "fsdp" if topology.train.dp_size == topology.world_size else "megatron"
    given = TrainConfig(**{"learning_rate": 1e-2, "micro_batch_tokens": 80} | (config or {}))
    train = load_train_backend(name).build(model, topology=topology, config=given)
    inner = load_rollout_backend("transformers").build(model, topology=topology)
    spoils = spoils_from[dist.get_rank()]
    return train, HybridEngine(train, PackedEngine(inner, spoils), topology, **options)


def blocks(model, layout, spoils_from, rows_of_rank, sampling, steps_before, options):
    """Of one block after another the refusal, or nothing, and how many rows the training backend scored."""
    train, engine = build(model, layout, spoils_from, **options)
    found, score = [], train.compute_logprobs
    train.compute_logprobs = lambda rows, **given: found[-1].append(len(rows)) or score(rows, **given)
    rows = rows_of_rank[dist.get_rank()]
    for num_steps in steps_before:
        for _ in range(num_steps):
            step(train)
        found.append([""])
        try:
            with engine.generation():
                if rows:
                    engine.generate(select_rows(PROMPTS, rows), sampling)
        except ReshardError as error:
            found[-1][0] = str(error)
    engine.close()
    return [tuple(block) for block in found]


def step(train):
    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    train.train_step(build_batch(4, vocab_size=VOCAB_SIZE), loss, 10.0)


SAMPLING = SamplingParams(max_new_tokens=90, temperature=0.7, top_k=20, n=2)
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)
EVERY_ROW = ([0, 1, 2, 3, 4, 5], [5, 4])
WRONG = "not those of the training weights"


@pytest.mark.parametrize(
    ("layout", "scored", "options"),
    [
        pytest.param("1-1-2", [4, 2], {}, id="fsdp, keep"),
        pytest.param("1-1-2", [4, 2], {"training_weights": "offload"}, id="fsdp, offload"),
        pytest.param("1-1-2", [4, 2], {"config": {"dtype": "bfloat16"}}, id="fsdp, computes in 16 bits"),
        pytest.param("1-2-1", [6, 6], {"training_weights": "offload"}, id="tp 2, offload"),
        pytest.param("2-1-1", [6, 6], {"config": {"dtype": "bfloat16"}}, id="pp 2, computes in 16 bits"),
    ],
)
def test_a_correct_engine_is_checked_first_and_after_a_change(ranks2, tmp_path, layout, scored, options):
    """Ranks of one tensor group or pipeline score what all of them drew: they train on the same rows."""
    model = write_tiny_model(tmp_path, max_position_embeddings=128)
    found = ranks2.run(blocks, model, layout, (None, None), EVERY_ROW, SAMPLING, [0, 0, 1, 0, 1], options)
    assert found == [[("", rows), ("",), ("", rows), ("",), ("",)] for rows in scored]


def test_a_first_check_after_a_change_is_made_only_once(ranks2, tmp_path):
    model = write_tiny_model(tmp_path, max_position_embeddings=128)
    found = ranks2.run(blocks, model, "1-1-2", (None, None), EVERY_ROW, GREEDY, [1, 1], {})
    assert found == [[("", 4), ("",)], [("", 2), ("",)]]


@pytest.mark.parametrize("layout", ["1-1-2", "1-2-1"])
@pytest.mark.parametrize("sampling", [SAMPLING, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("spoils_from", [1, 2])
def test_wrong_weights_on_one_rank_are_an_error_on_all(ranks2, tmp_path, layout, sampling, spoils_from):
    """Until they are right: an engine that begins well and loses the first change is found as well."""
    model = write_tiny_model(tmp_path, max_position_embeddings=128)
    found = ranks2.run(blocks, model, layout, (None, spoils_from), EVERY_ROW, sampling, [0, 1, 0], {})
    for rank in found:
        assert [WRONG in refusal for refusal, *_ in rank] == [spoils_from == 1, True, True]
    assert ("rank 1 refused" in found[0][1][0]) == (layout == "1-1-2")


def test_ranks_without_rows_score_those_of_others(ranks2, tmp_path):
    model = write_tiny_model(tmp_path, max_position_embeddings=128)
    found = ranks2.run(blocks, model, "1-1-2", (None, 1), ([], [2]), SAMPLING, [0, 0], {})
    for rank in found:
        assert [(WRONG in refusal, scored) for refusal, scored in rank] == [(True, 1)] * 2


def test_blocks_that_generate_nothing_prove_nothing(ranks2, tmp_path):
    found = ranks2.run(
        blocks, write_tiny_model(tmp_path, max_position_embeddings=128), "1-1-2", (1, 1), ([], []), SAMPLING, [0, 1], {}
    )
    assert found == [[("",), ("",)]] * 2


def test_prompts_that_nobody_can_train_on_prove_nothing(ranks2, tmp_path):
    options = {"config": {"micro_batch_tokens": 2}}
    found = ranks2.run(
        blocks,
        write_tiny_model(tmp_path, max_position_embeddings=128),
        "1-1-2",
        (1, 1),
        EVERY_ROW,
        GREEDY,
        [0, 0],
        options,
    )
    assert found == [[("", 4)] * 2, [("", 2)] * 2]


def fail_in_a_block(model):
    """The block fails on both ranks, after they generated and before."""
    train, engine = build(model, "1-1-2", (None, None))
    for _ in range(2):
        with pytest.raises(KeyError, match="ours"), engine.generation():
            fail_after(engine)
        step(train)
    for _ in range(2):
        with engine.generation():
            engine.generate(PROMPTS, GREEDY)
        step(train)
    assert not engine._proof.is_pending
    engine.close()


class DyingEngine(PackedEngine):
    """It dies while it generates, and each later request is an error of its own."""

    is_dead = False

    def generate(self, batch, sampling):
        self.is_dead = True
        raise BackendError("the engine died in 'generate'")

    def release(self):
        if self.is_dead:
            raise BackendError("the engine has ended")
        return super().release()


def lose_the_engine(model):
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    config = TrainConfig(learning_rate=1e-2)
    train = load_train_backend("fsdp").build(model, topology=topology, config=config)
    inner = load_rollout_backend("transformers").build(model, topology=topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_is_on_host", lambda storage: False)
        engine = HybridEngine(train, DyingEngine(inner), topology, training_weights="offload")
        with pytest.raises(BackendError, match=r"^the engine died in 'generate'$"), engine.generation():
            engine.generate(PROMPTS, GREEDY)
        assert len(train.compute_logprobs(build_batch(6, vocab_size=VOCAB_SIZE))) == 6


def test_training_has_its_weights_after_an_engine_that_died(ranks2, tmp_path):
    ranks2.run(lose_the_engine, write_tiny_model(tmp_path, max_position_embeddings=128))


def fail_after(engine):
    engine.generate(PROMPTS, GREEDY)
    raise KeyError("ours")


def test_a_block_that_fails_leaves_no_samples(ranks2, tmp_path):
    ranks2.run(fail_in_a_block, write_tiny_model(tmp_path, max_position_embeddings=128))


def train_in_a_block(model):
    train, engine = build(model, "1-1-2", (None, None))
    with engine.generation():
        engine.generate(PROMPTS, GREEDY)
        step(train)
    engine.close()


def test_samples_are_not_scored_if_weights_change_in_the_block(ranks2, tmp_path):
    ranks2.run(train_in_a_block, write_tiny_model(tmp_path, max_position_embeddings=128))


def size_of_samples(model, num_rows):
    _, engine = build(model, "1-1-1", (None,))
    with engine.generation():
        engine.generate(build_prompts(num_rows, vocab_size=VOCAB_SIZE), GREEDY)
        size = len(pickle.dumps(engine._proof._samples))
    engine.close()
    return size


def test_what_ranks_exchange_does_not_grow_with_the_batch(ranks1, tmp_path):
    model = write_tiny_model(tmp_path, max_position_embeddings=128)
    (small,), (large,) = (ranks1.run(size_of_samples, model, rows) for rows in (8, 512))
    assert large < 1.5 * small


def test_tokens_that_nobody_drew_are_not_scored():
    """A rollout backend with tools: the tool's tokens have no log-probs."""
    lengths = torch.arange(1, 5)
    offsets = torch.tensor([0, 1, 3, 6, 10])
    logprobs = torch.linspace(-3, -1, 10)
    mask = torch.arange(10) % 3 != 1
    column = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
    reported = logprobs.masked_fill(~mask, torch.nan)
    responses = TensorDict(
        {"response_ids": column(torch.arange(10)), "rollout_logprobs": column(reported), "response_mask": column(mask)},
        batch_size=[len(lengths)],
    )
    train = SimpleNamespace(compute_dtype="float32", weight_changes=0)
    train.compute_logprobs = lambda batch, **given: {"logprobs": column(logprobs[batch["response_ids"].values()])}
    proof = SamplerCheck(train, Topology(ParallelSpec()), ["float32"])
    prompts = TensorDict({"prompt_ids": column(torch.arange(10))}, batch_size=[len(lengths)])
    proof.note(prompts, responses, GREEDY)
    proof._score_again(proof._samples)()
    train.compute_logprobs = lambda batch, **given: {"logprobs": column(logprobs.flip(0))}
    with pytest.raises(ReshardError, match=WRONG):
        proof._score_again(proof._samples)()
