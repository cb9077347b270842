"""Training weights inside generation weights: they come back whole, and the engine may not give them up."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy
import pytest
import torch

from hf_engine import HybridEngine, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.moving import ShardMover
from hf_engine.resharding.plan import plan_reshard
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology
from hf_protocols.errors import ReshardError


@pytest.mark.parametrize("first_rows", [1, 2, 3])
def test_parts_of_a_parameter_in_two_storages_come_back(first_rows):
    """Some rows of each part are in the generation weights; one storage is empty still while the other is filled."""
    halves = (Box((0, 0), (first_rows, 5)), Box((first_rows, 0), (4 - first_rows, 5)))
    source = WeightLayout(shapes={"w": (4, 5)}, boxes={0: {"w": halves}}, dtype="float32")
    target = WeightLayout(shapes={"w": (4, 5)}, boxes={0: {"w": (Box((0, 1), (4, 3)),)}}, dtype="float32")
    whole = torch.arange(20.0).view(4, 5)
    train = {"w": [whole[:first_rows].clone(), whole[first_rows:].clone()]}
    generation = {"w": [torch.empty(4, 3)]}
    mover = ShardMover(plan_reshard(source, target), 0, train, generation)
    mover.restore()
    mover.prepare(["w"])
    mover.empty(["w"])
    assert [part.untyped_storage().nbytes() for part in train["w"]] == [0, 0]
    assert torch.equal(generation["w"][0], whole[:, 1:4])
    mover.restore()
    assert torch.equal(torch.cat(train["w"]), whole)
    assert generation["w"][0].untyped_storage().nbytes() == 0


def test_parameters_are_lent_in_one_call_and_come_back():
    """Two parts of one storage go together, a parameter of another shape is copied, and all come back."""
    shapes = {"a": (2, 3), "b": (2, 3), "c": (4,), "d": (4,)}
    whole = {name: (Box((0,) * len(shape), shape),) for name, shape in shapes.items()}
    source = WeightLayout(shapes=shapes, boxes={0: whole}, dtype="float32")
    target = WeightLayout(shapes=shapes, boxes={0: whole | {"d": (Box((1,), (3,)),)}}, dtype="float32")
    stack, own = torch.arange(12.0).view(2, 2, 3), torch.empty(2, 2, 3)
    train = {"a": [stack[0]], "b": [stack[1]], "c": [torch.arange(4.0)], "d": [torch.arange(4.0)]}
    generation = {"a": [own[0]], "b": [own[1]], "c": [torch.empty(4)], "d": [torch.empty(3)]}
    calls = []

    def adopt(tensors):
        calls.append(tensors)
        if len(calls) == 2:
            raise ReshardError("cannot adopt them")

    mover = ShardMover(plan_reshard(source, target), 0, train, generation, adopt=adopt)
    mover.restore()
    for _ in range(2):
        calls.clear()
        mover.lend(["a", "b", "c", "d"])
        mover.prepare(["c", "d"])
        assert [set(each) for each in calls] == [{"a", "b", "c"}]
        assert all(calls[0][name] is train[name][0] for name in calls[0])
        assert generation["d"][0].tolist() == [1, 2, 3]
        with pytest.raises(ReshardError, match="cannot adopt them"):
            mover.restore()
        mover.restore()
        assert calls[2] == {name: generation[name][0] for name in "abc"}
        assert not mover.has_moved


def release_inside_the_block(model):
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology)
    before = {name: shard.clone() for name, shard in train.local_weights().items()}
    for method in ("release", "close"):
        with pytest.raises(BackendError, match="would lose the training weights"), engine.generation():
            getattr(rollout, method)()
        for name, shard in train.local_weights().items():
            assert torch.equal(shard, before[name]), name
    rollout.release()
    with engine.generation():
        pass
    engine.close()


def test_training_weights_inside_are_not_released(ranks2, tmp_path):
    ranks2.run(release_inside_the_block, write_tiny_model(tmp_path))


def change_weights_on_rank_1(model):
    """Checks that both ranks raise at once, and the next transition moves."""
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology, training_weights="keep")
    with engine.generation():
        pass
    rank = torch.distributed.get_rank()
    train._weight_changes += rank
    did = "did. Call train_step" if rank else "did not. Call train_step"
    with pytest.raises(ReshardError, match=f"those of rank {rank} {did}"), engine.generation():
        pass
    train._weight_changes += 1 - rank
    with engine.generation():
        version = rollout.weight_version
    engine.close()
    return version


def test_ranks_that_disagree_about_changes_are_reported(ranks2, tmp_path):
    assert ranks2.run(change_weights_on_rank_1, write_tiny_model(tmp_path)) == [1, 1]


def test_padding_goes_first_and_comes_back_as_zeros():
    """Padding next to weights is freed and counted; a storage that a weight shares does not count as padding."""
    layout = WeightLayout(shapes={"w": (4,)}, boxes={0: {"w": (Box((0,), (4,)),)}}, dtype="float32")
    weights, generation, room = torch.arange(4.0), {"w": [torch.empty(4)]}, torch.zeros(6)
    padding = (room[:0], weights[:0])
    mover = ShardMover(plan_reshard(layout, layout), 0, {"w": [weights]}, generation, padding=padding)
    assert mover.host_bytes == 0
    assert mover.peak_bytes([(["w"], ["w"])]) == weights.nbytes + room.nbytes
    mover.restore()
    mover.prepare(["w"])
    assert room.untyped_storage().nbytes() == 0
    mover.empty(["w"])
    room.untyped_storage().resize_(room.nbytes)
    room.fill_(7.0)
    room.untyped_storage().resize_(0)
    mover.restore()
    assert room.tolist() == [0.0] * 6
    assert weights.tolist() == [0.0, 1.0, 2.0, 3.0]


class Padded:
    """A training backend with padding of its user's."""

    def __init__(self, train, padding):
        self._train, self._given = train, padding

    def __getattr__(self, name):
        return getattr(self._train, name)

    def padding(self):
        return self._given


def refuse_padding(model):
    topology, found = Topology(ParallelSpec(), GenerationSpec()), []
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    for padding in (None, ["x"], [torch.from_numpy(numpy.zeros(3))]):
        with pytest.raises((BackendError, ReshardError)) as refused:
            HybridEngine(Padded(train, padding), rollout, topology)
        found.append(str(refused.value))
    HybridEngine(Padded(train, [torch.zeros(3)]), rollout, topology).close()
    return found


def test_padding_that_cannot_be_freed_is_refused_before_moving(ranks1, tmp_path):
    (refused,) = ranks1.run(refuse_padding, write_tiny_model(tmp_path))
    assert refused[0] == "the training backend: 'padding()' is None. Use a list of tensors"
    assert refused[1] == "the training backend: 'padding()' is 'x'. Use tensors"
    assert re.match(
        r"the training backend: the memory of 'padding\(\)' cannot be freed, .*training_weights=", refused[2]
    )


def of_numpy(*shape):
    """Memory that torch reads and writes, and cannot free."""
    return torch.from_numpy(numpy.zeros(shape, dtype=numpy.float32))


@pytest.mark.parametrize(
    ("train", "generation", "refused"),
    [
        ({"w": of_numpy(4)}, {"w": torch.zeros(4), "v": torch.zeros(2)}, r"the training weights: the memory of 'w'"),
        ({"w": torch.zeros(4)}, {"w": of_numpy(4), "v": torch.zeros(2)}, r"weight_buffers\(\): the memory of 'w'"),
        # Of another stage's parameter, which this rank does not train.
        ({"w": torch.zeros(4)}, {"w": torch.zeros(4), "v": of_numpy(2)}, r"weight_buffers\(\): the memory of 'v'"),
        # Nothing is freed where nothing is.
        ({"w": torch.zeros(4), "u": of_numpy(0)}, {"w": torch.zeros(4), "v": torch.zeros(2), "u": of_numpy(0)}, None),
    ],
)
def test_weights_that_cannot_be_freed_are_refused_before_moving(train, generation, refused):
    """Ranks 0 and 1 train "w" and "v", each one of them; rank 0 generates with both."""
    shapes = {"w": (4,), "v": (2,), "u": (0,)}
    boxes = {name: (Box.whole(shape),) for name, shape in shapes.items()}
    source = WeightLayout(
        shapes=shapes, boxes={0: {name: boxes[name] for name in train}, 1: {"v": boxes["v"], "u": boxes["u"]}}
    )
    target = WeightLayout(shapes=shapes, boxes={0: boxes})
    parts = [
        {name: [part] for name, part in tensors.items()} for tensors in (train, {"u": torch.zeros(0)} | generation)
    ]
    with nullcontext() if refused is None else pytest.raises(ReshardError, match=f"{refused} cannot be freed"):
        ShardMover(plan_reshard(source, target), 0, *parts).restore()


def test_restoring_a_half_done_move_frees_unused_tensors_first():
    """Such as the generation tensor of a parameter whose training tensor is still there."""
    shapes = {"a": (4,), "b": (4,)}
    layout = WeightLayout(shapes=shapes, boxes={0: {name: (Box.whole((4,)),) for name in shapes}})
    train = {name: [torch.arange(4.0)] for name in shapes}
    generation = {name: [torch.empty(4)] for name in shapes}
    mover = ShardMover(plan_reshard(layout, layout), 0, train, generation)
    mover.restore()
    mover.prepare(["a", "b"])
    mover.empty(["a"])
    freed_before = []

    def refill(key, names, real=mover._refill):
        freed_before.append(generation["b"][0].untyped_storage().nbytes() == 0)
        real(key, names)

    mover._refill = refill
    mover.restore()
    assert freed_before == [True]
    assert all(torch.equal(train[name][0], torch.arange(4.0)) for name in shapes)
    assert all(generation[name][0].untyped_storage().nbytes() == 0 for name in shapes)
