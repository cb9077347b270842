from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from engine_testing.shapes import tiny_shape
from engine_testing.weights import cut_weights, numbered_weights
from hf_engine.hybrid_engine.weight_sync import WeightSync
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.model_layouts import generation_layout
from hf_engine.resharding.steps import Step
from hf_engine.testing import LocalRanks
from hf_protocols.errors import ReshardError
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

MODEL = tiny_shape()


def weights_of(version):
    return numbered_weights(MODEL.parameters(), version=version)


@pytest.fixture(scope="module")
def ranks4():
    with LocalRanks(4) as ranks:
        yield ranks


def train_on_two_generate_on_two():
    """Ranks 1 and 3 train with FSDP, 0 and 2 generate with TP 2: three versions arrive, bit for bit."""
    rank = dist.get_rank()
    source = fsdp_layout(MODEL.parameters(), range(2))
    target = generation_layout(MODEL, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)))
    trains, index = rank % 2 == 1, rank // 2
    sync = WeightSync(source if trains else target, side="source" if trains else "target", bucket_bytes=1 << 10)
    buffers = cut_weights(target, index, weights_of(0))
    for version in (1, 5, 6):
        if trains:
            sync.send(cut_weights(source, index, weights_of(version)), version=version)
            continue
        assert sync.receive(buffers) == version
        expected = cut_weights(target, index, weights_of(version))
        for name, parts in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(buffers[name], parts, strict=True)), name
    with pytest.raises(ReshardError, match="is for the"):
        (sync.receive if trains else sync.send)(*([buffers] if trains else [{}]), **({} if trains else {"version": 1}))
    return sync.plan.recv_bytes[rank], sync.plan.send_bytes[rank]


def bring_buffers():
    """A bias in bfloat16, a table of ids and a flag come with every version, in place; others are refused."""
    rank, layout = dist.get_rank(), fsdp_layout({"w": (8, 4)}, range(2))
    side = "source" if rank % 2 else "target"
    held = {
        "gate.bias": torch.full((3,), float(rank), dtype=torch.bfloat16),
        "ids": torch.full((2, 2), rank),
        "is_set": torch.tensor(rank == 1),
    }
    sync, weights = WeightSync(layout, side=side, buffers=held), {"w": torch.full((4, 4), 2.0)}
    for version in (1, 2):
        if side == "source":
            held["gate.bias"].fill_(rank / 2 + version)
            sync.send(weights, version=version)
            continue
        received = {"w": torch.zeros(4, 4)}
        sync.receive(received)
        assert torch.equal(received["w"], weights["w"])
        assert held["gate.bias"].tolist() == [0.5 + version] * 3, "of the first source rank, which is rank 1"
        assert held["ids"].tolist() == [[1, 1], [1, 1]] and held["is_set"].item()
    with pytest.raises(ReshardError, match=r"rank \d was given other buffers than rank 0, such as 'ids'"):
        WeightSync(layout, side=side, buffers=held if rank == 1 else {"gate.bias": held["gate.bias"]})


def test_buffers_come_with_the_weights(ranks4):
    ranks4.run(bring_buffers)


def test_two_ranks_send_to_two_others(ranks4):
    moved = ranks4.run(train_on_two_generate_on_two)
    target = generation_layout(MODEL, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)))
    assert [received for received, _ in moved] == [target.held_bytes(0), 0, target.held_bytes(1), 0]
    assert sum(sent for _, sent in moved) == target.held_bytes(0) + target.held_bytes(1)


def sync_on_two_machines():
    """Ranks 0 and 3 are on one machine, 1 and 2 on another; both senders hold all."""
    rank = dist.get_rank()
    layout = replicated_layout(MODEL.parameters(), range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "one" if rank in (0, 3) else "other")
        sync = WeightSync(layout, side="source" if rank < 2 else "target")
    return {(message.source, *message.destinations) for message in sync.plan.messages}


def test_senders_are_on_the_machine_of_their_receivers(ranks4):
    assert ranks4.run(sync_on_two_machines) == [{(0, 3), (1, 2)}] * 4


def send_different_versions():
    rank = dist.get_rank()
    shapes = {"w": (8, 4)}
    layout = fsdp_layout(shapes, range(2)) if rank < 2 else replicated_layout(shapes, range(2))
    sync = WeightSync(layout, side="source" if rank < 2 else "target")
    weights = {"w": torch.ones(4, 4) if rank < 2 else torch.zeros(8, 4)}
    with pytest.raises(ReshardError, match="versions of the weights: 0 on rank 0, 1 on rank 1; no weights were moved"):
        sync.send(weights, version=rank) if rank < 2 else sync.receive(weights)


def send_different_versions_to_different_ranks():
    """No rank receives from two senders, and none but the senders knows a version."""
    rank = dist.get_rank()
    sync = WeightSync(fsdp_layout({"w": (8, 4)}, range(2)), side="source" if rank < 2 else "target")
    weights = {"w": torch.zeros(4, 4)}
    with pytest.raises(ReshardError, match="versions of the weights: 0 on rank 0, 1 on rank 1; no weights were moved"):
        sync.send(weights, version=rank) if rank < 2 else sync.receive(weights)


def verify_what_arrives():
    """A bit that flips on the way is an error on all ranks; without `verify_transfers` it arrives as it is."""
    rank = dist.get_rank()
    side = "source" if rank < 2 else "target"
    layout = fsdp_layout({"w": (8, 4)}, range(2)) if rank < 2 else replicated_layout({"w": (8, 4)}, range(2))

    def move(sync, version):
        weights = {"w": torch.ones(4, 4) if rank < 2 else torch.zeros(8, 4)}
        sync.send(weights, version=version) if rank < 2 else sync.receive(weights)
        return rank < 2 or torch.equal(weights["w"], torch.ones(8, 4))

    with pytest.raises(ReshardError, match=r"the ranks were given verify_transfers of \[False, True\]. Give all"):
        WeightSync(layout, side=side, verify_transfers=rank == 3)
    found = []
    for verifies in (True, False):
        sync = WeightSync(layout, side=side, verify_transfers=verifies)
        found.append(move(sync, 1))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(Step, "unpack", flip_a_bit)
            if verifies:
                with pytest.raises(ReshardError, match=r"checksums differ|another rank refused what it received"):
                    move(sync, 2)
            else:
                found.append(move(sync, 2))
    return found


def flip_a_bit(self, incoming, *args, real=Step.unpack):
    incoming[self._incoming[0].start + 3] ^= 4
    return real(self, incoming, *args)


def test_bytes_are_compared_on_request(ranks4):
    assert ranks4.run(verify_what_arrives) == [[True, True, rank != 2] for rank in range(4)]


def receive_an_empty_shard():
    """One row for two ranks: the second has none of it, and hears of the version nevertheless."""
    rank = dist.get_rank()
    sync = WeightSync(fsdp_layout({"w": (1, 4)}, range(2)), side="source" if rank < 2 else "target")
    weights = {"w": torch.full((1 - rank % 2, 4), 2.0 if rank < 2 else 0.0)}
    if rank < 2:
        return sync.send(weights, version=7).version
    version = sync.receive(weights)
    assert torch.equal(weights["w"], torch.full((1 - rank % 2, 4), 2.0))
    return version


def receive_nothing_at_all():
    is_source = dist.get_rank() < 3
    layout = fsdp_layout({"w": (3, 4)}, range(3)) if is_source else WeightLayout(shapes={"w": (3, 4)}, boxes={0: {}})
    sync = WeightSync(layout, side="source" if is_source else "target")
    if is_source:
        return sync.send({"w": torch.ones(1, 4)}, version=1).recv_bytes
    with pytest.raises(ReshardError, match="no rank of the target side holds a box"):
        sync.receive({})
    return 0


def test_a_rank_that_gets_nothing_knows_the_version(ranks4):
    assert ranks4.run(receive_an_empty_shard) == [7] * 4
    assert ranks4.run(receive_nothing_at_all) == [0] * 4


def refuse_sides_that_do_not_fit():
    with pytest.raises(ReshardError, match='no rank of the group was made with side="target"'):
        WeightSync(fsdp_layout({"w": (8,)}, range(4)), side="source")
    side = "source" if dist.get_rank() < 3 else "target"
    with pytest.raises(ReshardError, match="the source layout has 2 ranks, its side of the group 3"):
        WeightSync(fsdp_layout({"w": (8,)}, range(2 if side == "source" else 1)), side=side)


def mistakes_on_one_rank():
    """Rank 3's own; the ranks of both sides hear of it within no deadline."""
    rank = dist.get_rank()
    alone = rank == 3
    layout = (fsdp_layout if rank < 2 else replicated_layout)({"w": (8, 4)}, range(2))
    side = "source" if rank < 2 else "target"
    for message, change in {
        'rank 3: side=\'left\'. Use "source" or "target"': {"side": "left"},
        "rank 3: layout=None. Use a WeightLayout": {"layout": None},
        "rank 3: device='gpu' cannot be used": {"device": "gpu"},
        "rank 3: device='meta' holds no bytes": {"device": "meta"},
        "rank 3: bucket_bytes='1' must be a whole number": {"bucket_bytes": "1"},
        "rank 3: buffers=None. Use a mapping": {"buffers": None},
        r"rank 3: buffers\['bias'\]=1.5. Use a tensor": {"buffers": {"bias": 1.5}},
        "(rank 3 refused: |^)its layout is not that of the first target rank": {
            "layout": replicated_layout({"w": (8, 4)}, range(2), dtype="bfloat16")
        },
        r"bucket_bytes of \[1024, 67108864\]": {"bucket_bytes": 1024},
    }.items():
        with pytest.raises(ReshardError, match=message):
            WeightSync(**({"layout": layout, "side": side} | (change if alone else {})))
    sync = WeightSync(layout, side=side)
    given = {"w": torch.zeros(4, 4) if rank < 2 else torch.zeros(8, 4 + alone)}
    with pytest.raises(ReshardError, match=r"(^|rank 3 refused: )the target tensors of rank 3 .*\(8, 5\)"):
        sync.send(given, version=1) if rank < 2 else sync.receive(given)
    for problem, tensor in {
        "is on the meta device": torch.zeros(8, 4, device="meta"),
        "is torch.sparse_coo, not dense": torch.zeros(8, 4).to_sparse(),
        "has no memory": emptied(8, 4),
        "is expanded": torch.zeros(8, 1).expand(8, 4),
        "is expanded, or overlaps itself": torch.zeros(16).as_strided((8, 4), (1, 1)),
        "was made under torch.inference_mode": inference_tensor(8, 4),
    }.items():
        given = {"w": tensor if alone else torch.zeros(4 if rank < 2 else 8, 4)}
        with pytest.raises(ReshardError, match=rf"(^|rank 3 refused: )the target tensors of rank 3 .*'w' {problem}"):
            sync.send(given, version=1) if rank < 2 else sync.receive(given)
    given = {"w": torch.ones(4, 4) if rank < 2 else torch.zeros(8, 4)}
    told = "rank 3 refused: MemoryError: no room to compare"
    with pytest.MonkeyPatch.context() as patch:
        if alone:
            patch.setattr("hf_engine.resharding.execute.check_writable", run_out)
        with pytest.raises(ReshardError, match=told):
            sync.send(given, version=1) if rank < 2 else sync.receive(given)
    with pytest.raises(ReshardError, match=r"(^|rank 3 refused: )send is for the source side"):
        sync.send(given, version=1) if rank < 2 or alone else sync.receive(given)
    sync.send(given, version=1) if rank < 2 else sync.receive(given)
    return float(given["w"].sum())


def run_out(*_, **__):
    raise MemoryError("no room to compare")


def inference_tensor(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


def emptied(*shape):
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def versions_that_do_not_go_up():
    """Two parameters, and after every refusal the next transfer runs."""
    rank = dist.get_rank()
    layout = (fsdp_layout if rank < 2 else replicated_layout)({"a": (8, 4), "b": (8, 4)}, range(2))
    sync = WeightSync(layout, side="source" if rank < 2 else "target")

    def move(version, expected=None, alias=False):
        whole = torch.zeros(8, 4)
        given = {name: torch.full((4, 4), 3.0) if rank < 2 else torch.zeros(8, 4) for name in "ab"}
        if rank == 2 and alias:
            given = {"a": whole, "b": whole.view(8, 4)}
        return sync.send(given, version=version).version if rank < 2 else sync.receive(given, version=expected)

    assert [move(4), move(5, expected=5)] == [4, 5]
    for message, options in {
        r"version=5 must be above 5, that of the last transfer": {"version": 5},
        r"version=0 must be above 5": {"version": 0},
        r"the source side names the version": {"version": None},
        r"version='7' must be a whole number": {"version": "7"},
        r"version=3 must be above 5": {"version": 6, "expected": 3},
        r"versions of the weights: 6 on rank 0 and 1 more, 8 on rank 2 and 1 more; no weights were moved": {
            "version": 6,
            "expected": 8,
        },
        r"the target tensors of rank 2 cannot be used: 'b' shares memory with 'a'": {"version": 6, "alias": True},
    }.items():
        with pytest.raises(ReshardError, match=message):
            move(**options)
    return move(6)


def test_versions_go_up_and_the_receiver_may_say_which(ranks4):
    assert ranks4.run(versions_that_do_not_go_up) == [6] * 4


def test_a_mistake_on_one_rank_is_an_error_on_both_sides(ranks4):
    assert ranks4.run(mistakes_on_one_rank) == [16.0, 16.0, 32.0, 32.0]


def test_different_sender_versions_and_unfit_sides_are_refused(ranks4):
    ranks4.run(send_different_versions)
    ranks4.run(send_different_versions_to_different_ranks)
    ranks4.run(refuse_sides_that_do_not_fit)
