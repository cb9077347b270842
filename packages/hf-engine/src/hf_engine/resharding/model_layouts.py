"""The layouts of a whole model under a topology: FSDP2's and Megatron's in training, vLLM's and SGLang's in generation.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.tensor_parallel import (
    cut_box,
    cut_of,
    expert_of,
    fused_qkv_rows,
    layer_of,
    padded_vocab_size,
    split_layers,
)
from hf_protocols.errors import ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.topology import Topology
from hf_protocols.validation import Checks, show

__all__ = [
    "check_experts",
    "check_model_and_topology",
    "fsdp_model_layout",
    "generation_layout",
    "megatron_layout",
    "model_shapes",
]

_check = Checks(ReshardError)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

_Boxes = Mapping[str, tuple[Box, ...]]


def check_model_and_topology(model: object, topology: object) -> None:
    """Refuses other kinds in their places, such as the names that a command line has for them."""
    wanted = 'a ModelShape, such as ModelShape.preset("llama-2-7b") or ModelShape.from_config(directory)'
    _check.kind("model", model, ModelShape, wanted)
    wanted = 'a Topology, such as Topology(ParallelSpec.parse("1-8-2"), GenerationSpec.parse("1-2"))'
    _check.kind("topology", topology, Topology, wanted)


def model_shapes(model: ModelShape, head: Literal["lm", "value"] = "lm") -> dict[str, tuple[int, ...]]:
    """Full shape of every parameter; a value head is one row in the place of the output embedding."""
    if head not in ("lm", "value"):
        raise ReshardError(f"head={show(head)}. Use lm or value")
    shapes = model.parameters()
    if head == "value":
        shapes[_HEAD] = (1, model.hidden_size)
    return shapes


def fsdp_model_layout(model: ModelShape, topology: Topology, *, dtype: str = "float32") -> WeightLayout:
    """FSDP2's layout over all ranks of a model as transformers builds it.

    The experts of a layer are stacked, so that dimension 0, which is cut, counts them: a rank holds some of the experts
    whole, and nothing of the others.

    Args:
        model: experts and parameters.
        topology: its ranks.
        dtype: dtype of the shards.
    """
    size, shapes = topology.world_size, model.parameters()
    experts = {name: expert for name in shapes if (expert := expert_of(name)) is not None}
    others = {name: shape for name, shape in shapes.items() if name not in experts}
    boxes = {rank: dict(held) for rank, held in fsdp_layout(others, range(size)).boxes.items()}
    whole = {shape: (Box.whole(shape),) for shape in set(shapes.values())}
    per_rank = -(-(max(experts.values(), default=0) + 1) // size)
    for name, expert in experts.items():
        boxes[expert // per_rank][name] = whole[shapes[name]]
    return WeightLayout(shapes=shapes, boxes=boxes, dtype=dtype)


def megatron_layout(
    model: ModelShape,
    topology: Topology,
    *,
    dtype: str = "float32",
    layers_per_stage: Sequence[int] | None = None,
    vocab_rows: int | None = None,
    head: Literal["lm", "value"] = "lm",
) -> WeightLayout:
    """Megatron-core's layout: tensor, pipeline and expert parallel, replicated over data-parallel ranks.

    A rank's query, key and value rows are one box per key-value group that it has a part of, because the fused
    projection interleaves them group by group (`fused_qkv_rows`). A tied embedding is on the first and on the last
    stage. Context-parallel ranks are replicas.

    Args:
        model: heads, experts and parameters.
        topology: ranks; its training sizes.
        dtype: dtype of the weights.
        layers_per_stage: uneven pipeline stages; as equal as possible by default, larger ones first.
        vocab_rows: rows of the padded embeddings; `padded_vocab_size` by default.
        head: a language model's head, or a value head: one row, whole on every rank of the last stage.

    Raises:
        ReshardError: for sizes that do not divide evenly: heads, key-value heads, experts, layers; for `vocab_rows`
            below the vocabulary, which would leave tokens on no rank.
    """
    check_model_and_topology(model, topology)
    train = topology.train
    experts = _split_experts(model, train.ep_size)
    stages = split_layers(model.num_layers, train.pp_size, layers_per_stage)
    rows = _vocab_rows(model, train.tp_size, vocab_rows)
    shapes = model_shapes(model, head)
    tied = _HEAD not in shapes
    held: dict[tuple[int, int, int], _Boxes] = {}
    boxes: dict[int, _Boxes] = {}
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        key = (at.pp, at.tp, at.ep)
        if key not in held:
            present = {
                name: shapes[name]
                for name in _of_stage(shapes, stages, at.pp, embedding_last=tied)
                if (expert := expert_of(name)) is None or expert in experts[at.ep]
            }
            held[key] = _cut_for_megatron(present, at.tp, train.tp_size, model, rows, head)
        boxes[rank] = held[key]
    return WeightLayout(shapes=shapes, boxes=boxes, dtype=dtype)


def generation_layout(
    model: ModelShape,
    topology: Topology,
    *,
    dtype: str = "float32",
    layers_per_stage: Sequence[int] | None = None,
    vocab_rows: int | None = None,
) -> WeightLayout:
    """The layout of vLLM and SGLang: tensor and pipeline parallel inside a generation replica.

    Key-value heads are replicated where gen_tp_size is larger than their number; experts are cut like dense layers.
    A replica of one rank holds the whole model, and so does every rank for a generic shape: engines cut what they load.

    Args:
        model: heads, experts and parameters.
        topology: ranks; its generation sizes and grouping.
        dtype: dtype of the weights.
        layers_per_stage: counts of the generation stages. By default each holds the layers of the training stages
            that nest in it, else as equal as possible.
        vocab_rows: rows of the padded embeddings; `padded_vocab_size` by default.

    Raises:
        ReshardError: for heads or layers that do not divide evenly, or `vocab_rows` below the vocabulary.
        TopologyError: for a topology without generation.
    """
    check_model_and_topology(model, topology)
    generation = topology.generation
    if generation is None:
        topology.groups("gen_tp")  # raises, and says what to give
        raise AssertionError("a topology without generation has no generation groups")
    if layers_per_stage is None and topology.train.pp_size % generation.gen_pp_size == 0:
        nested = split_layers(model.num_layers, topology.train.pp_size)
        width = topology.train.pp_size // generation.gen_pp_size
        layers_per_stage = [
            sum(map(len, nested[stage * width : (stage + 1) * width])) for stage in range(generation.gen_pp_size)
        ]
    if model.is_generic:
        if generation.gen_pp_size > 1:
            raise ReshardError(f"{model.name}: the layers of its family are not known by name. Set gen_pp_size to 1")
        return replicated_layout(model.parameters(), range(topology.world_size), dtype=dtype)
    stages = split_layers(model.num_layers, generation.gen_pp_size, layers_per_stage, knob="gen_pp_size")
    rows = _vocab_rows(model, generation.gen_tp_size, vocab_rows)
    shapes = model_shapes(model)
    held: dict[tuple[int, int], _Boxes] = {}
    boxes: dict[int, _Boxes] = {}
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert at.gen_pp is not None and at.gen_tp is not None
        key = (at.gen_pp, at.gen_tp)
        if key not in held:
            held[key] = {
                name: cut_box(name, shapes[name], at.gen_tp, generation.gen_tp_size, model, rows, knob="gen_tp_size")
                for name in _of_stage(shapes, stages, at.gen_pp, embedding_last=_HEAD not in shapes)
            }
        boxes[rank] = held[key]
    return WeightLayout(shapes=shapes, boxes=boxes, dtype=dtype)


def _vocab_rows(model: ModelShape, size: int, given: int | None) -> int:
    """Rows of the embeddings with padding; without it every token still needs its row on some rank."""
    if given is None:
        return padded_vocab_size(model.vocab_size, size)
    _check.count("vocab_rows", given)
    if given < model.vocab_size:
        raise ReshardError(
            f"vocab_rows={given} is below {model.name}'s vocab_size={model.vocab_size}. Leave it out, or give its rows "
            "and padding"
        )
    return given


def _of_stage(
    shapes: Mapping[str, tuple[int, ...]], stages: Sequence[range], stage: int, *, embedding_last: bool
) -> Iterable[str]:
    """Names of one pipeline stage: its layers, the embedding first, the final norm and the head last."""
    last = len(stages) - 1
    for name in shapes:
        layer = layer_of(name)
        if layer is not None:
            if layer in stages[stage]:
                yield name
        elif name == _EMBEDDING:
            if stage == 0 or (embedding_last and stage == last):
                yield name
        elif stage == last:
            yield name


def _cut_for_megatron(
    shapes: Mapping[str, tuple[int, ...]],
    index: int,
    size: int,
    model: ModelShape,
    vocab_rows: int,
    head: Literal["lm", "value"],
) -> _Boxes:
    """One tensor-parallel rank's boxes; names of which it holds no rows are left out."""
    fused: dict[str, list[range]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for projection, rows in fused_qkv_rows(model, index, size):
        fused[projection].append(rows)
    held: dict[str, tuple[Box, ...]] = {}
    for name, shape in shapes.items():
        if cut_of(name) in ("query", "key-value"):
            parts = fused[name.split(".")[-2]]
            boxes = tuple(Box((r.start, *(0,) * (len(shape) - 1)), (len(r), *shape[1:])) for r in parts)
        elif name == _HEAD and head == "value":
            boxes = (Box.whole(shape),)
        else:
            boxes = cut_box(name, shape, index, size, model, vocab_rows, knob="tp_size")
        if boxes:
            held[name] = boxes
    return held


def check_experts(model: ModelShape, ep_size: int) -> None:
    """Refuses expert parallelism of a dense model, or one that does not divide the experts evenly."""
    if ep_size > 1 and (not model.num_experts or model.num_experts % ep_size):
        raise ReshardError(
            f"{model.name}: num_experts={model.num_experts} do not divide evenly by ep_size={ep_size} in training. "
            "Choose an ep_size that divides them (1 for a dense model)"
        )


def _split_experts(model: ModelShape, ep_size: int) -> list[range]:
    check_experts(model, ep_size)
    step = model.num_experts // ep_size
    return [range(index * step, (index + 1) * step) for index in range(ep_size)]
