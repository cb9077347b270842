"""Transitions that fail on the way, or are refused: an error on every rank, and the training weights as they were."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_engine import HybridEngine, LoraConfig, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.resharding import plan
from hf_engine.resharding.steps import Step
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
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


def bits(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def refuse_other_models(tied, untied, wide):
    with pytest.raises(ReshardError, match=r"the source lacks \['lm_head.weight'\]"):
        build_engine(tied, untied)
    with pytest.raises(ReshardError, match=r"the target has no place for \['lm_head.weight'\]"):
        build_engine(untied, tied)
    with pytest.raises(ReshardError, match=r"'model.embed_tokens.weight' is \(64, 64\) in the source, \(80, 64\)"):
        build_engine(tied, wide)
    _, rollout, engine = build_engine(tied, tied)
    rollout._buffers["lm_head_copy.weight"] = torch.ones(2, 2)
    with pytest.raises(ReshardError, match=r"extra \['lm_head_copy.weight'\]"), engine.generation():
        pass


def test_a_wrong_sync_cannot_pass(ranks2, tmp_path):
    tied = write_tiny_model(tmp_path / "tied")
    untied = write_tiny_model(tmp_path / "untied", tie_embeddings=False)
    wide = write_tiny_model(tmp_path / "wide", vocab_size=80)
    ranks2.run(refuse_other_models, tied, untied, wide)


def damage_what_arrives(model, what):
    """A bit flips on the way, or a rank is a step behind: typed errors, and the training weights are as before."""
    train, rollout, engine = build_engine(model, model, verify_transfers=True)
    before = bits(train.local_weights())
    version, rank = rollout.weight_version, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if what == "bit":
            patch.setattr(Step, "unpack", flip_a_bit)
        elif rank == 1:
            train._weight_changes += 1
        message = (
            "checksums differ"
            if what == "bit"
            else "versions of the weights: 0 on rank 0, 1 on rank 1; no weights were"
        )
        with pytest.raises(ReshardError, match=message), engine.generation():
            raise AssertionError("no generation from wrong weights")
    assert rollout.weight_version == version
    after = train.local_weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(BackendError, match="inside `with engine"):
        engine.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
    step(train)


def disagree_with_merged_adapters(model):
    """Reading merged adapters is collective: ranks agree to do it, and then on what they read."""
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    config = TrainConfig(learning_rate=1e-2, lora=LoraConfig(rank=2, targets=("q_proj",)))
    train = load_train_backend("fsdp").build(model, topology=topology, config=config)
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology)
    step(train)
    agreements = []
    for _ in range(2):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce, engine.generation():
            pass
        agreements.append(reduce.call_count)
    assert agreements == [2, 1], "after a step, and without a change"
    rank = dist.get_rank()
    if rank:
        train._note_change()
    message = f"those of rank {rank} {'did' if rank else 'did not'}. Call train_step"
    with pytest.raises(ReshardError, match=message), engine.generation():
        pass
    engine.close()


def test_merged_adapters_that_changed_on_one_rank_are_refused(ranks2, tmp_path):
    ranks2.run(disagree_with_merged_adapters, write_tiny_model(tmp_path))


def flip_a_bit(self, incoming, *args, real=Step.unpack):
    incoming[self._incoming[0].start + 3] ^= 4
    return real(self, incoming, *args)


@pytest.mark.parametrize("what", ["bit", "version"])
def test_damage_and_a_rank_behind_are_refused(ranks2, tmp_path, what):
    ranks2.run(damage_what_arrives, write_tiny_model(tmp_path), what)


def make_a_mistake_on_rank_1(model):
    """Both ranks raise at once, by what rank 1 says; then they generate."""
    rank = dist.get_rank()
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    train, rollout, engine = build_engine(model, model, training_weights="keep")
    mistakes = {
        r"the target tensors of rank 1 do not match": lambda patch: patch.setattr(rollout, "weight_buffers", dict),
    }
    for message, make in mistakes.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                make(patch)
            wanted = ("" if rank else "rank 1 refused: .*") + message
            with pytest.raises(ReshardError, match=wanted), engine.generation():
                pass
    with pytest.raises((BackendError, ReshardError), match=r"training_weights='mvoe'. Use"):
        HybridEngine(train, rollout, topology, training_weights="mvoe" if rank else None)
    mine = "move" if rank else "keep"
    with pytest.raises(BackendError, match=f"bucket_bytes or verify_transfers; this one has '{mine}'"):
        HybridEngine(train, rollout, topology, training_weights=mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.ReshardPlan, "digest", 7 + rank)
        with pytest.raises(BackendError, match=r"the ranks have different plans. Build"):
            HybridEngine(train, rollout, topology)
    for name, given in {
        "train=None. Use a training backend": (None, rollout, topology),
        "rollout=None. Use a rollout backend": (train, None, topology),
        "topology=None. Use a Topology": (train, rollout, None),
    }.items():
        wanted = name if rank else f"rank 1 refused: {name}"
        with pytest.raises((BackendError, ReshardError), match=wanted):
            HybridEngine(*(given if rank else (train, rollout, topology)))
    with engine.generation():
        return engine.weight_version


def test_a_mistake_on_one_rank_is_an_error_on_all(ranks2, tmp_path):
    assert ranks2.run(make_a_mistake_on_rank_1, write_tiny_model(tmp_path)) == [0, 0]


def enter_after_a_refusal(model):
    train, _, engine = build_engine(model, model, verify_transfers=True)
    with engine.generation():
        pass
    step(train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "unpack", flip_a_bit)
        with pytest.raises(ReshardError, match="checksums differ"), engine.generation():
            pass
    with engine.generation():
        return engine.last_transition.recv_bytes > 0, engine.weight_version


def test_a_transfer_after_a_refused_one_moves_weights(ranks2, tmp_path):
    assert ranks2.run(enter_after_a_refusal, write_tiny_model(tmp_path)) == [(True, 1)] * 2


def refuse(*_, **__):
    raise MemoryError("no more memory")


def fail_if(fails):
    if fails:
        raise ZeroDivisionError("mine")


def fail_alike(model, training_weights, method):
    """Checks that an error of all ranks ends nothing: training weights are back, and the next block generates."""
    train, rollout, engine = build_engine(model, model, training_weights=training_weights)
    owner = train if method == "offload" else rollout
    version = engine.weight_version
    step(train)
    before = bits(train.local_weights())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, refuse)
        with pytest.raises(MemoryError, match=r"^no more memory$"), engine.generation():
            pytest.fail("a rank generates")
    assert all(torch.equal(after, before[name]) for name, after in train.local_weights().items())
    with engine.generation():
        drawn = engine.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)["weight_version"].tolist()
    assert drawn == [version + 1] * 2, "what no rank generated from takes no version"
    with pytest.raises(ZeroDivisionError, match=r"^mine$"), engine.generation():
        fail_if(True)
    assert all(torch.equal(after, before[name]) for name, after in train.local_weights().items())
    engine.close()


@pytest.mark.parametrize(
    ("training_weights", "method"),
    [("keep", "commit_weights"), ("move", "commit_weights"), ("offload", "offload")],
)
def test_a_block_that_all_ranks_cannot_enter_is_entered_again(ranks2, tmp_path, training_weights, method):
    ranks2.run(fail_alike, write_tiny_model(tmp_path), training_weights, method)


def fail_on_the_way_back(model):
    """Checks that the first error is raised, and returns its notes."""
    _, rollout, engine = build_engine(model, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "commit_weights", refuse)
        patch.setattr(engine._way._mover, "restore", lambda: fail_if(True))
        with pytest.raises(MemoryError, match="no more memory") as failed, engine.generation():
            pytest.fail("a rank generates")
    return failed.value.__notes__


def test_a_way_back_that_fails_too_is_reported(ranks2, tmp_path):
    told = ranks2.run(fail_on_the_way_back, write_tiny_model(tmp_path))
    assert told == [["the way back to training failed too: ZeroDivisionError: mine"]] * 2
