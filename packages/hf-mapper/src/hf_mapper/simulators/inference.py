"""One forward pass over the batch by the model's training stack: compute-bound (paper, Appendix C).

Log-probabilities and values come from the model as it is trained, not from a generation engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hf_mapper.simulators.estimate import Estimate, build_estimate
from hf_mapper.simulators.layouts import check_layouts, read_layouts
from hf_mapper.simulators.memory import inference_work_bytes
from hf_mapper.simulators.passes import simulate_passes
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["simulate_inference"]


@overload
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    backend: str | None = None,
) -> Estimate[float]: ...
@overload
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[NDArray[np.float64]]: ...
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec | Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[Any]:
    """One forward pass over every sequence of the iteration, micro-batch after micro-batch through the pipeline.

    Where lengths vary, as of typical sequences.
    """
    layouts = read_layouts(model, parallel, backend)
    sequences = workload.num_sequences
    check_layouts(model, layouts, cluster, chunks=workload.pipeline_chunks, sequences=sequences)
    work_bytes = inference_work_bytes(model, layouts, workload)
    workload = workload.typical
    local = sequences // layouts.dp_size
    parts = simulate_passes(model, cluster, layouts, workload, local, trains=False)
    return build_estimate(parallel, latency_s=sum(parts.values()), memory_bytes=work_bytes, breakdown=parts)
