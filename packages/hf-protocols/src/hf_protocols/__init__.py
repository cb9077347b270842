"""Contracts and pure arithmetic of HybridFlow: topologies, transfer protocols, model shapes, dataflows and plans.

Only the standard library is imported.
What must not live here: tensors, processes, and what needs another library.
"""

from __future__ import annotations

from hf_protocols.dataflow import CallKind, Dataflow, ModelCall
from hf_protocols.errors import (
    BackendError,
    BackendUnavailableError,
    BatchError,
    ConfigError,
    DataError,
    HybridFlowError,
    ModelError,
    NonFiniteLossError,
    PlanError,
    PoolError,
    ProtocolError,
    ReshardError,
    RewardError,
    StateError,
    TopologyError,
    WorkerError,
    WorkerTimeoutError,
)
from hf_protocols.estimates import (
    AdapterEstimate,
    ModelEstimate,
    PlanEstimates,
    PoolEstimate,
    SearchEstimate,
    StageEstimate,
)
from hf_protocols.machine import MachineLimits, read_machine_limits
from hf_protocols.metrics import merge_metrics
from hf_protocols.models import ModelShape
from hf_protocols.plan import SCHEMA_VERSION, MachinePlan, MappingPlan, ModelPlan, PoolPlan, load_plan
from hf_protocols.remote import FROM_ARGUMENT, MethodSpec, method_spec, register, registered_methods
from hf_protocols.selection import RowSelection, split_rows
from hf_protocols.standard import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
)
from hf_protocols.topology import Axis, Coordinate, GenerationSpec, Grouping, Order, ParallelSpec, Topology
from hf_protocols.transfer import (
    Collection,
    PerRank,
    Piece,
    Route,
    RowIndex,
    TransferProtocol,
    compute_held_rows,
    route,
)
from hf_protocols.transition import TransitionCost, compute_transition_cost

__all__ = [
    "ALL_TO_ALL",
    "DP",
    "FROM_ARGUMENT",
    "ONE_TO_ALL",
    "RANK_ZERO",
    "SCHEMA_VERSION",
    "THREE_D",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_AS_DP",
    "THREE_D_PP_ONLY",
    "AdapterEstimate",
    "Axis",
    "BackendError",
    "BackendUnavailableError",
    "BatchError",
    "CallKind",
    "Collection",
    "ConfigError",
    "Coordinate",
    "DataError",
    "Dataflow",
    "GenerationSpec",
    "Grouping",
    "HybridFlowError",
    "MachineLimits",
    "MachinePlan",
    "MappingPlan",
    "MethodSpec",
    "ModelCall",
    "ModelError",
    "ModelEstimate",
    "ModelPlan",
    "ModelShape",
    "NonFiniteLossError",
    "Order",
    "ParallelSpec",
    "PerRank",
    "Piece",
    "PlanError",
    "PlanEstimates",
    "PoolError",
    "PoolEstimate",
    "PoolPlan",
    "ProtocolError",
    "ReshardError",
    "RewardError",
    "Route",
    "RowIndex",
    "RowSelection",
    "SearchEstimate",
    "StageEstimate",
    "StateError",
    "Topology",
    "TopologyError",
    "TransferProtocol",
    "TransitionCost",
    "WorkerError",
    "WorkerTimeoutError",
    "compute_held_rows",
    "compute_transition_cost",
    "load_plan",
    "merge_metrics",
    "method_spec",
    "read_machine_limits",
    "register",
    "registered_methods",
    "route",
    "split_rows",
]
