"""Transitions that fail on the way, or are refused: an error on every rank, and the training weights as they were."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.resharding import plan
from hf_engine.resharding.execute import ReshardExecutor, as_parts
from hf_engine.resharding.steps import Seals, Step
from hf_engine.testing import LocalRanks, write_tiny_model
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
    train, rollout, engine = build_engine(model, model)
    before = bits(train.local_weights())
    version, rank = rollout.weight_version, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if what == "bit":
            patch.setattr(Step, "unpack", flip_a_bit)
        elif rank == 1:
            train._weight_changes += 1
        message = "digests differ" if what == "bit" else "expected weights of version"
        with pytest.raises(ReshardError, match=message), engine.generation():
            raise AssertionError("no generation from wrong weights")
    assert rollout.weight_version == version
    after = train.local_weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(BackendError, match="inside `with engine"):
        engine.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
    step(train)


def flip_a_bit(self, incoming, *args, real=Step.unpack):
    incoming[self._incoming[0].start + 3] ^= 4
    return real(self, incoming, *args)


@pytest.mark.parametrize("what", ["bit", "version"])
def test_damage_and_a_rank_behind_are_refused(ranks2, tmp_path, what):
    ranks2.run(damage_what_arrives, write_tiny_model(tmp_path), what)


def die_on_the_way(model, is_late):
    train, _, engine = build_engine(model, model, bucket_bytes=1 << 14)
    before = bits(train.local_weights())
    calls = 0

    def exit_midway(operations, real=dist.batch_isend_irecv):
        nonlocal calls
        calls += 1
        if calls == 4 and dist.get_rank() == 1:
            os._exit(1)
        return real(operations)

    with pytest.MonkeyPatch.context() as patch:
        if not is_late:
            patch.setattr(dist, "batch_isend_irecv", exit_midway)
        elif dist.get_rank() == 1:
            patch.setattr(ReshardExecutor, "_check_seals", lambda *_: os._exit(1))
        with pytest.raises(ReshardError, match="transfer of weights lost another rank on rank 0"), engine.generation():
            pass
    after = train.local_weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    raise AssertionError("the survivor holds its training weights")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_peer_that_dies_on_the_way_leaves_a_typed_error_and_the_training_weights(tmp_path, is_late):
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError) as failed:
        ranks.run(die_on_the_way, write_tiny_model(tmp_path), is_late)
    assert "the survivor holds its training weights" in str(failed.value)
    assert "the process of rank 1 died" in str(failed.value)


def fail_on_the_way(model, backend, topology, place):
    """The last rank fails, in a bucket or when it looks at digests."""
    train = load_train_backend(backend).build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology, bucket_bytes=1 << 14)
    before, calls, real = parts_of(train), 0, getattr(*place)

    def fail(*args):
        nonlocal calls
        calls += 1
        if calls == (2 if place[0] is Step else 1):
            raise RuntimeError("no room for this bucket")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(*place, fail)
        with pytest.raises(ReshardError) as failed, engine.generation():
            pass
    assert all(torch.equal(part, value) for part, value in zip(parts_of(train), before, strict=True))
    return str(failed.value)


def parts_of(train):
    return [part.clone() for parts in as_parts(train.local_weights()).values() for part in parts]


@pytest.mark.parametrize("place", [(Step, "unpack"), (Seals, "damaged")], ids=["in a bucket", "after the last"])
def test_a_failure_on_the_way_ends_all_at_once_with_its_reason(tmp_path, place):
    """Also those in another transfer's group, who wait for it at the end; the groups' deadline is beyond the test's."""
    topology = Topology(ParallelSpec(tp_size=2, dp_size=2), GenerationSpec())
    with LocalRanks(4, timeout_s=900) as ranks:
        *told, own = ranks.run(fail_on_the_way, write_tiny_model(tmp_path), "megatron", topology, place)
    assert own.startswith(
        "the transfer of weights failed on rank 3: no room for this bucket; the weights did not arrive; the other "
        "ranks were told. The process groups cannot be used again"
    )
    for rank, text in enumerate(told):
        assert text.startswith(
            f"the transfer of weights ended on rank {rank}: rank 3 failed: RuntimeError: no room for this bucket; the "
            "weights did not arrive. The process groups cannot be used again: start the ranks again"
        )


def die_before(model, training_weights):
    train, _, engine = build_engine(model, model, training_weights=training_weights)
    before = bits(train.local_weights())
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(ReshardError, match="transfer of weights lost another rank on rank 0"), engine.generation():
        pass
    assert all(torch.equal(train.local_weights()[name], value) for name, value in before.items())
    raise AssertionError("the survivor holds its training weights")


@pytest.mark.parametrize("training_weights", ["move", "keep", "offload"])
def test_a_peer_that_is_dead_already_is_a_typed_error(tmp_path, training_weights):
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError, match="the survivor holds its training"):
        ranks.run(die_before, write_tiny_model(tmp_path), training_weights)


def make_a_mistake_on_rank_1(model):
    """Both ranks raise at once, by what rank 1 says; then they generate."""
    rank = dist.get_rank()
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    train, rollout, engine = build_engine(model, model, training_weights="keep")
    mistakes = {
        r"the target tensors of rank 1 do not match": lambda patch: patch.setattr(rollout, "weight_buffers", dict),
        r"the sampler is out of memory": lambda patch: patch.setattr(rollout, "weight_buffers", run_out),
        r"local_weights of rank 1 lost": lambda patch: patch.setattr(train, "local_weights", lose_weights),
    }
    for message, make in mistakes.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                make(patch)
            wanted = ("" if rank else "rank 1 refused: .*") + message
            with pytest.raises((ReshardError, OSError, MemoryError), match=wanted), engine.generation():
                pass
    with pytest.raises((BackendError, ReshardError), match="training_weights='mvoe': give"):
        HybridEngine(train, rollout, topology, training_weights="mvoe" if rank else None)
    mine = "move" if rank else "keep"
    with pytest.raises(BackendError, match=f"different training_weights or bucket_bytes; this one has '{mine}'"):
        HybridEngine(train, rollout, topology, training_weights=mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.ReshardPlan, "digest", 7 + rank)
        with pytest.raises(BackendError, match="the ranks have different plans: build"):
            HybridEngine(train, rollout, topology)
    for name, given in {
        "train=None: give a training backend": (None, rollout, topology),
        "rollout=None: give a rollout backend": (train, None, topology),
        "topology=None: give a Topology": (train, rollout, None),
    }.items():
        wanted = name if rank else f"rank 1 refused: {name}"
        with pytest.raises((BackendError, ReshardError), match=wanted):
            HybridEngine(*(given if rank else (train, rollout, topology)))
    with engine.generation():
        return engine.weight_version


def run_out():
    raise MemoryError("the sampler is out of memory")


def lose_weights():
    raise OSError("local_weights of rank 1 lost")


def test_a_mistake_on_one_rank_is_an_error_on_all(ranks2, tmp_path):
    assert ranks2.run(make_a_mistake_on_rank_1, write_tiny_model(tmp_path)) == [0, 0]


def enter_after_a_refusal(model):
    train, _, engine = build_engine(model, model)
    with engine.generation():
        pass
    step(train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "unpack", flip_a_bit)
        with pytest.raises(ReshardError, match="digests differ"), engine.generation():
            pass
    with engine.generation():
        return engine.last_transition.is_unchanged, engine.weight_version


def test_a_refused_transfer_does_not_make_the_next_look_unchanged(ranks2, tmp_path):
    assert ranks2.run(enter_after_a_refusal, write_tiny_model(tmp_path)) == [(False, 1)] * 2


def fail_on_one_rank(model, training_weights, method):
    """Nothing moves between the ranks of an engine that holds whole weights: they hear of it all the same."""
    train, rollout, engine = build_engine(model, model, training_weights=training_weights)
    is_second, owner = dist.get_rank() == 1, train if method == "offload" else rollout
    told = "^no more memory$" if is_second else "rank 1 refused: .*no more memory.*; no rank generates"
    before, version = bits(train.local_weights()), engine.weight_version
    for _ in range(2):
        step(train)
        before = bits(train.local_weights())
        with pytest.MonkeyPatch.context() as patch:
            if is_second:
                patch.setattr(owner, method, refuse)
            with pytest.raises((MemoryError, BackendError), match=told), engine.generation():
                pytest.fail("a rank generates")
        assert all(torch.equal(after, before[name]) for name, after in train.local_weights().items())
    prompts = build_prompts(2, vocab_size=VOCAB_SIZE)
    with engine.generation():
        drawn = engine.generate(prompts, GREEDY)["weight_version"].tolist()
    assert drawn == [version + 1] * 2, "what no rank generated from takes no version"
    told = "^mine$" if is_second else "rank 1 refused: .*mine.*; generation.* ends with an error on all ranks"
    with pytest.raises((BackendError, ZeroDivisionError), match=told), engine.generation():
        fail_if(is_second)
    assert all(torch.equal(after, before[name]) for name, after in train.local_weights().items())
    engine.close()


def refuse(*_, **__):
    raise MemoryError("no more memory")


def fail_if(fails):
    if fails:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("training_weights", "method"),
    [("keep", "commit_weights"), ("move", "commit_weights"), ("offload", "commit_weights"), ("offload", "offload")],
)
def test_what_one_rank_cannot_enter_no_rank_enters(ranks2, tmp_path, training_weights, method):
    ranks2.run(fail_on_one_rank, write_tiny_model(tmp_path), training_weights, method)


def fail_on_the_way_back(model):
    """What happened first is raised, and says that the training weights may not be whole."""
    _, rollout, engine = build_engine(model, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "commit_weights", refuse)
        patch.setattr(engine._mover, "restore", lambda: fail_if(True))
        with pytest.raises(MemoryError, match="no more memory") as failed, engine.generation():
            pytest.fail("a rank generates")
    return failed.value.__notes__


def test_a_way_back_that_fails_too_is_told(ranks2, tmp_path):
    told = ranks2.run(fail_on_the_way_back, write_tiny_model(tmp_path))
    assert told == [["the way back to training failed too: ZeroDivisionError: mine"]] * 2
