"""`[[evaluation]]` of supervised recipes: the trained policy generates on a rollout backend, in its own processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hf_algorithms.preflight.budgets import check_row_cache
from hf_algorithms.preflight.evaluation_sets import check_evaluations, load_evaluation_rows, tokenize_evaluations
from hf_algorithms.preflight.inputs import ModelInputs
from hf_algorithms.preflight.placement import check_rollout_options
from hf_protocols import GenerationSpec

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_protocols import MappingPlan

__all__ = ["list_generation_backends", "prepare_evaluations", "with_generation"]

Inputs = TypeVar("Inputs", bound=ModelInputs)


def list_generation_backends(config: Config) -> dict[str, str]:
    """Returns the rollout backend by its key, for checks of the model; nothing without `[[evaluation]]`."""
    return {"rollout.backend": config.rollout.backend} if config.evaluation else {}


def prepare_evaluations(config: Config, inputs: Inputs, *, search_path: Sequence[str]) -> Inputs:
    """Returns the inputs with the sets of `[[evaluation]]`, after checking options, functions and lengths.

    Args:
        config: the run's.
        inputs: its models; the trained one is `inputs.model`.
        search_path: folders where modules of metrics are looked for first.

    Raises:
        HybridFlowError: for what the run could not use.
    """
    if not config.evaluation:
        return inputs
    check_rollout_options(config.rollout)
    rows = load_evaluation_rows(config)
    check_evaluations(config, rows, search_path=search_path)
    ends = inputs.turns.list_stop_ids(inputs.model.end_ids)
    found = replace(inputs, evaluations=tokenize_evaluations(config, rows, inputs.model, inputs.turns), stop_ids=ends)
    check_row_cache(config.rollout, found)
    return found


def with_generation(config: Config, plan: MappingPlan) -> MappingPlan:
    """Returns the plan in which each rank of the policy that generates holds a whole model while it does.

    Memory of the rollout backend is not in the plan's estimates. A plan that says how it generates stays as it is.
    """
    if not config.evaluation:
        return plan
    trained = config.recipe.roles[0].name
    placed = plan.models[trained]
    if placed.generation is not None:
        return plan
    return replace(plan, models={**plan.models, trained: replace(placed, generation=GenerationSpec())})
