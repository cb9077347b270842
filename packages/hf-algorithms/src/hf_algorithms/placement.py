"""Where a run's models go: the mapper's plan for the configured cluster, and the checks that a batch can follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from hf_algorithms.recipes import RECIPES
from hf_engine import load_rollout_backend
from hf_mapper import HOST_KIND, ClusterSpec, MachineSpec, WorkloadSpec, gpu, host_gpu, map_dataflow
from hf_protocols import ConfigError, Dataflow, MappingPlan, ModelShape, ParallelSpec, PlanError, Topology

if TYPE_CHECKING:
    from hf_algorithms.config import ClusterConfig, Config

__all__ = ["MODEL_ROLES", "check_plan", "plan_placement"]

MODEL_ROLES = ("actor", "critic", "reference")
"""Roles that hold a model; the others call functions."""


def plan_placement(config: Config, shape: ModelShape, *, prompt_tokens: int) -> MappingPlan:
    """The mapper's best plan for the configured algorithm, cluster and workload.

    Args:
        prompt_tokens: longest prompt of the training rows.

    Raises:
        PlanError: if nothing fits.
        ConfigError: for an unknown kind of GPU.
    """
    dataflow = Dataflow.preset(RECIPES[config.algorithm.name].dataflow)
    workload = WorkloadSpec(
        global_batch=config.rollout.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        prompt_tokens=prompt_tokens,
        response_tokens=config.rollout.max_new_tokens,
        epochs=config.algorithm.epochs,
        mini_batches=config.algorithm.mini_batches,
        dtype=config.training.dtype,
        micro_batch_tokens=config.training.micro_batch_tokens,
        largest_generation=load_rollout_backend(config.rollout.backend).largest_generation,
    )
    models = {role: shape for role in dataflow.roles if role in MODEL_ROLES}
    cluster = _describe_cluster(config.cluster)
    return map_dataflow(dataflow, models, cluster, workload, backends=(config.training.backend,))


def check_plan(config: Config, plan: MappingPlan) -> None:
    """A plan must have the algorithm's roles, and every rank a row of every batch.

    Raises:
        PlanError: for a role that is missing or unknown, or a model without a layout.
        ConfigError: naming the batch, the number of ranks and the keys that change either.
    """
    roles = Dataflow.preset(RECIPES[config.algorithm.name].dataflow).roles
    if set(plan.models) != set(roles):
        raise PlanError(
            f"the plan places {', '.join(plan.models)}; {config.algorithm.name} has the roles {', '.join(roles)}: "
            "make the plan anew with hybridflow plan --json"
        )
    layouts = {role: plan.models[role].train for role in roles if role in MODEL_ROLES}
    for role, layout in layouts.items():
        if layout is None:
            raise PlanError(f"the plan gives {role} no layout: set its train to sizes, such as a dp_size")
    rollout = config.rollout
    replicas = Topology(layouts["actor"] or ParallelSpec(), plan.models["actor"].generation).num_gen_replicas
    share = "rollout.batch_size * rollout.samples_per_prompt / algorithm.mini_batches"
    rows = rollout.batch_size * rollout.samples_per_prompt // config.algorithm.mini_batches
    wanted = [("rollout.batch_size", rollout.batch_size, replicas, "generation replicas")]
    wanted += [
        (share, rows, layout.dp_size, f"data-parallel ranks of the {role}")
        for role, layout in layouts.items()
        if layout
    ]
    for name, size, ranks, what in wanted:
        if size < ranks:
            raise ConfigError(
                f"{name} = {size} rows cannot be shared by {ranks} {what}: raise rollout.batch_size, "
                "or lower cluster.gpus_per_machine"
            )


def _describe_cluster(config: ClusterConfig) -> ClusterSpec:
    slots = config.gpus_per_machine
    kind = host_gpu(memory_bytes=psutil.virtual_memory().total // slots) if config.gpu == HOST_KIND else gpu(config.gpu)
    return ClusterSpec(
        machines=(MachineSpec(gpu=kind, num_gpus=slots, num_machines=config.machines),),
        inter_bandwidth_bytes_per_s=config.inter_bandwidth_bytes_per_s,
    )
