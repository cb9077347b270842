"""Times of collectives, as latency plus bytes over bandwidth (alpha-beta), on the link that a group of ranks has.

Ranks are numbered tp fastest, then dp, then pp, over whole machines, so a group is described by its size and by the
stride between its members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_mapper.specs import ClusterSpec

__all__ = ["Link", "all_gather_s", "all_reduce_s", "build_link", "point_to_point_s"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one group of ``num_ranks`` ranks communicates over: attained bandwidth per rank, latency of one hop."""

    num_ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float


def build_link(
    cluster: ClusterSpec, *, num_ranks: int, stride: int, world_size: int, shared_rails: bool = True
) -> Link:
    """The link of groups of ``num_ranks`` ranks, ``stride`` apart, on a pool of ``world_size`` ranks.

    Inside a machine it is the accelerators' own link. Across machines the groups that cross at the same time share
    the machine's network; of a group, the members in one machine need it once (a ring enters a machine once), or
    each for itself without ``shared_rails``.
    """
    machine = cluster.machine
    block = num_ranks * stride
    if world_size <= machine.num_gpus or machine.num_gpus % block == 0 or num_ranks == 1:
        bandwidth, latency = machine.link_bandwidth_bytes_per_s, machine.intra_latency_s
    else:
        assert cluster.inter_bandwidth_bytes_per_s is not None, "ClusterSpec asks for it with two machines"
        members = min(num_ranks, max(1, machine.num_gpus // stride)) if shared_rails else 1
        crossing = machine.num_gpus / members
        bandwidth = min(machine.link_bandwidth_bytes_per_s, cluster.inter_bandwidth_bytes_per_s / crossing)
        latency = cluster.inter_latency_s
    return Link(num_ranks=num_ranks, bandwidth_bytes_per_s=bandwidth * cluster.link_efficiency, latency_s=latency)


def all_gather_s(link: Link, num_bytes: float) -> float:
    """Seconds to gather ``num_bytes``, the whole result, on every rank; a reduce-scatter of them takes as long."""
    if link.num_ranks == 1:
        return 0.0
    volume = num_bytes * (link.num_ranks - 1) / link.num_ranks
    return math.log2(link.num_ranks) * link.latency_s + volume / link.bandwidth_bytes_per_s


def all_reduce_s(link: Link, num_bytes: float) -> float:
    """Seconds to sum ``num_bytes`` over every rank: a reduce-scatter and an all-gather."""
    return 2 * all_gather_s(link, num_bytes)


def point_to_point_s(link: Link, num_bytes: float) -> float:
    """Seconds to send ``num_bytes`` to a neighbour."""
    if link.num_ranks == 1:
        return 0.0
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s
