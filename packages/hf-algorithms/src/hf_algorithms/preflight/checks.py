"""Checks a run before anything starts: reads every input and walks every call that the run will make.

`hybridflow plan` and `train` ask the same function, `check_run`. It touches nothing but the folder that it is given,
and its error names every problem that it found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_algorithms.models.adapters import MERGED_MODELS, check_adapters, merge_given_adapters
from hf_algorithms.models.sampler_adapters import find_sent
from hf_algorithms.preflight.budgets import check_blocks, check_cache, check_calls, check_context, check_scorers
from hf_algorithms.preflight.evaluation_sets import check_evaluations, load_evaluation_rows, tokenize_evaluations
from hf_algorithms.preflight.inputs import DATA_SETS, RunInputs, load_model, load_row_sets, tokenize_inputs
from hf_algorithms.preflight.placement import (
    check_batches,
    check_plan,
    check_rollout_options,
    check_train_backends,
    plan_placement,
)
from hf_algorithms.preflight.reward_functions import check_rewards
from hf_algorithms.preflight.walk import walk_calls
from hf_protocols import ConfigError, HybridFlowError

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.data import PromptRows
    from hf_protocols import MappingPlan

__all__ = ["check_run"]


def check_run(
    config: Config, folder: Path, *, plan: MappingPlan | None = None, search_path: Sequence[str] = ()
) -> tuple[RunInputs, MappingPlan]:
    """Reads what a run needs, plans it, and walks every call that it will make.

    Args:
        config: the run's.
        folder: where a fresh model and its tokenizer are written; whole models made of adapters come next to it.
        plan: where the models go; None lets the mapper decide.
        search_path: folders where reward functions are looked for first.

    Returns:
        The inputs, and the plan.

    Raises:
        HybridFlowError: with a line for every problem; a single problem keeps its class.
    """
    config = merge_given_adapters(config, folder.with_name(MERGED_MODELS))
    problems = _Problems()
    with problems.noted():
        check_batches(config)
    with problems.noted():
        check_rollout_options(config.rollout)
    with problems.noted():
        check_train_backends(config, plan)
    rows: dict[str, PromptRows] = {}
    with problems.noted():
        rows = load_row_sets(config.data)
    with problems.noted():
        scored = {name: part for name, part in rows.items() if name in DATA_SETS}
        check_rewards(config, scored, search_path=search_path)
    evaluated: dict[str, PromptRows] = {}
    with problems.noted():
        evaluated = load_evaluation_rows(config)
        check_evaluations(config, evaluated, search_path=search_path)
    if rows:
        with problems.noted():
            model = load_model(config, rows["train"], folder)
            inputs = tokenize_inputs(config, rows, model)
            if len(evaluated) == len(config.evaluation):
                inputs = replace(inputs, evaluations=tokenize_evaluations(config, evaluated, model, inputs.turns))
            check_context(config, inputs)
            check_scorers(config, inputs)
            check_adapters(config, inputs.models)
    problems.refuse()
    check_cache(config.rollout, inputs)
    shapes = {role: each.shape for role, each in inputs.models.items()}
    sends = find_sent(config, inputs.models)
    found = plan or plan_placement(config, shapes, prompt_tokens=inputs.train.max_prompt_tokens, sends=sends)
    check_plan(config, found, shapes)
    check_blocks(config, found, inputs)
    check_calls(config, found, walk_calls(config, found, inputs), is_given=plan is not None)
    return inputs, found


class _Problems:
    """Errors of checks that do not depend on one another."""

    def __init__(self) -> None:
        self._found: list[HybridFlowError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keeps the error of a check for `refuse`."""
        try:
            yield
        except HybridFlowError as error:
            self._found.append(error)

    def refuse(self) -> None:
        """Raises what was found, if anything was."""
        distinct = {str(error): error for error in reversed(self._found)}  # two checks may meet one fault
        if len(distinct) == 1:
            raise self._found[0]
        if distinct:
            raise ConfigError("\n".join(reversed(distinct)))
