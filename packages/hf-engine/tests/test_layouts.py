from __future__ import annotations

import pytest
import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout, spread_layout
from hf_engine.resharding.plan import plan_reshard
from hf_protocols.errors import ReshardError


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fsdp_shards_are_those_of_torch_chunk(rows, num_ranks):
    tensor = torch.arange(rows * 3).view(rows, 3)
    chunks = list(tensor.chunk(num_ranks))
    layout = fsdp_layout({"w": tensor.shape}, range(num_ranks))
    for rank in range(num_ranks):
        (box,) = layout.boxes_of(rank)["w"]
        expected = chunks[rank] if rank < len(chunks) else tensor[:0]
        assert torch.equal(tensor[box.slices_in(Box.whole(tensor.shape))], expected)


def test_fsdp_ranks_may_be_any_ranks_in_shard_order():
    layout = fsdp_layout({"w": (4,)}, [7, 3])
    assert layout.ranks == (3, 7)
    assert layout.boxes_of(7)["w"] == (Box((0,), (2,)),)
    assert layout.boxes_of(5) == {}


def test_held_bytes_count_the_dtype():
    shapes = {"w": (3, 2), "b": (3,)}
    assert replicated_layout(shapes, range(2)).held_bytes(1) == 9 * 4
    assert replicated_layout(shapes, range(2), dtype="bfloat16").held_bytes(0) == 9 * 2
    assert [fsdp_layout(shapes, range(2)).held_bytes(rank) for rank in range(3)] == [6 * 4, 3 * 4, 0]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ({"w": (Box((2,), (3,)),)}, "not inside"),
        ({"w": (Box((0, 0), (1, 1)),)}, "not inside"),
        ({"v": (Box((0,), (1,)),)}, "no shape"),
        ({"w": (Box((0,), (3,)), Box((2,), (1,)))}, "overlap"),
    ],
)
def test_impossible_boxes_are_refused(boxes, message):
    with pytest.raises(ReshardError, match=message):
        WeightLayout(shapes={"w": (4,)}, boxes={0: boxes})


def test_unknown_dtypes_scalars_and_no_ranks_are_refused():
    with pytest.raises(ReshardError, match="float32"):
        replicated_layout({"w": (4,)}, [0], dtype="int3")
    with pytest.raises(ReshardError, match="scale"):
        fsdp_layout({"scale": ()}, [0])
    with pytest.raises(ReshardError, match="at least one rank"):
        fsdp_layout({"w": (4,)}, [])


@pytest.mark.parametrize("make", [fsdp_layout, replicated_layout, spread_layout])
@pytest.mark.parametrize(
    ("shapes", "ranks", "message"),
    [
        ({"w": (4,)}, 4, r"ranks=4. Use the ranks in order, such as range\(4\)"),
        ({"w": (4,)}, "01", r"a rank='0' must be a whole number of at least 0"),
        ({"w": (4,)}, [0, 0], r"ranks=\[0, 0\]. Name every rank once"),
        ({"w": (4,)}, [0, -1], "a rank=-1 must be a whole number of at least 0"),
        ({"w": (4,)}, [True], "a rank=True must be"),
        ({"w": (4,)}, [], r"ranks=\[\]. Use at least one rank"),
        ("w", [0], "shapes='w'. Use full shapes by name"),
        ({"w": 4}, [0], r"the shape of 'w'=4. Use a tuple of whole numbers, such as \(4,\)"),
        ({"w": (4, -1)}, [0], r"the shape of 'w'=\(4, -1\). Use a tuple"),
        ({"w": (2.5,)}, [0], r"the shape of 'w'=\(2.5,\). Use a tuple"),
        ({"w": (True,)}, [0], r"the shape of 'w'=\(True,\). Use a tuple"),
        ({"w": b"ab"}, [0], "the shape of 'w'=b'ab'. Use a tuple"),
        ({1: (4,)}, [0], "the name of a parameter=1. Use a string"),
    ],
)
def test_wrong_kinds_are_named(make, shapes, ranks, message):
    with pytest.raises(ReshardError, match=message):
        make(shapes, ranks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boxes": [0]}, r"boxes=\[0\]. Use a mapping from ranks"),
        ({"boxes": {-1: {}}}, "a rank=-1 must be"),
        ({"boxes": {0: "w"}}, "rank 0 holds 'w'. Use a mapping from names to tuples of Box"),
        ({"boxes": {0: {"w": [0]}}}, r"rank 0: boxes of 'w'=\[0\]. Use a tuple of Box"),
        ({"boxes": {}, "dtype": None}, "dtype=None is not one of"),
        ({"boxes": {}, "dtype": []}, r"dtype=\[\] is not one of"),
    ],
)
def test_wrong_kinds_in_a_layout_are_named(given, message):
    with pytest.raises(ReshardError, match=message):
        WeightLayout(**{"shapes": {"w": (4,)}} | given)


def test_shapes_may_be_lists():
    layout = WeightLayout(shapes={"w": [4, 8]}, boxes={0: {"w": (Box.whole([4, 8]),)}})
    assert layout.shapes == {"w": (4, 8)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["w", "x"], "^names holds 'x', which is none of the layout's 2 parameters, such as 'w'$"),
        ("w", "names='w'. Use a list of parameters' names"),
        (3, "names=3. Use a list of parameters' names"),
        ([["w"]], r"names holds \['w'\], which is none of the layout's"),
        ([3], "names holds 3, which is none"),
    ],
)
def test_only_parameters_of_the_layout_are_selected(names, message):
    layout = fsdp_layout({"w": (4,), "b": (2,)}, range(2))
    assert dict(layout.select(["b"]).shapes) == {"b": (2,)}
    for whole in (layout, plan_reshard(layout, layout)):
        with pytest.raises(ReshardError, match=message):
            whole.select(names)


def test_a_spread_model_lies_once_over_all_ranks():
    shapes = {"a": (6,), "large": (10, 4), "b": (5,), "c": (4, 2), "middle": (20,)}
    layout = spread_layout(shapes, range(3), dtype="bfloat16")
    assert list(layout.shapes) == list(shapes) and layout.ranks == (0, 1, 2)
    held = [dict(layout.boxes_of(rank)) for rank in range(3)]
    assert sorted(name for names in held for name in names) == sorted(shapes)
    assert all(names[name] == (Box.whole(shapes[name]),) for names in held for name in names)
    assert sorted(layout.held_bytes(rank) for rank in range(3)) == [38, 40, 80]
    assert spread_layout({"a": (2,)}, [4, 7]).boxes_of(7) == {}
