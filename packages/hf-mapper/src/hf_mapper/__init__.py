"""Choose GPUs, placement and parallelism for an RLHF dataflow: on a laptop, in seconds, with the reasons.

```python
from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu, map_dataflow
from hf_protocols import Dataflow, ModelShape

shape = ModelShape.preset("llama-2-13b")
machine = MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=2)
plan = map_dataflow(
    Dataflow.preset("ppo"),
    {role: shape for role in ("actor", "critic", "reference", "reward")},
    ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9),
    WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8),
)
```

What must not live here: torch, processes, and the names of an algorithm's methods or columns.
"""

from __future__ import annotations

from hf_mapper.adapters import AdapterSpec, count_adapter_parameters
from hf_mapper.config import MapperConfig, read_config
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.explain.alternatives import Alternative
from hf_mapper.explain.bottlenecks import Bottleneck, Extension
from hf_mapper.explain.explanation import Explanation, explain_plan
from hf_mapper.explain.memory_tolerance import MemoryTolerance
from hf_mapper.explain.page import build_page
from hf_mapper.explain.reasons import render_explanation
from hf_mapper.explain.report import (
    render_calibration,
    render_errors,
    render_plan,
    render_simulation,
    render_stage_errors,
)
from hf_mapper.explain.robustness import Tolerance
from hf_mapper.measurements.calibration import Calibration, GroupError, calibrate_folder
from hf_mapper.measurements.traces import (
    StageCase,
    StageError,
    TraceConstants,
    calibrate_traces,
    read_stages,
    validate_trace,
)
from hf_mapper.measurements.validation import SourceErrors, SweepErrors, build_report, validate_folder
from hf_mapper.search.exact_search import compute_cost, map_dataflow
from hf_mapper.search.feasibility import find_smallest_cluster, is_feasible
from hf_mapper.search.placements import PoolRequest, Slots, pack, set_partitions
from hf_mapper.search.simulation import (
    CallEstimate,
    PoolChoice,
    Simulation,
    parse_placement,
    read_placement,
    simulate_placement,
)
from hf_mapper.simulators import (
    Estimate,
    estimate_memory,
    simulate_generation,
    simulate_inference,
    simulate_training,
)
from hf_mapper.software import EngineSpec, SoftwareSpec
from hf_mapper.specs import (
    HOST_KIND,
    ClusterSpec,
    GpuSpec,
    MachineSpec,
    WorkloadSpec,
    gpu,
    host_gpu,
    known_gpus,
)

__all__ = [
    "HOST_KIND",
    "AdapterSpec",
    "Alternative",
    "Bottleneck",
    "Calibration",
    "CallEstimate",
    "ClusterSpec",
    "EfficiencySpec",
    "EngineSpec",
    "Estimate",
    "Explanation",
    "Extension",
    "GpuSpec",
    "GroupError",
    "MachineSpec",
    "MapperConfig",
    "MemoryTolerance",
    "PoolChoice",
    "PoolRequest",
    "Simulation",
    "Slots",
    "SoftwareSpec",
    "SourceErrors",
    "StageCase",
    "StageError",
    "SweepErrors",
    "Tolerance",
    "TraceConstants",
    "WorkloadSpec",
    "build_page",
    "build_report",
    "calibrate_folder",
    "calibrate_traces",
    "compute_cost",
    "count_adapter_parameters",
    "estimate_memory",
    "explain_plan",
    "find_smallest_cluster",
    "gpu",
    "host_gpu",
    "is_feasible",
    "known_gpus",
    "map_dataflow",
    "pack",
    "parse_placement",
    "read_config",
    "read_placement",
    "read_stages",
    "render_calibration",
    "render_errors",
    "render_explanation",
    "render_plan",
    "render_simulation",
    "render_stage_errors",
    "set_partitions",
    "simulate_generation",
    "simulate_inference",
    "simulate_placement",
    "simulate_training",
    "validate_folder",
    "validate_trace",
]
