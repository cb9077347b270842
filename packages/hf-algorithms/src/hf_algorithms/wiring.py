"""From a configuration and a plan to worker groups and sampling, for a run and for the walk over its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.placement import MODEL_ROLES
from hf_algorithms.roles import Roles
from hf_algorithms.workers import ROLE_WORKERS
from hf_controller import WorkerSpec, build_pools
from hf_engine import SamplingParams, TrainConfig
from hf_protocols import ParallelSpec, Topology

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.initial_model import InitialModel
    from hf_controller import Executor
    from hf_protocols import MappingPlan

__all__ = ["build_roles", "build_sampling"]


def build_roles(
    executor: Executor, config: Config, plan: MappingPlan, model: InitialModel, search_path: Sequence[str]
) -> Roles:
    """The worker groups of every pool; models that share a pool share one process per slot.

    Raises:
        HybridFlowError: for roles that do not fit their pool or one another, or what a worker's constructor raised.
    """
    groups = {}
    for name, pool in build_pools(plan).items():
        specs = {role: _build_spec(role, config, plan, model, search_path) for role in plan.roles_of(name)}
        groups.update(executor.build_groups(pool, specs, fused=len(specs) > 1, wait=False))
    executor.wait_until_ready()
    return Roles(groups)


def build_sampling(config: Config, *, end_token_id: int, step: int) -> SamplingParams:
    """How responses are drawn in iteration ``step``; evaluations are step 0.

    Raises:
        ConfigError: for a value out of range.
    """
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        n=rollout.samples_per_prompt,
        stop_token_ids=(end_token_id,),
        seed=config.run.seed,
        step=step,
    )


def _build_spec(
    role: str, config: Config, plan: MappingPlan, model: InitialModel, search_path: Sequence[str]
) -> WorkerSpec:
    placed = plan.models[role]
    kwargs: dict[str, Any] = {}
    if role in MODEL_ROLES:
        rate = config.optimizer.critic_learning_rate if role == "critic" else config.optimizer.actor_learning_rate
        kwargs = {
            "model": model.path,
            "backend": placed.backend,
            "offload": placed.offload,
            "training": TrainConfig(
                learning_rate=rate,
                betas=config.optimizer.betas,
                weight_decay=config.optimizer.weight_decay,
                max_grad_norm=config.optimizer.max_grad_norm,
                warmup_steps=config.optimizer.warmup_steps,
                micro_batch_tokens=placed.micro_batch_tokens,
                dtype=config.training.dtype,
                shard=config.training.shard,
            ),
        }
    if role == "actor":
        kwargs |= {"rollout": config.rollout.backend, "rollout_options": config.rollout.options}
    if role == "reward":
        kwargs = {
            "tokenizer": model.tokenizer_path,
            "function": config.reward.function,
            "metric": config.reward.metric,
            "search_path": list(search_path),
        }
    topology = Topology(placed.train or ParallelSpec(), placed.generation)
    return WorkerSpec(worker=ROLE_WORKERS[role], topology=topology, kwargs=kwargs, seed=config.run.seed)
