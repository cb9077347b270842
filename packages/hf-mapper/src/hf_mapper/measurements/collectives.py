"""Measured collectives: a table of times against bytes, for all-reduce and send_recv in and between machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_mapper.constants import find_efficiency, find_links
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.measurements.cases import Phase, build_cluster, find_gpu, find_network
from hf_mapper.measurements.tables import MeasuredTable, Row, SkipRow, number, whole_number
from hf_mapper.simulators.communication import all_reduce_s, build_link, point_to_point_s
from hf_mapper.specs import ClusterSpec, MachineSpec, gpu
from hf_protocols import ConfigError

__all__ = ["CollectiveCase", "build_collective_cases"]


@dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One collective of `num_bytes` over `num_ranks` ranks, `members` of them in each machine."""

    source: str
    gpu: str
    collective: str
    cluster: ClusterSpec
    num_ranks: int
    members: int
    num_bytes: float
    measured: float
    phase: Phase = "communication"
    stack: str = "links"
    software: str = "-"

    @property
    def fit_group(self) -> str:
        """Collectives of one kind over as many ranks."""
        return f"{self.collective} over {self.num_ranks}, {self.members} a machine"

    def predict(self) -> float:
        """Seconds of the collective."""
        link = build_link(self.cluster, num_ranks=self.num_ranks, stride=1, world_size=self.num_ranks)
        spend = all_reduce_s if self.collective == "all_reduce" else point_to_point_s
        return float(spend(link, self.num_bytes))

    def with_constants(self, efficiency: EfficiencySpec, **links: float) -> CollectiveCase:
        """The same case with other constants."""
        return replace(self, cluster=build_cluster(self.cluster, efficiency, **links))


def build_collective_cases(table: MeasuredTable) -> Iterator[tuple[Row, list[CollectiveCase] | SkipRow]]:
    """For every row its collective, or why it is not used."""
    for row in table.rows:
        try:
            yield row, [_collective_case(row)]
        except (SkipRow, ConfigError) as reason:
            yield row, reason if isinstance(reason, SkipRow) else SkipRow(f"it cannot be simulated: {reason}")


def _collective_case(row: Row) -> CollectiveCase:
    kind, ranks, members = find_gpu(row["gpu"]), whole_number(row, "num_workers"), whole_number(row, "devices_per_node")
    if row["collective"] not in ("all_reduce", "send_recv"):
        raise SkipRow(f"collective {row['collective']} is not simulated")
    if "pairwise" in row.get("node_type", ""):
        raise SkipRow("NVLink between pairs only is not simulated")
    if members < ranks:
        raise SkipRow("the network between machines is not stated")
    machine = MachineSpec(gpu=gpu(kind), num_gpus=members, num_machines=-(-ranks // members))
    cluster = ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=find_network(row, kind))
    return CollectiveCase(
        source=row.get("source", ""),
        gpu=row["gpu"],
        collective=row["collective"],
        cluster=build_cluster(cluster, find_efficiency(kind, "links"), **find_links(kind)),
        num_ranks=ranks,
        members=members,
        num_bytes=number(row, "bytes"),
        measured=number(row, "time_ms_median_maxrank") / 1e3,
    )
