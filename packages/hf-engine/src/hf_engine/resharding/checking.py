"""Proving a conversion on real weights: every rank's shard is built, moved as the plan says, compared, and moved back.

One process plays all ranks, parameter by parameter, so the proof needs the memory of the largest parameter on its
ranks and no process group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_engine.model_directory import check_model_directory, errors_of, is_buffer, read_model_directory
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.digest import compute_digest
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.plan import Message, ReshardPlan, plan_reshard
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks, describe_names, shorten_list, show

__all__ = ["ConversionReport", "check_conversion"]

_check = Checks(ReshardError)

_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Extent of a proof."""

    num_parameters: int
    """Named tensors that were moved to the generation layout and back."""
    parameter_bytes: int
    moved_bytes: int
    """Bytes received by all ranks, there and back."""
    digests: Mapping[str, int]
    """64-bit digest of every whole tensor, the same before and after."""


def check_conversion(directory: str | Path, source: WeightLayout, target: WeightLayout) -> ConversionReport:
    """Moves the weights of a Hugging Face directory from one layout to the other and back, and compares every bit.

    What transformers does not load is left out: rotary buffers of old files, and the copy of a tied embedding.

    Args:
        directory: `config.json`, and `model.safetensors` or the files that `model.safetensors.index.json` names.
        source: the training layout.
        target: the generation layout.

    Raises:
        ModelError: for files that are not one model; see `check_model_directory`.
        ReshardError: naming tensors that are not the layouts', or a box whose bits differ.
    """
    _check.kind("directory", directory, str | Path, "the path of a model in Hugging Face format")
    for name, layout in (("source", source), ("target", target)):
        _check.kind(name, layout, WeightLayout, "a WeightLayout, such as replicated_layout(shapes, [0])")
    model = read_model_directory(directory)
    check_model_directory(model)
    files = {name: tensor for name, tensor in model.tensors.items() if not is_buffer(name)}
    if _HEAD not in source.shapes:
        files.pop(_HEAD, None)
    _check_names({name: tensor.shape for name, tensor in files.items()}, source.shapes)
    ways = [plan_reshard(source, target), plan_reshard(target, source)]
    pieces = [_by_name(plan) for plan in ways]
    digests, total, moved = {}, 0, 0
    for name, tensor in files.items():
        whole = _read(tensor.path, name)
        shards = _cut(whole, name, source)
        for plan, (messages, kept) in zip(ways, pieces, strict=True):
            shards, received = _move(plan, name, shards, messages[name], kept[name])
            _compare(whole, name, plan.target, shards)
            moved += received
        digests[name] = compute_digest(whole)
        total += whole.nbytes
    return ConversionReport(num_parameters=len(files), parameter_bytes=total, moved_bytes=moved, digests=digests)


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with errors_of("safetensors", f"{path} cannot be read"), safe_open(path, framework="pt") as file:
        whole: torch.Tensor = file.get_tensor(name)
    return whole


_Shards = dict[int, list[torch.Tensor]]
"""By rank: one tensor per box of one parameter."""


def _check_names(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {describe_names(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"extra {describe_names(extra)}")
    shapes = [
        f"{show(name)} has shape {found[name]}, the layout says {tuple(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != tuple(expected[name])
    ]
    problems += shorten_list(shapes)
    if problems:
        raise ReshardError(f"the weights do not match the source layout: {'; '.join(problems)}")


def _by_name(
    plan: ReshardPlan,
) -> tuple[Mapping[str, list[Message]], Mapping[str, list[tuple[int, Box]]]]:
    messages: dict[str, list[Message]] = defaultdict(list)
    for message in plan.messages:
        messages[message.name].append(message)
    kept: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, held in plan.kept.items():
        for name, box in held:
            kept[name].append((rank, box))
    return messages, kept


def _boxes(layout: WeightLayout, name: str) -> Iterator[tuple[int, tuple[Box, ...]]]:
    for rank in layout.ranks:
        if boxes := layout.boxes_of(rank).get(name):
            yield rank, boxes


def _cut(whole: torch.Tensor, name: str, layout: WeightLayout) -> _Shards:
    bounds = Box.whole(tuple(whole.shape))
    return {rank: [whole[box.slices_in(bounds)].clone() for box in boxes] for rank, boxes in _boxes(layout, name)}


def _move(
    plan: ReshardPlan, name: str, held: _Shards, messages: list[Message], kept: list[tuple[int, Box]]
) -> tuple[_Shards, int]:
    """Fills fresh shards of the target layout from those of the source, and from nothing else."""
    moved = {
        rank: [torch.empty(box.shape, dtype=next(iter(held.values()))[0].dtype) for box in boxes]
        for rank, boxes in _boxes(plan.target, name)
    }
    received = 0
    for rank, box in kept:
        _region(plan.target, rank, name, moved, box).copy_(_region(plan.source, rank, name, held, box))
    for message in messages:
        sent = _region(plan.source, message.source, name, held, message.box)
        for rank in message.destinations:
            _region(plan.target, rank, name, moved, message.box).copy_(sent)
            received += sent.nbytes
    return moved, received


def _region(layout: WeightLayout, rank: int, name: str, shards: _Shards, box: Box) -> torch.Tensor:
    boxes = layout.boxes_of(rank)[name]
    index = next(index for index, candidate in enumerate(boxes) if candidate.contains(box))
    return shards[rank][index][box.slices_in(boxes[index])]


def _compare(whole: torch.Tensor, name: str, layout: WeightLayout, shards: _Shards) -> None:
    bounds = Box.whole(tuple(whole.shape))
    for rank, boxes in _boxes(layout, name):
        for box, shard in zip(boxes, shards[rank], strict=True):
            if not torch.equal(_bits(shard), _bits(whole[box.slices_in(bounds)])):
                raise ReshardError(f"rank {rank} holds other bits of {show(name)} at {box} than the checkpoint")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: a NaN equals itself in them, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
