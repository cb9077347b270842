"""The train -> generate transition of a model by each method of the paper (section 5.4), planned exactly. Pure.

The paper gives formulas (Table 2, `hf_protocols.compute_transition_cost`); here the same figures come out of the boxes
of every rank, also where norms are replicated, stages are unequal, or sizes do not nest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import BoxNumbers, WeightLayout, fsdp_layout
from hf_engine.resharding.model_layouts import (
    check_experts,
    check_model_and_topology,
    fsdp_model_layout,
    generation_layout,
    megatron_layout,
)
from hf_engine.resharding.plan import Message, ReshardPlan, plan_reshard
from hf_protocols.errors import ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.topology import Topology
from hf_protocols.transition import Method
from hf_protocols.validation import Checks

__all__ = ["Exchange", "Sharding", "TransitionPlan", "plan_transition", "training_layout"]

_check = Checks(ReshardError)

Sharding = Literal["megatron", "fsdp"]
"""Holders of the weights in training: Megatron-core's tensor and pipeline stages, or FSDP2's chunks of rows, and of
experts, which transformers stacks."""

_DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Ranks that exchange weights with each other and with nobody else."""

    ranks: tuple[int, ...]
    gather_bytes: int
    """Bytes that each rank receives on average from pieces that go from one rank to all others: all-gathers."""
    peer_bytes: int
    """Bytes that each rank receives on average from pieces that only some ranks lack: point-to-point messages."""


@dataclass(frozen=True, kw_only=True)
class TransitionPlan:
    """Cost of a transition for every rank, by layouts alone; all figures in bytes of the weights' dtype.

    `HybridEngine.memory`, a `TransitionMemory`, adds the bytes that an engine holds once it is built.
    """

    method: Method
    parameter_bytes: int
    """M: the whole model; a tied embedding counts once, also where the first and the last stage both hold it."""
    plan: ReshardPlan
    """The messages: to the generation layout, or to whole models for the methods that gather them."""
    generation: WeightLayout
    """Boxes that every rank holds in generation."""
    keeps_shard: bool
    """True if the training shard is kept even where it lies inside the generation shard (DS-Chat)."""

    @property
    def recv_bytes(self) -> Mapping[int, int]:
        """By rank: bytes received."""
        return self.plan.recv_bytes

    @property
    def send_bytes(self) -> Mapping[int, int]:
        """By rank: bytes sent, once for every receiver."""
        return self.plan.send_bytes

    @property
    def kept_bytes(self) -> Mapping[int, int]:
        """By rank: bytes of the target shard that it holds already."""
        return self.plan.kept_bytes

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages between ranks, in the order of names; a box that all of a group lack goes by an all-gather."""
        return self.plan.messages

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that exchange weights with each other only; `exchanges` says how much, and by which collectives."""
        return tuple(exchange.ranks for exchange in self.exchanges)

    @cached_property
    def redundant_bytes_by_rank(self) -> Mapping[int, int]:
        """By rank: bytes of the training shard that are held next to the generation shard in the model's dtype."""
        source = self.plan.source
        if self.keeps_shard:
            return {rank: source.held_bytes(rank) for rank in self.plan.ranks}
        inside = _overlaps(source, self.generation)
        return {rank: source.held_bytes(rank) - inside[rank] for rank in self.plan.ranks}

    @property
    def redundant_bytes(self) -> int:
        """Redundancy of the worst rank."""
        return max(self.redundant_bytes_by_rank.values())

    @cached_property
    def peak_param_bytes(self) -> Mapping[int, int]:
        """By rank: most bytes of weights held at once, what the gather fills and the shard outside of it."""
        inside = _overlaps(self.plan.source, self.plan.target)
        return {
            rank: self.plan.target.held_bytes(rank) + self.plan.source.held_bytes(rank) - inside[rank]
            for rank in self.plan.ranks
        }

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The groups of ranks that communicate and how, by their lowest rank; the paper's are the micro-DP groups."""
        group_of = _components(self.plan)
        gathered: dict[tuple[int, ...], int] = defaultdict(int)
        others: dict[tuple[int, ...], int] = defaultdict(int)
        for transfer in self.plan.transfers:
            ranks = group_of[transfer.source]
            sums = gathered if len(transfer.destinations) == len(ranks) - 1 else others
            sums[ranks] += transfer.numel * len(transfer.destinations) * self.plan.target.element_bytes
        return tuple(
            Exchange(ranks=ranks, gather_bytes=gathered[ranks] // len(ranks), peer_bytes=others[ranks] // len(ranks))
            for ranks in sorted({*gathered, *others})
        )


def plan_transition(
    model: ModelShape,
    topology: Topology,
    method: Method = "hybridflow",
    *,
    dtype_bytes: int = 2,
    sharding: Sharding = "megatron",
    ranks_per_machine: int = 8,
) -> TransitionPlan:
    """Plans the transition of one model.

    - `"hybridflow"`: every rank receives the part of its generation shard that it lacks (strided groups, section 5.3).
    - `"hybridflow-v"`: every rank gathers the whole model inside its training replica, then keeps the shard that the
      vanilla groups give it.
    - `"ds-chat"`: every rank gathers the whole model from ZeRO shards over all ranks, then keeps its shard.

    Args:
        model: names and shapes of the parameters.
        topology: training and generation sizes; its grouping is replaced by the method's.
        method: one of the three.
        dtype_bytes: bytes of one weight: 2, 4 or 8.
        sharding: who holds the weights in training; `"fsdp"` for pp_size = tp_size = 1.
        ranks_per_machine: senders on the receiver's machine are preferred.

    Raises:
        ReshardError: for a method that is not defined for the layout, or sizes that do not divide evenly.
        TopologyError: for a topology without generation.
    """
    check_model_and_topology(model, topology)
    _check_arguments(topology, method, dtype_bytes, sharding)
    check_experts(model, topology.train.ep_size)
    _check.count("ranks_per_machine", ranks_per_machine)
    topology = replace(topology, grouping="vanilla" if method == "hybridflow-v" else "hybridflow")
    dtype = _DTYPES[dtype_bytes]
    generation = generation_layout(model, topology, dtype=dtype)
    ranks = range(topology.world_size)
    if method == "ds-chat":
        source = fsdp_layout(model.parameters(), ranks, dtype=dtype)
    else:
        source = training_layout(model, topology, sharding, dtype=dtype)
    whole = {name: (Box.whole(shape),) for name, shape in generation.shapes.items()}
    gathered = WeightLayout(shapes=generation.shapes, boxes=dict.fromkeys(ranks, whole), dtype=dtype)
    near: list[Sequence[Sequence[int]]] = [_training_replicas(topology)] if method == "hybridflow-v" else []
    near += [topology.groups("micro_dp"), [ranks[i : i + ranks_per_machine] for i in ranks[::ranks_per_machine]]]
    return TransitionPlan(
        method=method,
        parameter_bytes=model.num_parameters * dtype_bytes,
        plan=plan_reshard(source, generation if method == "hybridflow" else gathered, near=near),
        generation=generation,
        keeps_shard=method == "ds-chat",
    )


def training_layout(
    model: ModelShape, topology: Topology, sharding: Sharding, *, dtype: str = "float32"
) -> WeightLayout:
    """Returns the boxes that every rank holds in training.

    Raises:
        ReshardError: for FSDP under any parallelism but data parallelism, or sizes that do not divide evenly.
    """
    check_model_and_topology(model, topology)
    _check_sharding(topology, sharding)
    if sharding == "fsdp":
        return fsdp_model_layout(model, topology, dtype=dtype)
    return megatron_layout(model, topology, dtype=dtype)


def _check_arguments(topology: Topology, method: str, dtype_bytes: int, sharding: str) -> None:
    topology.groups("gen_tp")  # raises without generation
    _check.one_of("method", method, get_args(Method))
    _check.one_of("dtype_bytes", dtype_bytes, _DTYPES)
    _check_sharding(topology, sharding)
    if method == "hybridflow-v" and topology.train.ep_size > 1:
        raise ReshardError(
            f"hybridflow-v gathers inside a training replica of pp * tp ranks, which under ep_size="
            f"{topology.train.ep_size} hold some of the experts only. Use hybridflow or ds-chat, or for a dense model "
            "ep_size=1"
        )
    if method == "hybridflow-v" and (sharding == "fsdp" or not topology.is_nested):
        raise ReshardError(
            "hybridflow-v gathers inside a training replica of pp * tp ranks and keeps a shard that nests in it "
            "(gen_pp divides pp, gen_tp divides tp). This layout has no such shard. Use hybridflow or ds-chat"
        )


def _check_sharding(topology: Topology, sharding: str) -> None:
    _check.one_of("sharding", sharding, get_args(Sharding))
    sizes = {name: size for name, size in vars(topology.train).items() if size > 1 and name != "dp_size"}
    if sharding == "fsdp" and sizes:
        found = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ReshardError(
            f"FSDP shards over data-parallel ranks only, the topology has {found}. "
            f"Use 1-1-{topology.world_size}{' with ep_size=1' * ('ep_size' in sizes)}, or sharding=megatron"
        )


def _training_replicas(topology: Topology) -> list[list[int]]:
    replicas: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        replicas[at.dp, at.cp].append(rank)
    return list(replicas.values())


def _overlaps(first: WeightLayout, second: WeightLayout) -> dict[int, int]:
    """By rank: bytes that it holds in both layouts; ranks that share their boxes in both are counted once."""
    known: dict[tuple[int, int], int] = {}
    numbers, overlaps = BoxNumbers(), dict[tuple[int, int], int]()
    found = {}
    for rank in sorted({*first.ranks, *second.ranks}):
        mine, other = first.boxes_of(rank), second.boxes_of(rank)
        key = (id(mine), id(other))
        if key not in known:
            known[key] = 0
            for name, boxes in mine.items():
                if name in other:
                    # Parameters that are cut alike overlap alike.
                    pair = (numbers.of(boxes), numbers.of(other[name]))
                    if pair not in overlaps:
                        overlaps[pair] = _overlap_numel(boxes, other[name])
                    known[key] += overlaps[pair]
        found[rank] = known[key] * first.element_bytes
    return found


def _overlap_numel(first: tuple[Box, ...], second: tuple[Box, ...]) -> int:
    return sum(overlap.numel for a in first for b in second if (overlap := a.intersect(b)))


def _components(plan: ReshardPlan) -> dict[int, tuple[int, ...]]:
    """The ranks that are joined by messages, directly or through others, for every rank."""
    parent = {rank: rank for rank in plan.ranks}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    joins = {(each.source, id(each.destinations)): each for each in plan.transfers}
    apart = len(parent)
    for transfer in joins.values():
        if apart == 1:
            break
        home = root(transfer.source)
        for rank in transfer.destinations:
            other = root(rank)
            apart -= other != home
            parent[other] = home
    members: dict[int, list[int]] = defaultdict(list)
    for rank in plan.ranks:
        members[root(rank)].append(rank)
    return {rank: tuple(group) for group in members.values() for rank in group}
