"""An engine that nobody can read and that generates from other weights is refused when its first block ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_prompts, select_rows
from hf_engine.testing._packed import PackedEngine
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
PROMPTS = build_prompts(6, vocab_size=VOCAB_SIZE)


def build(model, layout, spoils_from, **options):
    topology = Topology(ParallelSpec.parse(layout), GenerationSpec())
    name = "fsdp" if topology.train.dp_size == topology.world_size else "megatron"
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=24)
    train = load_train_backend(name).build(model, topology=topology, config=config)
    inner = load_rollout_backend("transformers").build(model, topology=topology)
    spoils = spoils_from[dist.get_rank()]
    return train, HybridEngine(train, PackedEngine(inner, spoils), topology, **options)


def first_generations(model, layout, spoils_from, rows_of_rank, sampling, options):
    """The refusal of every block, or nothing; and how many rows the training backend scored in each."""
    train, engine = build(model, layout, spoils_from, **options)
    scored, score, refusals = [], train.compute_logprobs, []
    train.compute_logprobs = lambda rows, **given: scored.append(len(rows)) or score(rows, **given)
    rows = rows_of_rank[dist.get_rank()]
    for _ in range(3):
        refusal = ""
        try:
            with engine.generation():
                if rows:
                    engine.generate(select_rows(PROMPTS, rows), sampling)
        except ReshardError as error:
            refusal = str(error)
        refusals.append(refusal)
    engine.close()
    return refusals, scored


SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.7, top_k=20, n=2)
EVERY_ROW = ([0, 1, 2, 3, 4, 5], [5, 4])


@pytest.mark.parametrize("options", [{}, {"training_weights": "offload"}], ids=["keep", "offload"])
@pytest.mark.parametrize(("layout", "scored"), [("1-1-2", [[4], [2]]), ("1-2-1", [[6], [6]]), ("2-1-1", [[6], [6]])])
def test_an_engine_with_the_right_weights_is_asked_once(ranks2, tmp_path, layout, scored, options):
    """Ranks of one tensor group or pipeline score what all of them drew: they train on the same rows."""
    model = write_tiny_model(tmp_path)
    found = ranks2.run(first_generations, model, layout, (None, None), EVERY_ROW, SAMPLING, options)
    assert found == [(["", "", ""], rows) for rows in scored]


@pytest.mark.parametrize("layout", ["1-1-2", "1-2-1"])
@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(max_new_tokens=6, greedy=True)], ids=["drawn", "greedy"])
def test_wrong_weights_on_one_rank_are_an_error_on_all(ranks2, tmp_path, layout, sampling):
    model = write_tiny_model(tmp_path)
    found = ranks2.run(first_generations, model, layout, (None, 1), EVERY_ROW, sampling, {})
    for refusals, _ in found:
        for refusal in refusals:
            assert "not those of the training weights" in refusal
    assert ("rank 1 refused" in found[0][0][0]) == (layout == "1-1-2")


def test_ranks_without_rows_score_those_of_others(ranks2, tmp_path):
    found = ranks2.run(first_generations, write_tiny_model(tmp_path), "1-1-2", (None, 1), ([], [2]), SAMPLING, {})
    assert [scored for _, scored in found] == [[1] * 3] * 2
    assert all("not those of the training weights" in refusal for refusals, _ in found for refusal in refusals)


def test_blocks_that_generate_nothing_prove_nothing(ranks2, tmp_path):
    found = ranks2.run(first_generations, write_tiny_model(tmp_path), "1-1-2", (1, 1), ([], []), SAMPLING, {})
    assert found == [(["", "", ""], [])] * 2


def generate_and_die(engine):
    engine.generate(PROMPTS, SAMPLING)
    if dist.get_rank() == 1:
        os._exit(1)


def lose_a_rank(model, told):
    """Rank 1 dies after it has generated."""
    _, engine = build(model, "1-1-2", (None, None))
    with pytest.raises(BackendError, match=r"generation\(\) lost another rank on rank 0"), engine.generation():
        generate_and_die(engine)
    with pytest.raises(BackendError, match="sum_over_ranks lost another rank on rank 0"):
        engine.sum_over_ranks(1.0)
    Path(told).touch()


def test_a_rank_that_dies_before_the_samples_are_scored_is_an_error(tmp_path):
    model, told = write_tiny_model(tmp_path / "model"), tmp_path / "told"
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError, match="the process of rank 1 died"):
        ranks.run(lose_a_rank, model, told)
    assert told.exists()
