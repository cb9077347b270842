"""Placement of a run's models: the mapper's plan for the configured cluster, and checks that a run can follow it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hf_algorithms.dataflow import derive_dataflow
from hf_algorithms.preflight.calibration import choose_ranks, read_calibration
from hf_algorithms.recipes import SupervisedRecipe
from hf_engine import SamplingParams, SupportsLayoutCheck, SupportsOptionCheck, load_rollout_backend, load_train_backend
from hf_protocols import (
    BackendError,
    ConfigError,
    Dataflow,
    GenerationSpec,
    MappingPlan,
    ModelPlan,
    ModelShape,
    PlanError,
    read_machine_limits,
)
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config, RolloutConfig
    from hf_mapper import ClusterSpec

__all__ = [
    "check_backend_options",
    "check_batches",
    "check_plan",
    "check_rollout_options",
    "check_train_backends",
    "compute_workload",
    "describe_attention",
    "plan_dataflow",
    "plan_placement",
    "require_mapper",
]

_HOST_KIND = "cpu"
_USUAL_SLOTS = 2
"""Of a machine whose number is not given."""


def require_mapper() -> None:
    """Says how to get hf-mapper where it is missing: only making a plan needs it, following one does not.

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


def check_batches(config: Config) -> None:
    """Refuses sizes of the configuration that contradict one another.

    Raises:
        ConfigError: with a line for every contradiction.
    """
    rollout, algorithm, warm_start = config.rollout, config.algorithm, config.warm_start
    problems = []
    samples = rollout.batch_size * rollout.samples_per_prompt
    if algorithm.keeps_groups and rollout.batch_size % algorithm.mini_batches:
        problems.append(
            f"algorithm.mini_batches = {algorithm.mini_batches} must divide rollout.batch_size = {rollout.batch_size}: "
            f"with algorithm.name = {show(algorithm.name)} and its aggregation a mini-batch holds all responses to a "
            "prompt. Change one of the two"
        )
    elif samples % algorithm.mini_batches:
        problems.append(
            f"algorithm.mini_batches = {algorithm.mini_batches} must divide rollout.batch_size * "
            f"rollout.samples_per_prompt = {samples}. Change one of the three"
        )
    each = rollout.samples_per_prompt
    compares = getattr(algorithm, "group_of_one", "error") == "error"
    if compares and each < algorithm.least_samples:
        problems.append(
            f"rollout.samples_per_prompt = {each}: {algorithm.name} compares the responses to one prompt and needs at "
            f"least {algorithm.least_samples}. Raise it"
        )
    problems += _find_idle_groups(config)
    if algorithm.most_samples is not None and each > algorithm.most_samples:
        problems.append(
            f"rollout.samples_per_prompt = {each}: {algorithm.name} takes at most {algorithm.most_samples}. Lower it"
        )
    if warm_start.max_steps and (generator := _find_generator_without_model(config)) is not None:
        problems.append(
            f"warm_start.max_steps = {warm_start.max_steps}: the role {generator} of {algorithm.name} generates and "
            "holds no model that could be trained. Set warm_start.max_steps = 0, or declare the role with has_model"
        )
    if warm_start.max_steps and warm_start.stop_at is not None and warm_start.stop_at > warm_start.fail_above:
        problems.append(
            f"warm_start.stop_at = {warm_start.stop_at} is above warm_start.fail_above = {warm_start.fail_above}: "
            "the evaluation that stops the warm start would fail it. Lower stop_at, or raise fail_above"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _find_idle_groups(config: Config) -> Iterator[str]:
    """Yields a line where every advantage is 0 and no other term of the loss would train."""
    algorithm, each = config.algorithm, config.rollout.samples_per_prompt
    is_zero = getattr(algorithm, "group_of_one", None) == "zero" and each == 1
    trains = getattr(algorithm, "needs_reference", False) or getattr(algorithm, "entropy_coefficient", 0.0) > 0
    if is_zero and not trains:
        yield (
            "algorithm.group_of_one = 'zero': with rollout.samples_per_prompt = 1 every advantage is 0 and nothing is "
            f"trained. Raise samples_per_prompt to at least {algorithm.least_samples}, or use group_of_one = 'raw'"
        )


def _find_generator_without_model(config: Config) -> str | None:
    """The role that generates, if it is not one with a model."""
    for role in config.recipe.roles:
        if hasattr(role.load_worker(), "generate_sequences"):
            return None if role.has_model else role.name
    return None


_GIVEN_BY_RUN = ("lora", "model", "seed", "topology")
"""Arguments of a rollout backend's `build` that are not options of the user's."""


def check_train_backends(config: Config, plan: MappingPlan | None) -> None:
    """Refuses training backends that do not exist, or whose library is missing, and attention without a backward pass.

    Raises:
        BackendError: naming those that are installed, or the line that installs the library.
        ConfigError: for FlexAttention on a CPU.
    """
    if config.training.attn_implementation == "flex_attention" and config.cluster.gpu == _HOST_KIND:
        raise ConfigError(
            "training.attn_implementation = 'flex_attention': torch's function has no backward pass on a CPU, and "
            "cluster.gpu = 'cpu'. Use 'auto'"
        )
    if plan is None:
        names = {name: key for key, name in map(config.train_backend, config.recipe.model_roles)}
    else:
        names = {plan.models[role].backend: "training.backend" for role in _models_of(config, plan)}
    for name, key in names.items():
        try:
            load_train_backend(name)
        except BackendError as error:
            raise type(error)(f"{key} = {show(name)}: {error}") from None


def check_rollout_options(rollout: RolloutConfig) -> None:
    """Refuses options that the rollout backend does not take on any machine, or takes as another kind.

    What depends on a machine, such as its memory, is seen by the ranks: plans are made elsewhere.

    Raises:
        ConfigError: naming the nearest option that there is, or the kind or the value that is wanted.
    """
    check_backend_options(rollout.backend, rollout.options, key="rollout.backend", options_key="rollout.options")


def check_backend_options(name: str, options: Mapping[str, Any], *, key: str, options_key: str) -> None:
    """As `check_rollout_options`, with the user's names of the backend and of its options."""
    try:
        backend = load_rollout_backend(name)
    except BackendError as error:
        raise type(error)(f"{key} = {show(name)}: {error}") from None
    build = backend.build
    kinds: dict[str, Any] = {}
    with suppress(NameError):  # a backend elsewhere may name types that it imports for checkers only
        kinds = get_type_hints(build)
    known = [each for each in inspect.signature(build).parameters if each not in _GIVEN_BY_RUN]
    for option, value in options.items():
        if option not in known:
            near = find_similar(option, known)
            hint = f"did you mean {show(near[0])}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"{options_key}.{option}: backend {show(name)} has no such option; {hint}")
        try:
            TypeAdapter(kinds.get(option, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{options_key}.{option} = {show(value)}: {error.errors()[0]['msg']}") from None
    if issubclass(backend, SupportsOptionCheck):
        try:
            backend.check_options(options)
        except BackendError as error:
            reason = str(error).removeprefix("rollout.options.")
            raise ConfigError(f"{options_key} of backend {show(name)}: {reason}") from None


def plan_dataflow(config: Config) -> Dataflow:
    """The dataflow of the configured algorithm on the configured batch, read off its step."""
    rollout, recipe = config.rollout, config.recipe
    if isinstance(recipe, SupervisedRecipe):
        algorithm: Any = config.algorithm
        nothing = SamplingParams(max_new_tokens=1)
        return derive_dataflow(recipe, algorithm, nothing, num_prompts=algorithm.batch_size, columns=recipe.columns)
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, n=rollout.samples_per_prompt
    )
    return derive_dataflow(config.recipe, config.algorithm, sampling, num_prompts=rollout.batch_size)


def plan_placement(
    config: Config,
    shapes: Mapping[str, ModelShape],
    *,
    prompt_tokens: int,
    response_tokens: int | None = None,
    sends: Literal["both", "adapters", "merged"] = "both",
) -> MappingPlan:
    """The mapper's best plan for the configured algorithm, cluster and workload.

    Args:
        config: the run's.
        shapes: of the roles that hold a model, by role.
        prompt_tokens: longest prompt of the training rows.
        response_tokens: longest response of supervised rows; None: `rollout.max_new_tokens`.
        sends: what reaches the sampler where adapters are trained; see `AdapterSpec`.

    Raises:
        PlanError: if nothing fits, or hf-mapper is not installed.
        ConfigError: for an unknown kind of GPU, or a calibration of the host that cannot be read.
    """
    require_mapper()
    from hf_mapper import AdapterSpec, SoftwareSpec, WorkloadSpec, map_dataflow

    lora = config.model.lora
    dataflow = plan_dataflow(config)
    workload = WorkloadSpec(
        **compute_workload(config, prompt_tokens=prompt_tokens, response_tokens=response_tokens),
        software=SoftwareSpec(gathers="model" if config.training.shard == "root" else "layer"),
        largest_generation=load_rollout_backend(config.rollout.backend).largest_generation,
        adapters=None if lora is None else AdapterSpec(rank=lora.rank, targets=lora.targets or (), sends=sends),
    )
    models = describe_attention(config, {role: shapes[role] for role in dataflow.roles if role in shapes})
    backends = {role: (config.train_backend(role)[1],) for role in models}
    return map_dataflow(dataflow, models, _describe_cluster(config, models.values()), workload, backends=backends)


def describe_attention(config: Config, shapes: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """The shapes of models, by role, whose attention is computed by `training.attn_implementation`."""
    function = config.training.attn_implementation
    if function == "auto":
        return dict(shapes)
    return {role: replace(shape, keeps_scores=function == "eager") for role, shape in shapes.items()}


def compute_workload(config: Config, *, prompt_tokens: int, response_tokens: int | None = None) -> dict[str, Any]:
    """Returns the fields of `hf_mapper.WorkloadSpec` for one iteration; its lengths are the longest."""
    rollout, recipe = config.rollout, config.recipe
    rows, sequences = rollout.batch_size, rollout.samples_per_prompt
    if isinstance(recipe, SupervisedRecipe):
        rows, sequences = cast("Any", config.algorithm).batch_size, recipe.sequences_per_row
    return {
        "global_batch": rows,
        "samples_per_prompt": sequences,
        "prompt_tokens": prompt_tokens,
        "response_tokens": rollout.max_new_tokens if response_tokens is None else response_tokens,
        "epochs": config.algorithm.epochs,
        "mini_batches": config.algorithm.mini_batches,
        "dtype": config.training.dtype,
        "micro_batch_tokens": config.training.micro_batch_tokens,
        "recompute": "full" if config.training.activation_checkpointing else "none",
    }


def check_plan(config: Config, plan: MappingPlan, shapes: Mapping[str, ModelShape]) -> None:
    """A plan must have the algorithm's roles, layouts that the backends run, and fit the cluster.

    Args:
        config: the run's.
        plan: where the models go.
        shapes: of the roles that hold a model, by role.

    Raises:
        PlanError: for a role that is missing or unknown, a model without a layout or with one that cannot run, or
            machines that the cluster does not have.
    """
    roles = plan_dataflow(config).roles
    if set(plan.models) != set(roles):
        raise PlanError(
            f"the plan places {', '.join(plan.models)}; {config.algorithm.name} has the roles {', '.join(roles)}. "
            "Make the plan again with hybridflow plan --json"
        )
    for role in _models_of(config, plan):
        _check_backend(config, role, plan.models[role].backend)
        _check_layout(role, plan.models[role], shapes[role])
        _check_generation(role, config.rollout, plan.models[role].generation or GenerationSpec())
    if config.run.executor == "in_process":
        _check_one_rank(plan)
    _check_machines(config, plan)


def _models_of(config: Config, plan: MappingPlan) -> list[str]:
    return [role for role in plan.models if role in config.recipe.model_roles]


def _check_backend(config: Config, role: str, planned: str) -> None:
    """A plan may choose another backend than `[training]`, not another one than the role's own key."""
    key, given = config.train_backend(role)
    if key != "training.backend" and planned != given:
        raise PlanError(
            f"{key} = {show(given)}: the plan runs {role} on {show(planned)}. Remove the key, or make the plan again "
            "with hybridflow plan --json"
        )


def _check_layout(role: str, model: ModelPlan, shape: ModelShape) -> None:
    if model.train is None:
        raise PlanError(f"the plan gives {role} no layout. Set its train to sizes, such as a dp_size")
    backend = load_train_backend(model.backend)
    if issubclass(backend, SupportsLayoutCheck):
        try:
            backend.check_layout(model.train, shape)
        except BackendError as error:
            raise PlanError(f"the plan's layout of {role}: {error}") from None


def _check_generation(role: str, rollout: RolloutConfig, sizes: GenerationSpec) -> None:
    largest = load_rollout_backend(rollout.backend).largest_generation
    if largest and (sizes.gen_pp_size > largest.gen_pp_size or sizes.gen_tp_size > largest.gen_tp_size):
        raise PlanError(
            f"the plan's {role} generates with gen_pp_size={sizes.gen_pp_size}, gen_tp_size={sizes.gen_tp_size}; "
            f"rollout.backend = {show(rollout.backend)} runs at most {largest.gen_pp_size} and {largest.gen_tp_size}. "
            "Choose another backend, or make the plan again with hybridflow plan --json"
        )


def _check_one_rank(plan: MappingPlan) -> None:
    for role, model in plan.models.items():
        ranks = plan.pool(model.pool).num_slots
        if ranks > 1:
            raise PlanError(
                f"run.executor = 'in_process' runs one rank, in the program itself; the plan gives {role} {ranks} "
                "ranks. Set run.executor to 'ray', or make a plan for one rank with hybridflow plan --json"
            )


def _count_slots(config: Config) -> tuple[int, int]:
    """Machines, and slots of each; one of each for an in-process run."""
    if config.run.executor == "in_process":
        return 1, 1
    return config.cluster.machines, config.cluster.gpus_per_machine or _USUAL_SLOTS


def _choose_slots(config: Config, shapes: Iterable[ModelShape]) -> tuple[int, int]:
    """Those of `_count_slots`; where the slots of a host are not given, as many as its calibration found faster."""
    machines, slots = _count_slots(config)
    if config.cluster.gpus_per_machine is None and config.cluster.gpu == _HOST_KIND and slots > 1:
        timings = read_calibration(num_cores=read_machine_limits().num_cpus)
        slots = choose_ranks(timings, max(each.num_parameters for each in shapes)) or slots
    return machines, slots


def _check_machines(config: Config, plan: MappingPlan) -> None:
    """Refuses models' pools with devices of another kind than the cluster's, or more of them than the cluster has."""
    names = dict.fromkeys(plan.models[role].pool for role in _models_of(config, plan))
    pools = [plan.pool(name) for name in names]
    (machines, slots), kind = _count_slots(config), config.cluster.gpu
    given = f"{machines} x {slots} {kind}"
    kinds = dict.fromkeys(machine.gpu_kind for pool in pools for machine in pool.machines)
    if len(kinds) > 1:
        raise PlanError(
            f"the plan's models are on {' and '.join(kinds)}, the cluster has {given}: a run is on one kind of device, "
            "and Ray does not distinguish kinds. Make a plan for the machines of one kind"
        )
    for pool in pools:
        for machine in pool.machines:
            if machine.gpu_kind != kind or machine.slots > slots:
                raise PlanError(
                    f"pool {show(pool.name)} of the plan wants {machine.slots} slots of {machine.gpu_kind} on a "
                    "machine, "
                    f"the cluster has {given}. Change cluster.gpu or cluster.gpus_per_machine, or make the plan again"
                )
    wanted, available = sum(pool.num_slots for pool in pools), machines * slots
    if wanted > available and config.run.executor == "ray":
        raise PlanError(
            f"the plan's models want {' + '.join(str(pool.num_slots) for pool in pools)} = {wanted} slots, the cluster "
            f"has {given} = {available}. Raise cluster.machines or cluster.gpus_per_machine, or make the plan again"
        )


def _describe_cluster(config: Config, shapes: Iterable[ModelShape]) -> ClusterSpec:
    from hf_mapper import ClusterSpec, MachineSpec, gpu, host_gpu

    (machines, slots), kind = _choose_slots(config, shapes), config.cluster.gpu
    try:
        device = host_gpu(memory_bytes=read_machine_limits().memory_bytes // slots) if kind == _HOST_KIND else gpu(kind)
    except ConfigError as error:
        raise ConfigError(f"cluster.gpu = {show(kind)}: {error}, or 'cpu' for host processes") from None
    return ClusterSpec(
        machines=(MachineSpec(gpu=device, num_gpus=slots, num_machines=machines),),
        inter_bandwidth_bytes_per_s=config.cluster.inter_bandwidth_bytes_per_s,
    )
