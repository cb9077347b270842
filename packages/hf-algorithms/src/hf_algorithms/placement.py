"""Where a run's models go: the mapper's plan for the configured cluster, and the checks that a batch can follow it."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hf_algorithms.dataflow import derive_dataflow
from hf_algorithms.recipes import RECIPES
from hf_engine import ChecksOptions, SamplingParams, load_rollout_backend
from hf_protocols import (
    BackendError,
    ConfigError,
    Dataflow,
    MappingPlan,
    ModelShape,
    ParallelSpec,
    PlanError,
    Topology,
    read_machine_limits,
)
from hf_protocols.arguments import show
from hf_protocols.similar_names import find_similar

if TYPE_CHECKING:
    from hf_algorithms.config import ClusterConfig, Config, RolloutConfig
    from hf_mapper import ClusterSpec

__all__ = [
    "MODEL_ROLES",
    "check_plan",
    "check_rollout_options",
    "compute_workload",
    "plan_dataflow",
    "plan_placement",
    "require_mapper",
]

MODEL_ROLES = ("actor", "critic", "reference")
"""Roles that hold a model; the others call functions."""


_HOST_KIND = "cpu"


def require_mapper() -> None:
    """Say how to get hf-mapper where it is missing: only making a plan needs it, following one does not.

    Raises:
        PlanError: with the line that installs it.
    """
    try:
        import hf_mapper  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlanError(
            "making a plan needs hf-mapper, which is not installed: pip install hf-mapper, or give a plan that was "
            "made elsewhere with train --plan plan.json"
        ) from error


def check_rollout_options(rollout: RolloutConfig) -> None:
    """Refuse options that the rollout backend does not take on any machine, or takes as another kind.

    What depends on a machine, such as its memory, is seen by the ranks: plans are made elsewhere.

    Raises:
        ConfigError: naming the nearest option that there is, or the kind or the value that is wanted.
    """
    backend = load_rollout_backend(rollout.backend)
    build = backend.build
    kinds: dict[str, Any] = {}
    with suppress(NameError):  # a backend elsewhere may name types that it imports for checkers only
        kinds = get_type_hints(build)
    known = [name for name in inspect.signature(build).parameters if name not in ("model", "topology", "seed")]
    for name, value in rollout.options.items():
        if name not in known:
            near = find_similar(name, known)
            hint = f"did you mean {show(near[0])}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"rollout.options.{name}: backend {show(rollout.backend)} has no such option; {hint}")
        try:
            TypeAdapter(kinds.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"rollout.options.{name} = {show(value)}: {error.errors()[0]['msg']}") from None
    if issubclass(backend, ChecksOptions):
        try:
            backend.check_options(rollout.options)
        except BackendError as error:
            reason = str(error).removeprefix("rollout.options.")
            raise ConfigError(f"rollout.options of backend {show(rollout.backend)}: {reason}") from None


def plan_dataflow(config: Config) -> Dataflow:
    """The dataflow of the configured algorithm on the configured batch, read off its step."""
    rollout = config.rollout
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, n=rollout.samples_per_prompt
    )
    recipe = RECIPES[config.algorithm.name]
    return derive_dataflow(recipe, config.algorithm, sampling, num_prompts=rollout.batch_size)


def plan_placement(config: Config, shape: ModelShape, *, prompt_tokens: int) -> MappingPlan:
    """The mapper's best plan for the configured algorithm, cluster and workload.

    Args:
        prompt_tokens: longest prompt of the training rows.

    Raises:
        PlanError: if nothing fits, or hf-mapper is not installed.
        ConfigError: for an unknown kind of GPU.
    """
    require_mapper()
    from hf_mapper import SoftwareSpec, WorkloadSpec, map_dataflow

    dataflow = plan_dataflow(config)
    workload = WorkloadSpec(
        **compute_workload(config, prompt_tokens=prompt_tokens),
        software=SoftwareSpec(gathers="model" if config.training.shard == "root" else "layer"),
        largest_generation=load_rollout_backend(config.rollout.backend).largest_generation,
    )
    models = {role: shape for role in dataflow.roles if role in MODEL_ROLES}
    cluster = _describe_cluster(config.cluster)
    return map_dataflow(dataflow, models, cluster, workload, backends=(config.training.backend,))


def compute_workload(config: Config, *, prompt_tokens: int) -> dict[str, Any]:
    """One iteration as the mapper counts it: fields of ``hf_mapper.WorkloadSpec``, lengths the longest."""
    return {
        "global_batch": config.rollout.batch_size,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "prompt_tokens": prompt_tokens,
        "response_tokens": config.rollout.max_new_tokens,
        "epochs": config.algorithm.epochs,
        "mini_batches": config.algorithm.mini_batches,
        "dtype": config.training.dtype,
        "micro_batch_tokens": config.training.micro_batch_tokens,
        "recompute": "none",  # workers keep all activations
    }


def check_plan(config: Config, plan: MappingPlan) -> None:
    """A plan must have the algorithm's roles, fit the cluster, and give every rank a row of every batch.

    Raises:
        PlanError: for a role that is missing or unknown, a model without a layout, or machines that the cluster does
            not have.
        ConfigError: naming the batch, the number of ranks and the keys that change either.
    """
    roles = plan_dataflow(config).roles
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
    _check_machines(config.cluster, plan)


def _check_machines(config: ClusterConfig, plan: MappingPlan) -> None:
    """The models' pools must be of the cluster's kind, and together no larger; functions have slots beside it."""
    names = dict.fromkeys(plan.models[role].pool for role in plan.models if role in MODEL_ROLES)
    pools = [plan.pool(name) for name in names]
    given = f"{config.machines} x {config.gpus_per_machine} {config.gpu}"
    kinds = dict.fromkeys(machine.gpu_kind for pool in pools for machine in pool.machines)
    if len(kinds) > 1:
        raise PlanError(
            f"the plan's models are on {' and '.join(kinds)}, the cluster has {given}: a run is on one kind of device, "
            "Ray does not tell kinds apart; make a plan for the machines of one kind"
        )
    for pool in pools:
        for machine in pool.machines:
            if machine.gpu_kind != config.gpu or machine.slots > config.gpus_per_machine:
                raise PlanError(
                    f"pool {show(pool.name)} of the plan wants {machine.slots} slots of {machine.gpu_kind} on a "
                    "machine, "
                    f"the cluster has {given}: change cluster.gpu or cluster.gpus_per_machine, or make the plan anew"
                )
    wanted, available = sum(pool.num_slots for pool in pools), config.machines * config.gpus_per_machine
    if wanted > available:
        raise PlanError(
            f"the plan's models want {' + '.join(str(pool.num_slots) for pool in pools)} = {wanted} slots, the cluster "
            f"has {given} = {available}: raise cluster.machines or cluster.gpus_per_machine, or make the plan anew"
        )


def _describe_cluster(config: ClusterConfig) -> ClusterSpec:
    from hf_mapper import ClusterSpec, MachineSpec, gpu, host_gpu

    slots = config.gpus_per_machine
    of_host = config.gpu == _HOST_KIND
    kind = host_gpu(memory_bytes=read_machine_limits().memory_bytes // slots) if of_host else gpu(config.gpu)
    return ClusterSpec(
        machines=(MachineSpec(gpu=kind, num_gpus=slots, num_machines=config.machines),),
        inter_bandwidth_bytes_per_s=config.inter_bandwidth_bytes_per_s,
    )
