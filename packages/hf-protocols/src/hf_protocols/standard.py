"""The eight transfer protocols.

The paper counts eight and names six (Table 3); RANK_ZERO and 3D_PP_AS_DP, after its first open-source release,
complete them. Each is a pair of functions that your own protocols can reuse; protocols need no registration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from hf_protocols.errors import ProtocolError
from hf_protocols.selection import RowSelection, split_rows
from hf_protocols.topology import Coordinate, Topology
from hf_protocols.transfer import Collection, TransferProtocol

__all__ = [
    "ALL_TO_ALL",
    "DP",
    "ONE_TO_ALL",
    "RANK_ZERO",
    "THREE_D",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_AS_DP",
    "THREE_D_PP_ONLY",
]

Weights = Sequence[float] | None

_REPLICAS = "generation replicas (ranks / (gen_pp_size * gen_tp_size))"


def _everything(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    return [RowSelection.range(0, num_rows)] * topology.world_size


def _to_rank_zero(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    return [RowSelection.range(0, num_rows), *[RowSelection()] * (topology.world_size - 1)]


def _one_item_each(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    if num_rows != topology.world_size:
        raise ProtocolError(
            f"ALL_TO_ALL got {num_rows} items for {topology.world_size} ranks. PerRank needs one item for each rank"
        )
    return [RowSelection.range(rank, rank + 1) for rank in range(num_rows)]


def _by_rank(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    return split_rows(num_rows, topology.world_size, weights, what="data-parallel ranks (world_size)")


def _by_dp(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    chunks = split_rows(num_rows, topology.train.dp_size, weights, what="data-parallel ranks (dp_size)")
    return [chunks[at.dp] for at in _coordinates(topology)]


def _by_generation_replica(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    chunks = split_rows(num_rows, topology.num_gen_replicas, weights, what=_REPLICAS)
    return [chunks[at.gen_replica] for at in _coordinates(topology) if at.gen_replica is not None]


def _by_dp_and_pp(topology: Topology, num_rows: int, weights: Weights = None) -> list[RowSelection]:
    pp_size = topology.train.pp_size
    chunks = split_rows(num_rows, topology.train.dp_size * pp_size, weights, what="chunks (dp_size * pp_size)")
    return [chunks[at.dp * pp_size + at.pp] for at in _coordinates(topology)]


@lru_cache(maxsize=32)  # a controller asks for the same few with every call
def _coordinates(topology: Topology) -> tuple[Coordinate, ...]:
    return tuple(topology.coordinate(rank) for rank in range(topology.world_size))


def _collect_where(
    topology: Topology, chosen: Callable[[Coordinate], bool], position: Callable[[Coordinate], tuple[int, ...]]
) -> Collection:
    at = dict(enumerate(_coordinates(topology)))
    return Collection(tuple(sorted((rank for rank in at if chosen(at[rank])), key=lambda rank: position(at[rank]))))


def _list_every_rank(topology: Topology) -> Collection:
    return Collection(tuple(range(topology.world_size)), "list")


def _concat_every_rank(topology: Topology) -> Collection:
    return Collection(tuple(range(topology.world_size)))


def _rank_zero(topology: Topology) -> Collection:
    return Collection((0,))


def _last_stage(topology: Topology) -> Collection:
    last = topology.train.pp_size - 1
    return _collect_where(topology, lambda at: (at.pp, at.tp, at.cp) == (last, 0, 0), lambda at: (at.dp,))


def _each_replica(topology: Topology) -> Collection:
    first_ranks = {topology.coordinate(ranks[0]).gen_replica: ranks[0] for ranks in topology.groups("gen_replica")}
    return Collection(tuple(first_ranks[replica] for replica in range(topology.num_gen_replicas)))


def _each_stage(topology: Topology) -> Collection:
    return _collect_where(topology, lambda at: (at.tp, at.cp, at.dp) == (0, 0, 0), lambda at: (at.pp,))


def _each_dp_and_pp(topology: Topology) -> Collection:
    return _collect_where(topology, lambda at: (at.tp, at.cp) == (0, 0), lambda at: (at.dp, at.pp))


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", _everything, _list_every_rank)
"""All rows to every rank; a list of every rank's result. Model set-up, checkpoints."""

RANK_ZERO = TransferProtocol("RANK_ZERO", _to_rank_zero, _rank_zero, called="collected")
"""All rows to rank 0, nothing elsewhere; rank 0's result. Advantages over a whole batch."""

ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", _one_item_each, _list_every_rank)
"""Item i of the caller's `PerRank` to rank i; a list of every rank's result. Debugging."""

DP = TransferProtocol("DP_PROTO", _by_rank, _concat_every_rank)
"""world_size chunks; every rank, concatenated. Pure data parallelism."""

THREE_D = TransferProtocol("3D_PROTO", _by_dp, _last_stage)
"""dp_size chunks, replicated inside a replica; last stage, tp 0, cp 0 of each replica. Training and inference."""

THREE_D_ALL_MICRO_DP = TransferProtocol("3D_ALL_MICRO_DP", _by_generation_replica, _each_replica)
"""One chunk per generation replica; its gen_pp 0, gen_tp 0 rank: every row is generated once, order kept."""

THREE_D_PP_ONLY = TransferProtocol("3D_PP_ONLY", _everything, _each_stage)
"""All rows to every rank; tp 0, cp 0, dp 0 of every stage, concatenated. Inspecting weights."""

THREE_D_PP_AS_DP = TransferProtocol("3D_PP_AS_DP", _by_dp_and_pp, _each_dp_and_pp)
"""dp_size * pp_size chunks; tp 0, cp 0 of every (dp, pp), in chunk order."""
