from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.rounds import GatherRound, PeerRound, compute_rounds
from hf_protocols.errors import ReshardError

SHAPES = {"scalar": (), "vector": (5,), "matrix": (4, 3), "experts": (2, 3, 2)}


def elements(box):
    return set(product(*(range(a, b) for a, b in zip(box.offset, box.stop, strict=True))))


def held(layout, rank, name):
    return set().union(*(elements(box) for box in layout.boxes_of(rank).get(name, ())))


@st.composite
def layouts(draw, ranks, complete):
    """Random cuts of every parameter, each piece on a random set of ranks; `complete`: no piece is left out."""
    boxes = {rank: {} for rank in ranks}
    for name, shape in SHAPES.items():
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        for position in product(*(range(len(c) - 1) for c in cuts)):
            start = tuple(c[p] for c, p in zip(cuts, position, strict=True))
            stop = tuple(c[p + 1] for c, p in zip(cuts, position, strict=True))
            piece = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1 if complete else 0)):
                boxes[rank].setdefault(name, []).append(piece)
    fixed = {rank: {name: tuple(pieces) for name, pieces in by_name.items()} for rank, by_name in boxes.items()}
    return WeightLayout(shapes=SHAPES, boxes=fixed)


@settings(max_examples=150)
@given(layouts([0, 1, 2], complete=True), layouts([1, 2, 3], complete=False), st.integers(1, 30))
def test_any_plan_is_exact(source, target, bucket_numel):
    plan = plan_reshard(source, target)
    received = Counter((rank, m.name, e) for m in plan.messages for rank in m.destinations for e in elements(m.box))
    sent = Counter(m.source for m in plan.messages for _ in m.destinations for _ in elements(m.box))
    for message in plan.messages:
        assert elements(message.box) <= held(source, message.source, message.name)
    for rank in plan.ranks:
        kept = Counter((name, e) for name, box in plan.kept.get(rank, ()) for e in elements(box))
        for name in SHAPES:
            wanted, have = held(target, rank, name), held(source, rank, name)
            for element in wanted:
                assert kept[name, element] == (element in have)
                assert received[rank, name, element] == (element not in have)
            assert sum(n for (at, param, _), n in received.items() if (at, param) == (rank, name)) == len(wanted - have)
        assert plan.recv_bytes[rank] == 4 * sum(n for (at, _, _), n in received.items() if at == rank)
        assert plan.send_bytes[rank] == 4 * sent[rank]
        assert plan.kept_bytes[rank] == 4 * kept.total()
        assert plan.kept_bytes[rank] + plan.recv_bytes[rank] == target.held_bytes(rank)
    check_rounds(plan, bucket_numel, received)


def check_rounds(plan, bucket_numel, received):
    """Rounds move what the plan says and no more, within the bucket."""
    members = plan.ranks
    moved = Counter()
    for round_ in compute_rounds(plan, members, bucket_numel):
        if isinstance(round_, GatherRound):
            assert round_.share_numel * len(members) <= max(bucket_numel, len(members))
            for slot in round_.slots:
                for source, name, box in zip(members, slot.names, slot.boxes, strict=True):
                    moved.update((r, name, e) for r in members if r != source for e in elements(box))
            continue
        outgoing, incoming = Counter(), Counter()
        for message in round_.messages:
            outgoing[message.source] += message.box.numel
            for rank in message.destinations:
                incoming[rank] += message.box.numel
                moved.update((rank, message.name, e) for e in elements(message.box))
        assert max(outgoing.values()) <= bucket_numel
        assert max(incoming.values()) <= bucket_numel
    assert moved == received


def test_fsdp_to_replicated_is_one_gather_and_the_uneven_rest():
    shapes = {"w": (4, 3), "odd": (3, 2), "head": (1, 8)}
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    gather, peer = compute_rounds(plan, (0, 1), 1000)
    assert isinstance(gather, GatherRound)
    assert isinstance(peer, PeerRound)
    assert [slot.names for slot in gather.slots] == [("w", "w"), ("odd", "odd")]
    assert [(m.name, m.source, m.box) for m in peer.messages] == [
        ("odd", 0, Box((1, 0), (1, 2))),
        ("head", 0, Box((0, 0), (1, 8))),
    ]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_fsdp_to_replicated_receives_what_the_paper_says(num_ranks):
    shapes = {f"w{i}": (16, 5) for i in range(3)}
    model_bytes = 3 * 16 * 5 * 2
    source = fsdp_layout(shapes, range(num_ranks), dtype="bfloat16")
    plan = plan_reshard(source, replicated_layout(shapes, range(num_ranks), dtype="bfloat16"))
    assert set(plan.recv_bytes.values()) == {model_bytes * (num_ranks - 1) // num_ranks}
    assert set(plan.send_bytes.values()) == {model_bytes * (num_ranks - 1) // num_ranks}


def test_tensor_parallel_gather_inside_micro_dp_groups():
    """Train 1-4-1, generate with tp 2, groups strided as in the paper: ranks {0, 1} and {2, 3} gather."""
    shapes = {"w": (8, 6)}
    source = WeightLayout(shapes=shapes, boxes={r: {"w": (Box((2 * r, 0), (2, 6)),)} for r in range(4)})
    target = WeightLayout(shapes=shapes, boxes={r: {"w": (Box((4 * (r // 2), 0), (4, 6)),)} for r in range(4)})
    plan = plan_reshard(source, target)
    assert {m.participants for m in plan.messages} == {frozenset({0, 1}), frozenset({2, 3})}
    (gather,) = compute_rounds(plan, (0, 1), 1000)
    assert isinstance(gather, GatherRound)
    assert gather.share_numel == 12


def test_only_layers_with_a_counterpart_per_stage_are_gathered():
    """Two stages of two layers merge: layer 0 goes with layer 2, layer 1 with layer 3; only the last has a norm."""
    shapes = {**{f"layer{i}": (4, 6) for i in range(4)}, "norm": (6,), "scale0": (), "scale1": ()}
    held = [("layer0", "layer1", "scale0"), ("layer2", "layer3", "norm", "scale1")]
    source = WeightLayout(
        shapes=shapes, boxes={r: {n: (Box.whole(shapes[n]),) for n in names} for r, names in enumerate(held)}
    )
    gather, peer = compute_rounds(plan_reshard(source, replicated_layout(shapes, range(2))), (0, 1), 1000)
    assert [slot.names for slot in gather.slots] == [("layer0", "layer2"), ("layer1", "layer3"), ("scale0", "scale1")]
    assert [(m.name, m.source) for m in peer.messages] == [("norm", 1)]


@pytest.mark.parametrize("bucket_numel", [30, 120, 1000])
def test_uneven_shards_keep_no_more_than_a_bucket_waiting(bucket_numel):
    """A parameter's shard can be freed after the last round that sends of it: few have begun and not ended."""
    shapes = {f"w{i}": (7, 4) for i in range(40)}
    source = fsdp_layout(shapes, range(3))
    rounds = compute_rounds(plan_reshard(source, replicated_layout(shapes, range(3))), (0, 1, 2), bucket_numel)
    sent = [names_in(round_) for round_ in rounds]
    assert sum(isinstance(r, PeerRound) for r in rounds) >= 40 * 12 // (bucket_numel + 12)
    for index in range(len(rounds)):
        begun, ahead = set().union(*sent[: index + 1]), set().union(*sent[index + 1 :])
        for rank in range(3):
            waiting = sum(source.boxes_of(rank)[name][0].numel for name in begun & ahead)
            assert waiting <= bucket_numel + 12


def test_a_batch_of_messages_ends_where_the_next_does_not_fit():
    """One rank's rows go out in column halves to two ranks: each batch is as full as it can be, the last ones too."""
    shapes = {f"w{i}": (6, 4) for i in range(30)}
    target = WeightLayout(
        shapes=shapes, boxes={r: {n: (Box((0, 2 * (r - 1)), (6, 2)),) for n in shapes} for r in (1, 2)}
    )
    source = WeightLayout(shapes=shapes, boxes={0: {n: (Box.whole((6, 4)),) for n in shapes}})
    rounds = compute_rounds(plan_reshard(source, target), (0, 1, 2), 100)
    assert [len(round_.messages) for round_ in rounds] == [8] * 7 + [4]


def names_in(round_):
    if isinstance(round_, GatherRound):
        return {name for slot in round_.slots for name in slot.names}
    return {message.name for message in round_.messages}


def test_senders_are_balanced():
    shapes = {f"w{i}": (6, 4) for i in range(4)}
    plan = plan_reshard(replicated_layout(shapes, range(4)), replicated_layout(shapes, range(4, 8)))
    assert {plan.send_bytes[rank] for rank in range(4)} == {4 * 6 * 4 * 4}
    assert all(plan.kept_bytes[rank] == 0 for rank in range(8))


def test_plans_are_deterministic():
    source, target = fsdp_layout(SHAPES_2D, [2, 0, 1]), replicated_layout(SHAPES_2D, [0, 3])
    assert plan_reshard(source, target) == plan_reshard(source, target)


SHAPES_2D = {"a": (5, 2), "b": (7,)}


def test_two_models_are_not_one():
    source = fsdp_layout({"a": (4, 2), "b": (3,), "lora": (2,)}, [0])
    target = replicated_layout({"a": (2, 4), "b": (3,), "c": (1,)}, [0])
    with pytest.raises(ReshardError) as error:
        plan_reshard(source, target)
    assert "lacks ['c']" in str(error.value)
    assert "no place for ['lora']" in str(error.value)
    assert "'a' is (4, 2) in the source, (2, 4) in the target" in str(error.value)


def test_many_names_that_differ_are_counted():
    """Of a mixture of experts thousands may: one or two say what is wrong."""
    source = fsdp_layout({"stack": (4, 2), **{f"b{i}": (3,) for i in range(5)}}, [0])
    target = replicated_layout({f"expert{i}": (2,) for i in range(4)} | {f"b{i}": (2,) for i in range(5)}, [0])
    with pytest.raises(ReshardError) as error:
        plan_reshard(source, target)
    assert str(error.value) == (
        "the two layouts, of 6 and 9 parameters, are not of one model: the source lacks ['expert0', 'expert1'] and 2 "
        "more; the target has no place for ['stack']; 'b0' is (3,) in the source, (2,) in the target and 4 more. Give "
        "both sides the same model, and its names in the Hugging Face files"
    )


def test_a_source_with_a_hole_is_refused():
    source = WeightLayout(shapes={"w": (4,)}, boxes={0: {"w": (Box((0,), (3,)),)}})
    with pytest.raises(ReshardError, match="no rank of the source holds 'w' at Box"):
        plan_reshard(source, replicated_layout({"w": (4,)}, [0]))


@pytest.mark.parametrize(
    ("near", "message"),
    [
        (0, r"near=0. Use groupings of ranks, such as \[\[\[0, 1\], \[2, 3\]\]\]"),
        ([0], r"near=\[0\]. Use groupings"),
        ([[0]], r"near=\[\[0\]\]. Use groupings"),
        ([[[-1]]], r"near=\[\[\[-1\]\]\]. Use groupings"),
        ([[["a"]]], r"near=\[\[\['a'\]\]\]. Use groupings"),
        ("ab", "near='ab'. Use groupings"),
    ],
)
def test_groupings_that_are_none_are_refused(near, message):
    layout = fsdp_layout({"w": (4,)}, range(2))
    with pytest.raises(ReshardError, match=message):
        plan_reshard(layout, layout, near=near)
