"""Rows of a batch between models, and models between their devices and the host (the paper's cost has neither).

Every call fetches the columns that it reads and leaves those that it writes; where its rows come from and where they go
depends on other models' pools. So that each model's cost stays its own, a transfer is charged as two terms. The
producer hands its columns to the host and, where the cluster has a network, to the network once. The consumer takes
what each of its ranks reads from there. Where both are on one machine this is too much, by what the network takes.

An offloaded model rests in host memory and is on its devices during its own calls only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelCall
from hf_protocols.columns import find_column_size

__all__ = ["CallRows", "count_call_rows", "simulate_offload", "simulate_transfer"]


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """Bytes of all rows that a call reads and writes in an iteration, each row counted once."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0


def count_call_rows(call: ModelCall, workload: WorkloadSpec) -> CallRows:
    """Bytes that `call` reads and writes; 0 for a function, whose host slot is not part of the search.

    Columns have the sizes of `hf_protocols.columns`, at the mean lengths where lengths vary. Generation reads prompts,
    training every sequence once in each epoch.
    """
    if call.kind == "function":
        return CallRows()
    typical = workload.typical
    lengths = {"prompt_tokens": typical.prompt_tokens, "response_tokens": typical.response_tokens}
    reads, writes = (
        sum(find_column_size(name).count_bytes(**lengths) for name in names) for names in (call.reads, call.writes)
    )
    rows_read = workload.global_batch if call.kind == "generation" else workload.num_sequences
    epochs = workload.epochs if call.kind == "training" else 1
    return CallRows(read_bytes=float(epochs * rows_read * reads), written_bytes=float(workload.num_sequences * writes))


def simulate_transfer(rows: CallRows, cluster: ClusterSpec, *, num_ranks: int, num_shares: int) -> float:
    """Seconds to bring a call's rows to `num_ranks` ranks and its results away.

    The rows are split into `num_shares`: every rank reads one share, `num_ranks / num_shares` ranks the same one, and
    one of these writes. A rank moves its bytes over its link to the host, a machine those of all its ranks over its
    network, where the cluster has one.
    """
    machine = cluster.machine
    read, written = rows.read_bytes / num_shares, rows.written_bytes / num_shares
    seconds = (read + written) / (machine.gpu.host_bandwidth_bytes_per_s * cluster.link_efficiency)
    if cluster.inter_bandwidth_bytes_per_s is None:
        return seconds
    ranks = min(num_ranks, machine.num_gpus)
    moved = ranks * (read + written * num_shares / num_ranks)
    hops = (read > 0) + (written > 0)
    return (
        seconds
        + moved / (cluster.inter_bandwidth_bytes_per_s * cluster.link_efficiency)
        + hops * cluster.inter_latency_s
    )


def simulate_offload(state_bytes: float, cluster: ClusterSpec, *, num_swaps: int) -> float:
    """Seconds to bring `state_bytes` per rank from host memory and back, `num_swaps` times."""
    speed = cluster.machine.gpu.host_bandwidth_bytes_per_s * cluster.link_efficiency
    return num_swaps * 2 * state_bytes / speed
