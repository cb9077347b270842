"""Ranks and coordinates: which rank holds which part of a model, in training and in generation.

A model with sizes pp-tp-dp (and cp, ep) occupies `pp * tp * cp * dp` ranks. For generation each training replica is
split into smaller replicas (HybridFlow paper, sections 5.1 and 5.3); ranks that hold the same generation shard
and get different prompts are a micro-DP group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

from hf_protocols.errors import TopologyError
from hf_protocols.validation import Checks, show

__all__ = ["Axis", "Coordinate", "GenerationSpec", "Grouping", "Order", "ParallelSpec", "Topology"]

_check = Checks(TopologyError)

Order = Literal["megatron", "contiguous"]
"""The order in which ranks are numbered; see `Topology`."""
Grouping = Literal["hybridflow", "vanilla"]
"""The rule that forms generation groups from training groups; see `Topology`."""
Axis = Literal["tp", "pp", "dp", "cp", "ep", "gen_tp", "gen_pp", "micro_dp", "gen_replica"]
"""An axis of a topology; see `Topology.groups`."""

_GENERATION_AXES = ("gen_tp", "gen_pp", "micro_dp", "gen_replica")


def _check_sizes(spec: ParallelSpec | GenerationSpec) -> None:
    for field in fields(spec):
        size = getattr(spec, field.name)
        _check.count(field.name, size)
        if size > sys.maxsize:
            raise TopologyError(f"{field.name}={show(size)} must be at most {sys.maxsize}")


def _parse_sizes(text: object, names: tuple[str, ...], form: str) -> dict[str, int]:
    parts = text.split("-") if isinstance(text, str) else []
    if len(parts) != len(names) or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise TopologyError(f"{show(text)} is not of the form {form}")
    return dict(zip(names, map(int, parts), strict=True))


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of one model's training or inference layout; written pp-tp-dp.

    `ep_size` (expert parallelism) folds into dp * cp and adds no ranks.

    Raises:
        TopologyError: for a size below 1, or an ep_size that does not divide dp_size * cp_size.
    """

    pp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self)
        if (self.dp_size * self.cp_size) % self.ep_size:
            raise TopologyError(
                f"ep_size={self.ep_size} does not divide dp_size * cp_size = {self.dp_size} * {self.cp_size}: "
                "experts are spread over consecutive data- and context-parallel ranks"
            )

    def __str__(self) -> str:
        """Returns `pp-tp-dp`, and the sizes of context and expert parallelism where they are above 1."""
        more = "".join(f" {name} {size}" for name, size in (("cp", self.cp_size), ("ep", self.ep_size)) if size > 1)
        return f"{self.pp_size}-{self.tp_size}-{self.dp_size}{more}"

    @classmethod
    def parse(cls, text: str) -> ParallelSpec:
        """Reads `"pp-tp-dp"`, for example `"1-8-2"`."""
        return cls(**_parse_sizes(text, ("pp_size", "tp_size", "dp_size"), "pp-tp-dp, such as 1-8-2"))

    @property
    def world_size(self) -> int:
        """Number of ranks: pp * tp * cp * dp."""
        return self.pp_size * self.tp_size * self.cp_size * self.dp_size


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """Sizes of one generation replica; written pp-tp.

    Raises:
        TopologyError: for a size below 1.
    """

    gen_pp_size: int = 1
    gen_tp_size: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self)

    def __str__(self) -> str:
        """Returns `pp-tp`."""
        return f"{self.gen_pp_size}-{self.gen_tp_size}"

    @classmethod
    def parse(cls, text: str) -> GenerationSpec:
        """Reads `"pp-tp"`, for example `"1-2"`."""
        return cls(**_parse_sizes(text, ("gen_pp_size", "gen_tp_size"), "pp-tp, such as 1-2"))

    @property
    def replica_size(self) -> int:
        """Ranks that together hold one whole model for generation: gen_pp * gen_tp."""
        return self.gen_pp_size * self.gen_tp_size


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One rank's coordinate on every axis; the last four are None without a generation layout."""

    pp: int
    tp: int
    dp: int
    cp: int
    ep: int
    gen_pp: int | None = None
    gen_tp: int | None = None
    micro_dp: int | None = None
    gen_replica: int | None = None


@dataclass(frozen=True)
class Topology:
    """One model's ranks: the training layout, and the generation layout on the same ranks.

    Args:
        train: sizes in training and inference.
        generation: sizes of a generation replica; None for a model that does not generate.
        order: `"megatron"` numbers ranks with tp fastest, then cp, dp, pp; `"contiguous"` with tp, cp, pp, then
            dp, so that the ranks of one data-parallel replica are consecutive.
        grouping: `"hybridflow"` strides generation groups over the training groups, so that every rank's training
            shard lies inside its generation shard (paper, section 5.3); `"vanilla"` takes consecutive ones
            (the paper's HybridFlow-V). Sizes that do not nest have one rule: replicas of consecutive ranks.

    Raises:
        TopologyError: if gen_pp * gen_tp does not divide the number of ranks, order or grouping is unknown, or the
            layouts are not specs.
    """

    train: ParallelSpec
    generation: GenerationSpec | None = None
    order: Order = "megatron"
    grouping: Grouping = "hybridflow"

    def __post_init__(self) -> None:
        _check.kind("train", self.train, ParallelSpec, 'a ParallelSpec, such as ParallelSpec.parse("1-8-2")')
        wanted = 'a GenerationSpec, such as GenerationSpec.parse("1-2"), or None'
        _check.kind("generation", self.generation, GenerationSpec | None, wanted)
        _check.one_of("order", self.order, get_args(Order))
        _check.one_of("grouping", self.grouping, get_args(Grouping))
        if self.generation and self.world_size % self.generation.replica_size:
            gen = self.generation
            raise TopologyError(
                f"{self.world_size} ranks cannot be split into generation replicas of gen_pp_size * gen_tp_size = "
                f"{gen.gen_pp_size} * {gen.gen_tp_size} = {gen.replica_size} ranks. "
                f"Choose sizes whose product divides {self.world_size}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.train.world_size

    @property
    def is_nested(self) -> bool:
        """True if gen_pp divides pp and gen_tp divides tp, the case of the paper's section 5."""
        gen = self._generation
        return self.train.pp_size % gen.gen_pp_size == 0 and self.train.tp_size % gen.gen_tp_size == 0

    @property
    def num_gen_replicas(self) -> int:
        """Number of generation replicas: world_size / (gen_pp * gen_tp)."""
        return self.world_size // self._generation.replica_size

    @property
    def micro_dp_size(self) -> int:
        """Ranks in a micro-DP group: pp * tp / (gen_pp * gen_tp) where that is whole (paper, section 5.1)."""
        return len(self.groups("micro_dp")[0])

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the coordinate of `rank`.

        Raises:
            TopologyError: for a rank outside 0 ... world_size - 1.
        """
        _check.kind("rank", rank, type(None) if isinstance(rank, bool) else int, "a whole number")
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not among the {self.world_size} ranks of this topology")
        return self._coordinates[rank]

    def rank(self, *, pp: int = 0, tp: int = 0, dp: int = 0, cp: int = 0) -> int:
        """Returns the rank at a training coordinate: the inverse of `coordinate`.

        Raises:
            TopologyError: for a coordinate outside its axis.
        """
        train = self.train
        for axis, at in (("pp", pp), ("tp", tp), ("dp", dp), ("cp", cp)):
            size = getattr(train, f"{axis}_size")
            _check.kind(axis, at, int, "a whole number")
            if not 0 <= at < size:
                raise TopologyError(f"{axis}={at} is not among the {axis}_size={size} coordinates of this axis")
        if self.order == "megatron":
            return tp + train.tp_size * (cp + train.cp_size * (dp + train.dp_size * pp))
        return tp + train.tp_size * (cp + train.cp_size * (pp + train.pp_size * dp))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Returns the rank groups along `axis`, each in the order of that axis, sorted by lowest rank.

        `gen_replica` groups are the ranks of one generation replica, gen_tp fastest.

        Raises:
            TopologyError: for an unknown axis, or a generation axis of a topology without generation.
        """
        _check.one_of("axis", axis, get_args(Axis))
        if axis in _GENERATION_AXES and self.generation is None:
            raise _without_generation()
        if axis not in self._groups_by_axis:
            self._groups_by_axis[axis] = self._compute_groups(axis)
        return self._groups_by_axis[axis]

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Returns the group along `axis` to which `rank` belongs."""
        self.coordinate(rank)
        return next(group for group in self.groups(axis) if rank in group)

    def __reduce__(self) -> tuple[type[Topology], tuple[ParallelSpec, GenerationSpec | None, Order, Grouping]]:
        """Pickles the sizes alone: derived values are computed again instead of sent to every rank."""
        return type(self), (self.train, self.generation, self.order, self.grouping)

    @property
    def _generation(self) -> GenerationSpec:
        if self.generation is None:
            raise _without_generation()
        return self.generation

    @cached_property
    def _coordinates(self) -> tuple[Coordinate, ...]:
        locate = self._locate_megatron if self.order == "megatron" else self._locate_contiguous
        generate = self._generation_rule() if self.generation else None
        found = []
        for rank in range(self.world_size):
            pp, tp, dp, cp = locate(rank)
            ep = (dp * self.train.cp_size + cp) % self.train.ep_size
            gen = generate(rank, pp, tp, dp, cp) if generate else {}
            found.append(Coordinate(pp=pp, tp=tp, dp=dp, cp=cp, ep=ep, **gen))
        return tuple(found)

    def _locate_megatron(self, rank: int) -> tuple[int, int, int, int]:
        rest, tp = divmod(rank, self.train.tp_size)
        rest, cp = divmod(rest, self.train.cp_size)
        pp, dp = divmod(rest, self.train.dp_size)
        return pp, tp, dp, cp

    def _locate_contiguous(self, rank: int) -> tuple[int, int, int, int]:
        rest, tp = divmod(rank, self.train.tp_size)
        rest, cp = divmod(rest, self.train.cp_size)
        dp, pp = divmod(rest, self.train.pp_size)
        return pp, tp, dp, cp

    def _generation_rule(self) -> Callable[[int, int, int, int, int], dict[str, int]]:
        """Returns the function (rank, pp, tp, dp, cp) -> generation coordinate for this topology's grouping."""
        if not self.is_nested:
            return self._consecutive
        return self._strided if self.grouping == "hybridflow" else self._vanilla

    @property
    def _model_size(self) -> int:
        return self.train.pp_size * self.train.tp_size

    def _in_replica(self, dp: int, cp: int, gen_pp: int, gen_tp: int, micro_dp: int) -> dict[str, int]:
        """Completes a generation coordinate found inside training replica (dp, cp)."""
        micro_dp_size = self._model_size // self._generation.replica_size
        gen_replica = (dp * self.train.cp_size + cp) * micro_dp_size + micro_dp
        return {"gen_pp": gen_pp, "gen_tp": gen_tp, "micro_dp": micro_dp, "gen_replica": gen_replica}

    def _strided(self, rank: int, pp: int, tp: int, dp: int, cp: int) -> dict[str, int]:
        pp_stride = self.train.pp_size // self._generation.gen_pp_size
        tp_stride = self.train.tp_size // self._generation.gen_tp_size
        micro_dp = (pp % pp_stride) * tp_stride + tp % tp_stride
        return self._in_replica(dp, cp, pp // pp_stride, tp // tp_stride, micro_dp)

    def _vanilla(self, rank: int, pp: int, tp: int, dp: int, cp: int) -> dict[str, int]:
        rest, gen_tp = divmod(pp * self.train.tp_size + tp, self._generation.gen_tp_size)
        micro_dp, gen_pp = divmod(rest, self._generation.gen_pp_size)
        return self._in_replica(dp, cp, gen_pp, gen_tp, micro_dp)

    def _consecutive(self, rank: int, pp: int, tp: int, dp: int, cp: int) -> dict[str, int]:
        """Numbers ranks if sizes do not nest: replicas of consecutive ranks, micro-DP groups inside lcm blocks."""
        size = self._generation.replica_size
        gen_replica, index = divmod(rank, size)
        gen_pp, gen_tp = divmod(index, self._generation.gen_tp_size)
        micro_dp = rank % math.lcm(self._model_size, size) // size
        return {"gen_pp": gen_pp, "gen_tp": gen_tp, "micro_dp": micro_dp, "gen_replica": gen_replica}

    @cached_property
    def _groups_by_axis(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Caches groups by axis: a search makes thousands of topologies and needs one or two axes of each."""
        return {}

    def _compute_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        members: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for rank, at in enumerate(self._coordinates):
            key, position = self._group_key(axis, rank, at)
            members.setdefault(key, []).append((position, rank))
        groups = [tuple(rank for _, rank in sorted(group)) for group in members.values()]
        return tuple(sorted(groups, key=min))

    def _group_key(self, axis: str, rank: int, at: Coordinate) -> tuple[tuple[object, ...], int]:
        """Returns the key that the ranks of one group along `axis` share, and the rank's position in the group."""
        spread = at.dp * self.train.cp_size + at.cp
        if axis == "ep":
            return (at.pp, at.tp, spread // self.train.ep_size), at.ep
        if axis == "gen_replica":
            assert at.gen_pp is not None and at.gen_tp is not None
            return (at.gen_replica,), at.gen_pp * self._generation.gen_tp_size + at.gen_tp
        if axis == "micro_dp":
            assert at.micro_dp is not None
            return (self._micro_dp_block(rank, spread), at.gen_pp, at.gen_tp), at.micro_dp
        inside = ("pp", "tp", "dp", "cp") if axis not in _GENERATION_AXES else ("gen_pp", "gen_tp", "gen_replica")
        return tuple(getattr(at, name) for name in inside if name != axis), getattr(at, axis)

    def _micro_dp_block(self, rank: int, spread: int) -> int:
        """Micro-DP groups lie inside a training replica, or inside a block of the lcm where sizes do not nest."""
        if self.is_nested:
            return spread
        return rank // math.lcm(self._model_size, self._generation.replica_size)


def _without_generation() -> TopologyError:
    return TopologyError("this topology has no generation layout. Build it as Topology(train, GenerationSpec(...))")
