"""Bytes that a model's calls move in each stage: rows from and to other models, and an offloaded model's own state."""

from __future__ import annotations

from hf_mapper.search.demand import ModelDemand
from hf_mapper.simulators.transfer import CallRows, simulate_offload, simulate_transfer
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import CallKind, GenerationSpec, ParallelSpec

__all__ = ["count_swaps", "offload_stage_s", "transfer_call_s", "transfer_stage_s"]


def transfer_call_s(
    kind: CallKind, rows: CallRows, cluster: ClusterSpec, parallel: ParallelSpec, generation: GenerationSpec | None
) -> float:
    """Seconds to bring one call's rows and results: shared by data-parallel rank, or by generation replica."""
    size, shares = parallel.world_size, parallel.dp_size
    if kind == "generation" and generation is not None:
        shares = size // generation.replica_size
    return simulate_transfer(rows, cluster, num_ranks=size, num_shares=shares)


def transfer_stage_s(
    demand: ModelDemand, cluster: ClusterSpec, parallel: ParallelSpec, generation: GenerationSpec | None
) -> tuple[float, ...]:
    """Seconds in each stage that the rows of the model's calls take."""
    if not demand.rows:
        return (0.0,) * len(demand.calls)
    return tuple(
        sum(
            (
                transfer_call_s(kind, rows, cluster, parallel, generation)
                for kind, rows in zip(kinds, of_stage, strict=True)
            ),
            0.0,
        )
        for kinds, of_stage in zip(demand.calls, demand.rows, strict=True)
    )


def count_swaps(kind: CallKind, workload: WorkloadSpec) -> int:
    """Counts the loads of an offloaded model for a call: a training call loads it once for every update."""
    return {"training": workload.epochs * workload.mini_batches, "function": 0}.get(kind, 1)


def offload_stage_s(
    demand: ModelDemand, cluster: ClusterSpec, workload: WorkloadSpec, host_bytes: float
) -> tuple[float, ...]:
    """Seconds in each stage that `host_bytes` per rank take from host memory and back, for every call."""
    return tuple(
        simulate_offload(host_bytes, cluster, num_swaps=sum(count_swaps(kind, workload) for kind in kinds))
        for kinds in demand.calls
    )
