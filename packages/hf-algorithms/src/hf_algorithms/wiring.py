"""From a configuration and a plan to worker groups and sampling, for a run and for the walk over its calls."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.replay import Recorder, build_recording_worker
from hf_algorithms.roles import Roles
from hf_algorithms.users_code import describe_raised
from hf_algorithms.workers import EVALUATED, RoleSetup
from hf_controller import WorkerSpec, build_pools
from hf_engine import SamplingParams
from hf_protocols import ConfigError, ParallelSpec, Topology, read_machine_limits
from hf_protocols.foreign_code import raised_as
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.preflight.inputs import ModelInputs
    from hf_controller import Executor, Worker
    from hf_protocols import MappingPlan

__all__ = ["build_roles", "build_sampling"]


def build_roles(
    executor: Executor,
    config: Config,
    plan: MappingPlan,
    inputs: ModelInputs,
    search_path: Sequence[str],
    *,
    failed: Collection[int] = (),
) -> Roles:
    """The worker groups of every pool; models that share a pool share one process per slot.

    Args:
        failed: iterations whose calls are recorded while they run.

    Raises:
        HybridFlowError: for roles that do not fit their pool or one another, or what a worker's constructor raised.
    """
    groups = {}
    environment = _share_cores(config, plan)
    for name, pool in build_pools(plan).items():
        specs = {
            role: _build_spec(role, config, plan, inputs, search_path, failed, environment)
            for role in plan.roles_of(name)
        }
        groups.update(executor.build_groups(pool, specs, fused=len(specs) > 1, wait=False))
    executor.wait_until_ready()
    unscored = () if config.reward.evaluates_model else EVALUATED
    return Roles(groups, config.recipe.scorers, unscored, config.recipe.played)


def build_sampling(config: Config, *, stop_ids: tuple[int, ...], step: int) -> SamplingParams:
    """Returns the sampling of responses in iteration `step` (0: evaluations). Responses end at any of `stop_ids`.

    Raises:
        ConfigError: for a value out of range.
    """
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        stop_strings=rollout.stop,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        n=rollout.samples_per_prompt,
        stop_token_ids=stop_ids,
        seed=config.run.seed,
        step=step,
    )


def _build_spec(
    role: str,
    config: Config,
    plan: MappingPlan,
    inputs: ModelInputs,
    search_path: Sequence[str],
    failed: Collection[int],
    environment: Mapping[str, str],
) -> WorkerSpec:
    declared, placed = config.recipe.role(role), plan.models[role]
    worker = declared.load_worker()
    model = inputs.models.get(role, inputs.model)
    setup = RoleSetup(
        role=role, config=config, placed=placed, model=model, stop_ids=inputs.stop_ids, search_path=search_path
    )
    kwargs = {**_configure(worker, setup), **declared.kwargs}
    _refuse_missing(worker, kwargs, role)
    recorder = Recorder(run=str(Path(config.run.output_dir).resolve()), kwargs=dict(kwargs))
    if getattr(worker, "records_updates", False) and _takes_recorder(worker):
        kwargs["recorder"] = recorder
    if failed:
        worker = build_recording_worker(worker, recorder, failed)
    topology = Topology(placed.train or ParallelSpec(), placed.generation)
    balances = declared.has_model and config.training.balance_tokens
    return WorkerSpec(
        worker=worker,
        topology=topology,
        kwargs=kwargs,
        seed=config.run.seed,
        environment=environment if declared.has_model else {},
        balance_tokens=balances,
    )


def _configure(worker: type[Worker], setup: RoleSetup) -> Mapping[str, Any]:
    """Returns the arguments that a worker, which may be a user's code, takes from the configuration."""
    configure = getattr(worker, "configure", None)
    if configure is None:
        return {}
    label = f"role {show(setup.role)}: {worker.__name__}.configure"
    with raised_as(lambda error: ConfigError(f"{label} raised {describe_raised(error)}")):
        found: object = configure(setup)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{label} returned {show(found)}. Return a mapping of the constructor's arguments")
    return found


def _refuse_missing(worker: type[Worker], kwargs: Mapping[str, Any], role: str) -> None:
    """Refuses a worker whose constructor needs more than it is given; `WorkerSpec` refuses what it does not take."""
    for name, parameter in islice(signature(worker).parameters.items(), 1, None):
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and name not in kwargs:
            raise ConfigError(
                f"role {show(role)}: {worker.__name__}.__init__ needs {name}. Pass it in kwargs of the role, or return "
                f"it from {worker.__name__}.configure"
            )


def _share_cores(config: Config, plan: MappingPlan) -> dict[str, str]:
    """The variable by which models in pools of their own share a host's cores, which each pool alone would use."""
    declared = {each.name: each for each in config.recipe.roles}
    pools = {placed.pool for role, placed in plan.models.items() if declared[role].has_model}
    is_shared = len(pools) > 1 and config.cluster.gpu == "cpu" and config.cluster.address == "local"
    if not is_shared or "OMP_NUM_THREADS" in os.environ:
        return {}
    num_ranks = sum(pool.num_slots for pool in plan.pools if pool.name in pools)
    return {"OMP_NUM_THREADS": str(max(1, read_machine_limits().num_cpus // num_ranks))}


def _takes_recorder(worker: type[Worker]) -> bool:
    parameters = signature(worker).parameters.values()
    return any(each.name == "recorder" or each.kind is each.VAR_KEYWORD for each in parameters)
