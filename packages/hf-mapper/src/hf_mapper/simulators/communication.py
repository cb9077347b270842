"""Times of collectives, as latency plus bytes over bandwidth (alpha-beta), on the link that a group of ranks has.

Ranks are numbered tp fastest, then dp, then pp, over whole machines, so a group is described by its size and by the
stride between its members. Sizes and bytes are of one group, or of each of B (`Sizes`, `Figures`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_mapper.simulators.layouts import Figures, Layouts, Sizes
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ConfigError, ModelShape

__all__ = [
    "Link",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "build_link",
    "build_stage_link",
    "expert_exchange_s",
    "one_shot_reduce_s",
    "point_to_point_s",
    "round_trip_s",
]


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of a group of `num_ranks` ranks: attained bandwidth per rank, latency of one hop."""

    num_ranks: Sizes
    bandwidth_bytes_per_s: Figures
    latency_s: Figures


def build_link(
    cluster: ClusterSpec, *, num_ranks: Sizes, stride: Sizes, world_size: Sizes, shared_rails: bool = True
) -> Link:
    """The link of groups of `num_ranks` ranks, `stride` apart, on a pool of `world_size` ranks.

    Inside a machine it is the accelerators' own link. Across machines, the groups that cross at the same time share the
    machine's network. The members of one group in one machine need the network once (a ring enters a machine once);
    without `shared_rails` each member needs it for itself.

    Raises:
        ConfigError: for more ranks than one machine has, on a cluster of one.
    """
    machine, network = cluster.machine, cluster.inter_bandwidth_bytes_per_s
    whole = (world_size <= machine.num_gpus) | (machine.num_gpus % (num_ranks * stride) == 0)
    inside = whole | (num_ranks == 1)
    if network is None and not np.all(inside):
        raise ConfigError(
            f"{np.max(world_size)} ranks do not fit the one machine of {machine.num_gpus} devices. Lower the sizes of "
            "the layout, or add machines with inter_bandwidth_bytes_per_s"
        )
    own = machine.link_bandwidth_bytes_per_s
    members = np.minimum(num_ranks, np.maximum(1, machine.num_gpus // stride)) if shared_rails else 1
    crossing = machine.num_gpus / members
    bandwidth = np.where(inside, own, np.minimum(own, (network or own) / crossing))
    return Link(
        num_ranks=num_ranks,
        bandwidth_bytes_per_s=bandwidth * cluster.link_efficiency,
        latency_s=np.where(inside, machine.intra_latency_s, cluster.inter_latency_s),
    )


def build_stage_link(cluster: ClusterSpec, layouts: Layouts) -> Link:
    """The link of a rank and the one that has the same place in the next pipeline stage.

    Where only some neighbours share a machine, returns the link between machines: the slowest hop sets the pace.
    """
    stride = layouts.tp_size * layouts.dp_size
    return build_link(cluster, num_ranks=layouts.pp_size, stride=stride, world_size=layouts.world_size)


def round_trip_s(cluster: ClusterSpec, layouts: Layouts, num_bytes: Figures) -> Figures:
    """Seconds to bring `num_bytes` through all pipeline stages in turn and back to the first, hop by hop."""
    stride = layouts.tp_size * layouts.dp_size
    pair = np.minimum(2, layouts.pp_size)
    near = build_link(cluster, num_ranks=pair, stride=stride, world_size=layouts.world_size)
    machines = -(-layouts.pp_size // np.maximum(1, cluster.machine.num_gpus // stride))
    crossing = np.where(machines > 1, machines, 0)
    far_s = point_to_point_s(build_stage_link(cluster, layouts), num_bytes)
    return (layouts.pp_size - crossing) * point_to_point_s(near, num_bytes) + crossing * far_s


def all_gather_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds to gather `num_bytes`, the whole result, on every rank; a reduce-scatter of them takes as long."""
    volume = num_bytes * (link.num_ranks - 1) / link.num_ranks
    return np.log2(link.num_ranks) * link.latency_s + volume / link.bandwidth_bytes_per_s


def all_reduce_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds to sum `num_bytes` over every rank: a reduce-scatter and an all-gather."""
    return 2 * all_gather_s(link, num_bytes)


def all_to_all_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds in which all ranks at once send `num_bytes` each, an equal part to every rank, the sender included."""
    volume = num_bytes * (link.num_ranks - 1) / link.num_ranks
    return np.where(link.num_ranks == 1, 0.0, link.latency_s + volume / link.bandwidth_bytes_per_s)


def expert_exchange_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, tokens: Sizes
) -> Figures:
    """Seconds to bring a rank's `tokens` to the experts of one layer and back, once; none without expert parallelism.

    Experts are spread over neighbours in data, which across machines all need the network for themselves. Tokens are
    taken to choose all experts equally; each rank of a tensor group sends its part of them.
    """
    link = build_link(
        cluster,
        num_ranks=layouts.ep_size,
        stride=layouts.tp_size,
        world_size=layouts.world_size,
        shared_rails=False,
    )
    copies = tokens * model.num_experts_per_token / layouts.tp_size
    return 2 * all_to_all_s(link, copies * model.hidden_size * workload.element_bytes)


def one_shot_reduce_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds to sum `num_bytes` where every rank reads all the others' at once: one hop, and more bytes."""
    volume = num_bytes * (link.num_ranks - 1)
    return np.where(link.num_ranks == 1, 0.0, link.latency_s + volume / link.bandwidth_bytes_per_s)


def point_to_point_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds to send `num_bytes` to a neighbour; none where there is no other rank."""
    return np.where(link.num_ranks == 1, 0.0, link.latency_s + num_bytes / link.bandwidth_bytes_per_s)
