"""Tensor-parallel sharding: one rule by Hugging Face name, for training and generation alike.

Column-parallel parameters are split at dimension 0, row-parallel ones along dimension 1, embeddings by rows of the
padded vocabulary; attention is cut between key-value groups: a group is one key-value head with its query heads.
Where ranks are more than groups the two sides differ: engines replicate key-value heads, megatron-core cuts groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import lcm
from typing import Literal

from hf_engine.resharding.boxes import Box
from hf_protocols.errors import ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.validation import show

__all__ = [
    "VOCAB_PADDING",
    "Cut",
    "cut_box",
    "cut_of",
    "expert_of",
    "fused_qkv_rows",
    "layer_of",
    "padded_vocab_size",
    "split_layers",
]

Cut = Literal["query", "key-value", "columns", "rows", "vocabulary", "replicated"]
"""Dimension that tensor parallelism shards, and its units."""

VOCAB_PADDING = 64
"""Embeddings are padded to a multiple of this many rows, as vLLM and SGLang pad them, and of the tp_size."""

_CUTS: dict[str, Cut] = {
    "q_proj": "query",
    "k_proj": "key-value",
    "v_proj": "key-value",
    "o_proj": "rows",
    "gate_proj": "columns",
    "up_proj": "columns",
    "down_proj": "rows",
    "w1": "columns",
    "w3": "columns",
    "w2": "rows",
    "embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def cut_of(name: str) -> Cut:
    """Returns the sharding of a parameter; a row-parallel layer's bias is added once, so every rank holds it whole."""
    module, _, kind = name.rpartition(".")
    cut = _CUTS.get(module.rpartition(".")[2], "replicated")
    return "replicated" if cut == "rows" and kind == "bias" else cut


def layer_of(name: str) -> int | None:
    """Number of the decoder layer that the parameter is in; None outside the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def expert_of(name: str) -> int | None:
    """Number of the expert that the parameter belongs to; None for what is not an expert's."""
    found = _EXPERT.search(name)
    return int(found[1]) if found else None


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embeddings with padding: equal on both sides wherever tp_size divides the padding."""
    unit = lcm(VOCAB_PADDING, tp_size)
    return -(-vocab_size // unit) * unit


def split_layers(
    num_layers: int, num_stages: int, layers_per_stage: Sequence[int] | None = None, *, knob: str = "pp_size"
) -> list[range]:
    """The decoder layers of every pipeline stage.

    Args:
        num_layers: of the model.
        num_stages: pp_size or gen_pp_size.
        layers_per_stage: the counts, where they are not as equal as possible with the larger ones first.
        knob: what the user calls `num_stages`.

    Raises:
        ReshardError: for counts that do not add up, or more stages than layers.
    """
    if layers_per_stage is None:
        if num_stages > num_layers:
            raise ReshardError(
                f"{num_layers} layers cannot fill {knob}={num_stages} pipeline stages in {_side(knob)}. "
                f"Choose a {knob} of at most {num_layers}"
            )
        size, longer = divmod(num_layers, num_stages)
        layers_per_stage = [size + (stage < longer) for stage in range(num_stages)]
    _check_counts(layers_per_stage)
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ReshardError(
            f"{num_layers} layers cannot be layers_per_stage={list(layers_per_stage)} with {knob}={num_stages} in "
            f"{_side(knob)}. Give every stage at least one layer, adding up to the model's"
        )
    starts = [sum(layers_per_stage[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, layers_per_stage, strict=True)]


def _check_counts(layers_per_stage: object) -> None:
    counts = layers_per_stage if isinstance(layers_per_stage, Sequence) else [None]
    if not all(type(count) is int for count in counts):
        raise ReshardError(
            f"layers_per_stage={show(layers_per_stage)}. Use a list of whole numbers, one for each stage"
        )


def fused_qkv_rows(model: ModelShape, index: int, size: int) -> list[tuple[str, range]]:
    """Returns the part of megatron-core's fused query, key and value projection on tensor-parallel rank `index`.

    The fused rows `[q ... q, k, v]` of all key-value groups are split into equal intervals: a rank holds whole groups,
    or a part of one where there are more ranks than groups.

    Returns:
        In the order of the fused rows: `q_proj`, `k_proj` or `v_proj`, and which rows of it.

    Raises:
        ReshardError: for heads that do not divide evenly.
    """
    _check_groups(model, size)
    widths = {"q_proj": model.num_heads // model.num_kv_heads * model.head_dim}
    widths |= {"k_proj": model.head_dim, "v_proj": model.head_dim}
    group_rows = sum(widths.values())
    start, stop = (group_rows * model.num_kv_heads * end // size for end in (index, index + 1))
    held = []
    for group in range(start // group_rows, -(-stop // group_rows)):
        first = group * group_rows
        for name, width in widths.items():
            low, high, shift = max(start, first), min(stop, first + width), group * width - first
            if low < high:
                held.append((name, range(low + shift, high + shift)))
            first += width
    return held


def _check_groups(model: ModelShape, size: int) -> None:
    groups, rows = model.num_kv_heads, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if groups % size and (size % groups or model.num_heads % size or rows % size):
        raise ReshardError(
            f"{model.name}: num_kv_heads={groups} do not divide evenly by {_over('tp_size', size)}, or a multiple of "
            f"them that divides num_heads={model.num_heads} and the {rows} rows of queries, keys and values"
        )


def cut_box(
    name: str, shape: tuple[int, ...], index: int, size: int, model: ModelShape, vocab_rows: int, *, knob: str
) -> tuple[Box, ...]:
    """The boxes that tensor-parallel rank `index` of `size` holds of one parameter.

    Args:
        name: Hugging Face name.
        shape: full shape.
        index: rank on the tensor-parallel axis.
        size: number of ranks on it.
        model: for its heads.
        vocab_rows: rows of the embeddings with padding.
        knob: what the user calls `size`: `"tp_size"` or `"gen_tp_size"`.

    Raises:
        ReshardError: for a dimension that does not divide.
    """
    cut = cut_of(name)
    whole = Box.whole(shape)
    if cut == "replicated" or size == 1:
        return (whole,)
    if cut == "vocabulary":
        if vocab_rows % size:
            raise ReshardError(f"vocab_rows={vocab_rows} do not divide evenly by {_over(knob, size)}")
        step = vocab_rows // size
        start = min(index * step, shape[0])
        return (_narrow(whole, 0, start, min(step, shape[0] - start)),)
    if cut == "key-value":
        # More ranks than key-value heads: neighbouring ranks hold the same head.
        parts = min(size, model.num_kv_heads)
        if parts != size and size % parts:
            raise ReshardError(
                f"{name}: {knob}={size} is not a multiple of num_kv_heads={model.num_kv_heads} in {_side(knob)}. "
                f"Choose a {knob} that is one, or that divides them"
            )
        return (_part(name, whole, 0, index * parts // size, parts, model.num_kv_heads, knob),)
    units = {"query": model.num_heads, "columns": shape[0], "rows": shape[-1]}[cut]
    return (_part(name, whole, 1 if cut == "rows" else 0, index, size, units, knob),)


def _part(name: str, whole: Box, dim: int, index: int, size: int, units: int, knob: str) -> Box:
    if units % size:
        unit = "elements" if units == whole.shape[dim] else "heads"
        raise ReshardError(f"{name}: {units} {unit} do not divide evenly by {_over(knob, size)}")
    step = whole.shape[dim] // size
    return _narrow(whole, dim, index * step, step)


def _over(knob: str, size: int) -> str:
    return f"{knob}={size} in {_side(knob)}. Choose a {knob} that divides them"


def _side(knob: str) -> str:
    return "generation" if knob.startswith("gen_") else "training"


def _narrow(box: Box, dim: int, start: int, length: int) -> Box:
    offset = (*box.offset[:dim], start, *box.offset[dim + 1 :])
    return Box(offset, (*box.shape[:dim], length, *box.shape[dim + 1 :]))
