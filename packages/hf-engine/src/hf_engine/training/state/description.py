"""`state.json`: everything of a state that is not a tensor, and which rank's files hold which boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hf_engine.resharding.boxes import Box
from hf_engine.training.state.parts import BUFFERS, MOMENTS, WEIGHTS, StateParts, StateProgress
from hf_protocols.errors import StateError
from hf_protocols.outer_files import read_json_object
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_engine.backends.base import TrainConfig
    from hf_protocols.topology import Topology

__all__ = [
    "DESCRIPTION",
    "SCHEMA",
    "RankFiles",
    "StateDescription",
    "describe_layout",
    "describe_optimizer",
    "file_name",
    "key_of",
]

SCHEMA = 1
DESCRIPTION = "state.json"
Boxes = Mapping[str, tuple[Box, ...]]


def file_name(kind: str, rank: int) -> str:
    """Of the file with one rank's tensors of a kind."""
    return f"{kind}-{rank:05d}.safetensors"


def key_of(name: str, box: Box, boxes: tuple[Box, ...]) -> str:
    """Returns a box's name in its file: the parameter's name, with an offset if the rank stores several boxes."""
    return name if len(boxes) == 1 else f"{name}@{','.join(map(str, box.offset))}"


def describe_layout(topology: Topology) -> dict[str, Any]:
    """Sizes and order of a training layout, as JSON."""
    return {**asdict(topology.train), "order": topology.order}


def describe_optimizer(config: TrainConfig) -> dict[str, Any]:
    """Name and hyperparameters of the optimizer, as JSON."""
    names = ("learning_rate", "eps", "weight_decay", "warmup_steps", "schedule", "total_steps", "floor")
    return {
        "name": "adamw",
        "betas": list(config.betas),
        "max_grad_norm": str(config.max_grad_norm),  # infinity is not JSON
        **{name: getattr(config, name) for name in names},
    }


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Files that one rank stored."""

    boxes: Boxes
    """Of parameters, the same in its file of every kind."""
    generators: Mapping[str, Any]
    """States of its random numbers."""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        boxes = {name: [[*map(list, (box.offset, box.shape))] for box in held] for name, held in self.boxes.items()}
        return {"boxes": boxes, "random": dict(self.generators)}


@dataclass(frozen=True, kw_only=True)
class StateDescription:
    """A state as `state.json` describes it."""

    path: Path
    """Of the file, for messages."""
    backend: str
    head: str
    dtype: str
    seed: int
    layout: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    base: Mapping[str, Any] | None
    kinds: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    progress: StateProgress
    ranks: tuple[RankFiles, ...]

    @classmethod
    def read(cls, directory: Path) -> StateDescription:
        """Reads and checks `state.json`.

        Raises:
            StateError: naming the file, if it is missing, of another schema, or not what this module writes.
        """
        path = directory / DESCRIPTION
        body = read_json_object(StateError, path)
        if body.get("schema") != SCHEMA:
            raise StateError(
                f"{path} has schema {show(body.get('schema'))}, this version of hf-engine reads schema {SCHEMA}. "
                "Load it with the version that wrote it and save a new state"
            )
        try:
            return cls._parse(path, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{path} is damaged: {type(error).__name__}: {error}") from None

    @classmethod
    def _parse(cls, path: Path, body: Mapping[str, Any]) -> StateDescription:
        rate = body["learning_rate"]
        ranks = tuple(RankFiles(boxes=_boxes(rank["boxes"]), generators=dict(rank["random"])) for rank in body["ranks"])
        if not ranks or len(ranks) != _count(body["world_size"]):
            raise ValueError(f"world_size is {body['world_size']}, there are {len(ranks)} ranks")
        kinds = tuple(body["kinds"])
        if kinds not in ((WEIGHTS,), (WEIGHTS, *MOMENTS)):
            raise ValueError(f"unknown kinds {kinds}")
        return cls(
            path=path,
            backend=str(body["backend"]),
            head=str(body["head"]),
            dtype=str(body["dtype"]),
            seed=int(body["seed"]),
            layout=dict(body["layout"]),
            optimizer=None if body["optimizer"] is None else dict(body["optimizer"]),
            base=None if body["base"] is None else dict(body["base"]),
            kinds=kinds,
            shapes=_shapes(body["parameters"]),
            buffers=_shapes(body["buffers"]),
            progress=StateProgress(
                optimizer_steps=_count(body["optimizer_steps"]),
                weight_changes=_count(body["weight_changes"]),
                weight_version=_count(body["weight_version"]),
                learning_rate=None if rate is None else (float(rate["value"]), bool(rate["constant"])),
            ),
            ranks=ranks,
        )

    def to_json(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """The content of `state.json`."""
        rate = self.progress.learning_rate
        return {
            "schema": SCHEMA,
            "versions": dict(versions),
            "backend": self.backend,
            "head": self.head,
            "dtype": self.dtype,
            "seed": self.seed,
            "world_size": len(self.ranks),
            "layout": dict(self.layout),
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
            "optimizer_steps": self.progress.optimizer_steps,
            "learning_rate": None if rate is None else {"value": rate[0], "constant": rate[1]},
            "weight_changes": self.progress.weight_changes,
            "weight_version": self.progress.weight_version,
            "base": None if self.base is None else dict(self.base),
            "kinds": list(self.kinds),
            "parameters": {name: list(shape) for name, shape in self.shapes.items()},
            "buffers": {name: list(shape) for name, shape in self.buffers.items()},
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    def pieces_of(self, kind: str, name: str) -> Iterator[tuple[str, str, Box]]:
        """File, key and box of everything stored of a tensor."""
        if kind == BUFFERS:
            if name in self.buffers:
                yield file_name(kind, 0), name, Box.whole(self.buffers[name])
            return
        for rank, stored in enumerate(self.ranks):
            boxes = stored.boxes.get(name, ())
            for box in boxes:
                yield file_name(kind, rank), key_of(name, box, boxes), box

    def check_fits(self, parts: StateParts) -> None:
        """Refuses a state of another model, or without what is needed.

        Raises:
            StateError: naming `state.json` and what differs.
        """
        if self.head != parts.head:
            self._refuse(f"is of a model with head {show(self.head)}, this one has head {show(parts.head)}")
        if lacking := [kind for kind in parts.kinds if kind not in self.kinds]:
            self._refuse(f"was saved from a frozen model: it lacks {', '.join(lacking)}")
        if (self.base is None) != (parts.base is None):
            has, lacks = ("adapters", "none") if self.base is not None else ("no adapters", "some")
            self._refuse(f"has {has} and this model {lacks}. Build the model with the lora that was saved")
        for key, value in (parts.base or {}).items():
            if (self.base or {}).get(key) != value:
                what = (
                    "another base model"
                    if key == "digest"
                    else f"adapters with {key}={show((self.base or {}).get(key))}"
                )
                self._refuse(f"belongs to {what}; here {key} is {show(value)}. Build the model that was saved")
        own_buffers = {name: tuple(buffer.shape) for name, buffer in parts.buffers().items()}
        _compare(self.path, self.shapes, parts.shapes, "parameters")
        _compare(self.path, self.buffers, own_buffers, "buffers")

    def is_of_layout(self, parts: StateParts, world_size: int) -> bool:
        """True if every rank finds its own random numbers."""
        return self.backend == parts.backend and self.layout == dict(parts.layout) and len(self.ranks) == world_size

    def _refuse(self, why: str) -> NoReturn:
        raise StateError(f"{self.path} does not fit: the state {why}")


def _compare(path: Path, stored: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], what: str) -> None:
    if differing := sorted(name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name)):
        name = differing[0]
        raise StateError(
            f"{path} is of another model: {len(differing)} {what} differ, such as {show(name)}, which is "
            f"{own.get(name, 'absent')} here and {stored.get(name, 'absent')} there"
        )


def _boxes(body: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
    return {
        name: tuple(Box(tuple(map(_count, offset)), tuple(map(_count, shape))) for offset, shape in boxes)
        for name, boxes in body.items()
    }


def _shapes(body: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(_count, shape)) for name, shape in body.items()}


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{show(value)} is not a count")
    return value
