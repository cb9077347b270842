from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, greedy_response, rows_of, select_rows
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)


def build_engine(train_model, rollout_model, **options):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    train = load_train_backend("fsdp").build(
        train_model, topology=topology, config=TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    )
    rollout = load_rollout_backend("transformers").build(rollout_model, topology=topology)
    return train, rollout, HybridEngine(train, rollout, topology, **options)


def step(train):
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    rows = range(dist.get_rank(), 6, dist.get_world_size())

    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    train.train_step(select_rows(batch, rows), loss, 18.0)


def generate_between_steps(train_model, rollout_model, directory, release_weights):
    """The rollout starts from other weights than the training backend."""
    train, rollout, engine = build_engine(train_model, rollout_model, release_weights=release_weights)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    with pytest.raises(BackendError, match="inside `with engine"):
        engine.generate(prompts, GREEDY)
    assert engine.last_transition is None
    transitions = []
    for index in range(4):
        if index != 2:
            step(train)
        with engine.generation():
            responses = engine.generate(prompts, GREEDY)
        train.export_hf(Path(directory) / str(index))
        transitions.append(engine.last_transition)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
        exported = AutoModelForCausalLM.from_pretrained(Path(directory) / str(index), dtype=torch.float32).eval()
        for prompt, found in zip(rows_of(prompts["prompt_ids"]), rows_of(responses["response_ids"]), strict=True):
            assert torch.equal(found, greedy_response(exported, prompt, 6, frozenset()))
        if not release_weights:
            for name, parameter in exported.named_parameters():
                assert torch.equal(rollout.weight_buffers()[name], parameter), name
    train.load_hf(rollout_model)
    with engine.generation():
        transitions.append(engine.last_transition)
    planned = engine.plan.recv_bytes[dist.get_rank()]
    engine.close()
    return transitions, planned


@pytest.mark.parametrize("release_weights", [False, True])
def test_generation_sees_the_trained_weights(ranks2, tmp_path, release_weights):
    models = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    results = ranks2.run(generate_between_steps, *models, tmp_path / "exports", release_weights)
    for transitions, planned in results:
        assert [t.weight_version for t in transitions] == [1, 2, 2, 3, 4]
        moved = [t.recv_bytes for t in transitions]
        assert moved == [planned, planned, planned if release_weights else 0, planned, planned]
        assert all((t.seconds > 0) == (t.recv_bytes > 0) for t in transitions)
    total = sum(planned for _, planned in results)
    assert total == (VOCAB_SIZE * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 128) + 64) * 4


def untouched_weights_keep_their_version(model):
    train, rollout, engine = build_engine(model, model)
    for _ in range(2):
        with engine.generation():
            assert rollout.weight_version == engine.weight_version == 0
    step(train)
    with engine.generation():
        assert rollout.weight_version == 1


def test_the_version_counts_changes_only(ranks1, tmp_path):
    ranks1.run(untouched_weights_keep_their_version, write_tiny_model(tmp_path))


def refuse_other_models(tied, untied, wide):
    with pytest.raises(ReshardError, match=r"the source lacks \['lm_head.weight'\]"):
        build_engine(tied, untied)
    with pytest.raises(ReshardError, match=r"the target has no place for \['lm_head.weight'\]"):
        build_engine(untied, tied)
    with pytest.raises(ReshardError, match=r"'model.embed_tokens.weight' is \(64, 64\) in the source, \(80, 64\)"):
        build_engine(tied, wide)
    _, rollout, engine = build_engine(tied, tied)
    rollout._model.lm_head_copy = torch.nn.Linear(2, 2)
    with (
        pytest.raises(ReshardError, match=r"extra \['lm_head_copy.bias', 'lm_head_copy.weight'\]"),
        engine.generation(),
    ):
        pass


def test_a_wrong_sync_cannot_pass(ranks2, tmp_path):
    tied = write_tiny_model(tmp_path / "tied")
    untied = write_tiny_model(tmp_path / "untied", tie_embeddings=False)
    wide = write_tiny_model(tmp_path / "wide", vocab_size=80)
    ranks2.run(refuse_other_models, tied, untied, wide)
