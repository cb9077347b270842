"""Proving a conversion on real weights: every rank's shard is built, moved as the plan says, compared, and moved back.

One process plays all ranks, parameter by parameter, so the proof needs the memory of the largest parameter on its
ranks and no process group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.digest import compute_digest
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.plan import Message, ReshardPlan, plan_reshard
from hf_protocols.arguments import check_kind, describe_names, shorten_list, show
from hf_protocols.errors import ReshardError

__all__ = ["ConversionReport", "check_conversion", "find_weight_files", "read_shapes"]

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_ROTARY_BUFFER = "rotary_emb.inv_freq"
"""Recomputed from config.json; old versions of transformers stored it with every layer."""


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a proof covered."""

    num_parameters: int
    """Named tensors that were moved to the generation layout and back."""
    parameter_bytes: int
    moved_bytes: int
    """Bytes received by all ranks, there and back."""
    digests: Mapping[str, int]
    """64-bit digest of every whole tensor, the same before and after."""


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the directory's safetensors files.

    Raises:
        ReshardError: if there are none, one cannot be read, or the index names a file or tensor that is not there.
    """
    return {name: tuple(shape) for name, (_, shape) in _index(directory).items()}


def check_conversion(directory: str | Path, source: WeightLayout, target: WeightLayout) -> ConversionReport:
    """Moves the weights of a Hugging Face directory from one layout to the other and back, bit by bit.

    What transformers does not load is left out: rotary buffers of old files, and the copy of a tied embedding.

    Args:
        directory: `config.json`, and `model.safetensors` or the files that `model.safetensors.index.json` names.
        source: the training layout.
        target: the generation layout.

    Raises:
        ReshardError: naming tensors that are missing, extra or mis-shaped, a stored head that is not the embedding to
            which it is tied, or a box whose bits differ.
    """
    check_kind(ReshardError, "directory", directory, str | Path, "the path of a model in Hugging Face format")
    for name, layout in (("source", source), ("target", target)):
        check_kind(ReshardError, name, layout, WeightLayout, "a WeightLayout, such as replicated_layout(shapes, [0])")
    files = {name: found for name, found in _index(Path(directory)).items() if not name.endswith(_ROTARY_BUFFER)}
    if _HEAD not in source.shapes and {_HEAD, _EMBEDDING} <= files.keys():
        _check_tied(files[_HEAD][0], files[_EMBEDDING][0])
        del files[_HEAD]
    _check_names({name: shape for name, (_, shape) in files.items()}, source.shapes)
    ways = [plan_reshard(source, target), plan_reshard(target, source)]
    pieces = [_by_name(plan) for plan in ways]
    digests, total, moved = {}, 0, 0
    for name, (path, _) in files.items():
        whole = _read(path, name)
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

    with safe_open(path, framework="pt") as file:
        whole: torch.Tensor = file.get_tensor(name)
    return whole


def _check_tied(head_file: Path, embedding_file: Path) -> None:
    head, embedding = _read(head_file, _HEAD), _read(embedding_file, _EMBEDDING)
    if head.dtype != embedding.dtype or not torch.equal(_bits(head), _bits(embedding)):
        raise ReshardError(
            f"config.json ties {show(_HEAD)} to {show(_EMBEDDING)}, but the weights hold another one: set "
            "tie_word_embeddings to false, or leave the head out of the files"
        )


_Shards = dict[int, list[torch.Tensor]]
"""By rank: one tensor per box of one parameter."""


def find_weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers reads: the one that has everything, else those that the index names.

    Raises:
        ReshardError: if there are none, or the index cannot be read or names files that are not there.
    """
    whole = directory / _WHOLE
    return [whole] if whole.is_file() else [directory / name for name in sorted({*_read_index(directory).values()})]


def _index(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    indexed = {} if (directory / _WHOLE).is_file() else _read_index(directory)
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in find_weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ReshardError(f"{path.name} cannot be read: {error}; fetch it again if it was cut short") from error
    if lost := sorted(name for name, file in indexed.items() if name not in found or found[name][0].name != file):
        raise ReshardError(
            f"{_INDEX} names {show(lost[0])} in {indexed[lost[0]]}, which lacks it or lies elsewhere "
            f"({len(lost)} such): give a whole directory of one model"
        )
    return found


def _read_index(directory: Path) -> dict[str, str]:
    index = directory / _INDEX
    if not index.exists():
        raise ReshardError(
            f"{directory} holds no safetensors files, neither {_WHOLE} nor {_INDEX}: give a model in Hugging Face "
            "format"
        )
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReshardError(f"{index.name} is no index of safetensors files: {error!r}") from error
    if not files or not all(isinstance(each, str) for pair in files.items() for each in pair):
        raise ReshardError(f"{index.name} is no index of safetensors files: its weight_map maps no names to files")
    if missing := sorted(name for name in {*files.values()} if not (index.parent / name).is_file()):
        raise ReshardError(
            f"{index.name} names {describe_names(missing)}, which {index.parent} lacks: fetch the missing files"
        )
    return files


def _check_names(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {describe_names(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"extra {describe_names(extra)}")
    shapes = [
        f"{show(name)} has shape {found[name]}, the config says {tuple(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != tuple(expected[name])
    ]
    problems += shorten_list(shapes)
    if problems:
        raise ReshardError(f"the weights do not match config.json: {'; '.join(problems)}")


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
