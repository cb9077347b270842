"""Layouts of whole models against the engines' own rules of fusing and cutting, written out in numpy."""

from __future__ import annotations

import re
from itertools import zip_longest
from math import prod

import numpy as np
import pytest

from hf_engine.resharding.model_layouts import generation_layout, megatron_layout
from hf_engine.resharding.tensor_parallel import padded_vocab_size, split_layers
from hf_protocols.errors import ReshardError, TopologyError
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

BASE = {
    "num_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 6,
    "vocab_size": 150,
}
FAMILIES = {
    "llama": ModelShape(name="llama", **BASE),
    "tied": ModelShape(name="tied", **BASE, tie_embeddings=True, family="gemma"),
    "qwen2": ModelShape(name="qwen2", **BASE, qkv_bias=True, family="qwen2"),
    "qwen3": ModelShape(name="qwen3", **BASE, qk_norm=True, family="qwen3"),
    "biased": ModelShape(name="biased", **BASE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "two groups": ModelShape(name="two groups", **{**BASE, "num_heads": 24, "num_kv_heads": 2}, qkv_bias=True),
    "mixtral": ModelShape(name="mixtral", **BASE, num_experts=4, num_experts_per_token=2, family="mixtral"),
    "qwen3_moe": ModelShape(
        name="qwen3_moe", **BASE, qk_norm=True, num_experts=4, num_experts_per_token=2, family="qwen3_moe"
    ),
}


def numbered(model):
    """Every element of every parameter is its own number, so that equal numbers are equal places."""
    start, tensors = 0, {}
    for name, shape in model.parameters().items():
        tensors[name] = np.arange(start, start + prod(shape)).reshape(shape)
        start += prod(shape)
    return tensors


def pieces(layout, rank, tensors, name):
    return [
        tensors[name][tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))]
        for box in layout.boxes_of(rank).get(name, ())
    ]


def equal(found, expected):
    return np.array_equal(np.concatenate(found) if len(found) > 1 else found[0], expected)


def megatron_qkv(tensors, layer, kind, model, tp, rank):
    """Megatron's fused projection of one rank: its share of the rows [q..q k v] of all key-value groups."""
    groups, queries = model.num_kv_heads, model.num_heads // model.num_kv_heads
    fused = []
    for group in range(groups):
        for part, heads in (("q", queries), ("k", 1), ("v", 1)):
            full = tensors[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"]
            fused.append(full.reshape(groups, heads * model.head_dim, *full.shape[1:])[group])
    return np.split(np.concatenate(fused), tp)[rank]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", ["1-1-1", "1-4-1", "1-8-1", "2-2-1", "4-1-2", "2-2-2"])
@pytest.mark.parametrize("order", ["megatron", "contiguous"])
def test_megatron_ranks_hold_what_megatron_cuts(family, sizes, order):
    model, tensors = FAMILIES[family], numbered(FAMILIES[family])
    topology = Topology(ParallelSpec.parse(sizes), order=order)
    layout = megatron_layout(model, topology)
    train, per_stage = topology.train, model.num_layers // topology.train.pp_size
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        expected_names = set()
        for layer in range(at.pp * per_stage, (at.pp + 1) * per_stage):
            prefix = f"model.layers.{layer}."
            expected_names |= {name for name in tensors if name.startswith(prefix)}
            for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
                names = [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
                wanted = megatron_qkv(tensors, layer, kind, model, train.tp_size, at.tp)
                expected_names -= {name for name in names if not np.isin(tensors[name], wanted).any()}
                by_group = zip_longest(*(pieces(layout, rank, tensors, name) for name in names))
                fused = np.concatenate([piece for group in by_group for piece in group if piece is not None])
                assert np.array_equal(fused, wanted)
            o_proj = f"{prefix}self_attn.o_proj.weight"
            assert equal(pieces(layout, rank, tensors, o_proj), np.split(tensors[o_proj], train.tp_size, axis=1)[at.tp])
            for name in (n for n in expected_names if n.startswith(prefix) and "proj" not in n and ".w" not in n):
                assert equal(pieces(layout, rank, tensors, name), tensors[name]), name
            for suffix, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1), ("w1", 0), ("w3", 0), ("w2", 1)):
                for name in (n for n in tensors if n.startswith(prefix) and n.endswith(f"{suffix}.weight")):
                    assert equal(
                        pieces(layout, rank, tensors, name), np.split(tensors[name], train.tp_size, axis=axis)[at.tp]
                    )
        first, last = at.pp == 0, at.pp == train.pp_size - 1
        expected_names |= {"model.embed_tokens.weight"} if first or (last and model.tie_embeddings) else set()
        expected_names |= {"model.norm.weight"} if last else set()
        expected_names |= {"lm_head.weight"} if last and not model.tie_embeddings else set()
        assert set(layout.boxes_of(rank)) == expected_names
        for name in expected_names & {"model.embed_tokens.weight", "lm_head.weight"}:
            padding = -model.vocab_size % 64
            padded = np.pad(tensors[name], ((0, padding), (0, 0)), constant_values=-1)
            mine = np.split(padded, train.tp_size)[at.tp]
            assert equal(pieces(layout, rank, tensors, name), mine[(mine >= 0).all(axis=1)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gen_tp", [1, 2, 4, 8])
def test_generation_ranks_hold_what_vllm_loads(family, gen_tp):
    """Queries by heads; a key-value head on as many neighbours as there are more ranks than heads."""
    model, tensors = FAMILIES[family], numbered(FAMILIES[family])
    topology = Topology(ParallelSpec(dp_size=8), GenerationSpec(gen_tp_size=gen_tp))
    layout = generation_layout(model, topology)
    for rank in range(8):
        at = topology.coordinate(rank)
        assert set(layout.boxes_of(rank)) == set(tensors)
        for name, full in tensors.items():
            if "q_proj" in name:
                expected = np.split(full, gen_tp)[at.gen_tp]
            elif "k_proj" in name or "v_proj" in name:
                heads = np.split(full, model.num_kv_heads)
                copies = max(1, gen_tp // model.num_kv_heads)
                per_rank = max(1, model.num_kv_heads // gen_tp)
                mine = range(at.gen_tp // copies * per_rank, at.gen_tp // copies * per_rank + per_rank)
                expected = np.concatenate([heads[head] for head in mine])
            elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
                expected = np.split(full, gen_tp, axis=1)[at.gen_tp]
            elif any(part in name for part in ("gate_proj", "up_proj", "w1", "w3")):
                expected = np.split(full, gen_tp)[at.gen_tp]
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                padded = np.pad(full, ((0, -model.vocab_size % 64), (0, 0)), constant_values=-1)
                mine = np.split(padded, gen_tp)[at.gen_tp]
                expected = mine[(mine >= 0).all(axis=1)]
            else:
                expected = full
            assert equal(pieces(layout, rank, tensors, name), expected), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_on_consecutive_data_parallel_ranks(family):
    model = FAMILIES[family]
    topology = Topology(ParallelSpec(tp_size=2, dp_size=4, ep_size=2))
    layout = megatron_layout(model, topology)
    for rank in range(8):
        dp = rank // 2
        held = {int(name.split(".experts.")[1].split(".")[0]) for name in layout.boxes_of(rank) if ".experts." in name}
        assert held == ({0, 1} if dp % 2 == 0 else {2, 3})
        width = {"mixtral": "block_sparse_moe.experts.{}.w2", "qwen3_moe": "mlp.experts.{}.down_proj"}[family]
        name = f"model.layers.0.{width.format(min(held))}.weight"
        assert [box.shape for box in layout.boxes_of(rank)[name]] == [(16, 12)]


def test_uneven_stages_are_larger_first_or_as_given():
    assert [len(stage) for stage in split_layers(10, 4)] == [3, 3, 2, 2]
    assert split_layers(5, 2, [1, 4]) == [range(1), range(1, 5)]
    layout = megatron_layout(FAMILIES["llama"], Topology(ParallelSpec(pp_size=2)), layers_per_stage=[1, 3])
    layers = [{int(name.split(".")[2]) for name in layout.boxes_of(rank) if "layers" in name} for rank in (0, 1)]
    assert layers == [{0}, {1, 2, 3}]


def test_generation_stages_follow_their_nested_training_stages():
    model = ModelShape(name="llama", **{**BASE, "num_layers": 9})
    topology = Topology(ParallelSpec(pp_size=4), GenerationSpec(gen_pp_size=2))
    source, target = megatron_layout(model, topology), generation_layout(model, topology)
    for rank in range(4):
        held = set(source.boxes_of(rank)) - {"model.norm.weight", "lm_head.weight"}
        assert held <= set(target.boxes_of(rank))


def test_a_value_head_is_one_row_on_every_rank_of_the_last_stage():
    topology = Topology(ParallelSpec(pp_size=2, tp_size=2))
    layout = megatron_layout(FAMILIES["tied"], topology, head="value")
    assert layout.shapes["lm_head.weight"] == (1, 16)
    for rank in range(4):
        boxes = layout.boxes_of(rank).get("lm_head.weight", ())
        assert [box.shape for box in boxes] == ([(1, 16)] if rank >= 2 else [])
        assert ("model.embed_tokens.weight" in layout.boxes_of(rank)) == (rank < 2)


@pytest.mark.parametrize(("vocab", "tp", "expected"), [(128, 2, 128), (129, 2, 192), (129, 3, 192), (10, 6, 192)])
def test_vocabularies_are_padded_alike_on_both_sides(vocab, tp, expected):
    assert padded_vocab_size(vocab, tp) == expected


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({}, {"tp_size": 3}, "num_kv_heads=4 do not divide evenly by tp_size=3 in training"),
        ({}, {"tp_size": 6}, "num_kv_heads=4 do not divide evenly by tp_size=6 in training"),
        ({"num_heads": 4}, {"tp_size": 8}, "or a multiple of them that divides num_heads=4 and the 72 rows"),
        (
            {"num_kv_heads": 1, "head_dim": 1},
            {"tp_size": 4},
            "that divides num_heads=8 and the 10 rows of queries, keys",
        ),
        (
            {"intermediate_size": 25},
            {"tp_size": 2},
            "25 elements do not divide evenly by tp_size=2 in training. Choose a tp_size",
        ),
        (
            {},
            {"pp_size": 64},
            "^4 layers cannot fill pp_size=64 pipeline stages in training. Choose a pp_size of at most 4$",
        ),
        ({}, {"dp_size": 2, "ep_size": 2}, "num_experts=0 do not divide evenly by ep_size=2"),
        (
            {"num_experts": 3, "num_experts_per_token": 2, "family": "mixtral"},
            {"dp_size": 2, "ep_size": 2},
            "num_experts=3",
        ),
    ],
)
def test_sizes_that_do_not_divide_evenly_are_refused(change, sizes, message):
    model = ModelShape(name="odd", **{**BASE, **change})
    with pytest.raises(ReshardError, match=message):
        megatron_layout(model, Topology(ParallelSpec(**sizes)))


def test_generation_needs_its_topology_and_evenly_divided_heads():
    with pytest.raises(TopologyError, match="GenerationSpec"):
        generation_layout(FAMILIES["llama"], Topology(ParallelSpec()))
    odd = ModelShape(name="odd", **{**BASE, "num_heads": 12, "num_kv_heads": 3})
    with pytest.raises(
        ReshardError, match=r"3 heads do not divide evenly by gen_tp_size=2 in generation. Choose a gen_tp"
    ):
        generation_layout(odd, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)))
    with pytest.raises(
        ReshardError, match=r"gen_tp_size=4 is not a multiple of num_kv_heads=3 in generation. Choose a gen_tp"
    ):
        generation_layout(odd, Topology(ParallelSpec(dp_size=4), GenerationSpec(gen_tp_size=4)))
    with pytest.raises(ReshardError, match="4 layers cannot fill gen_pp_size=5 pipeline stages in generation"):
        generation_layout(FAMILIES["llama"], Topology(ParallelSpec(dp_size=5), GenerationSpec(gen_pp_size=5)))
    with pytest.raises(ReshardError, match=r"4 layers cannot be layers_per_stage=\[3, 2\] with pp_size=2 in training"):
        split_layers(4, 2, [3, 2])


@pytest.mark.parametrize("make", [megatron_layout, generation_layout])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"vocab_rows": 128},
            "^vocab_rows=128 is below llama's vocab_size=150. Leave it out, or give its rows and pad",
        ),
        ({"vocab_rows": 0}, "vocab_rows=0 must be a whole number of at least 1"),
        ({"vocab_rows": 192.0}, "vocab_rows=192.0 must be"),
        ({"vocab_rows": True}, "vocab_rows=True must be"),
        ({"vocab_rows": "192"}, "vocab_rows='192' must be"),
        ({"layers_per_stage": 4}, "layers_per_stage=4. Use a list of whole numbers, one for each stage"),
        ({"layers_per_stage": "4"}, "layers_per_stage='4'. Use a list of whole numbers"),
        ({"layers_per_stage": [4.0]}, r"layers_per_stage=\[4.0\]. Use a list of whole numbers"),
        ({"layers_per_stage": [[4]]}, r"layers_per_stage=\[\[4\]\]. Use a list of whole numbers"),
        ({"dtype": "float8"}, "dtype='float8' is not one of"),
    ],
)
def test_what_no_layout_can_be_made_of_is_named(make, given, message):
    topology = Topology(ParallelSpec(tp_size=2), GenerationSpec(gen_tp_size=2))
    with pytest.raises(ReshardError, match=message):
        make(FAMILIES["llama"], topology, **given)


@pytest.mark.parametrize("head", ["foo", None, 3, []])
def test_heads_are_two(head):
    with pytest.raises(ReshardError, match=re.escape(f"head={head!r}. Use lm or value")):
        megatron_layout(FAMILIES["llama"], Topology(ParallelSpec()), head=head)
