"""Every call that a run will make, with its rows and the tokens of the longest, written down and not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.checkpoints import refuse_unkept
from hf_algorithms.dataflow import PROMPT_COLUMNS, build_tracing_context
from hf_algorithms.evaluation.responses import list_draws
from hf_algorithms.evaluation.validation import request_divergence, request_evaluation
from hf_algorithms.preflight.row_limits import RowTokens
from hf_algorithms.recipes import SupervisedRecipe
from hf_algorithms.roles import Roles, least_rows
from hf_algorithms.wiring import build_roles, build_sampling
from hf_algorithms.workers import SEQUENCE, check_call_arguments
from hf_controller import TracingExecutor
from hf_engine import SamplingParams

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.data import PromptDataset
    from hf_algorithms.preflight.inputs import ModelInputs, RunInputs
    from hf_algorithms.recipes import StepContext
    from hf_controller import TracedCall, TracedResult
    from hf_protocols import MappingPlan
    from hf_protocols.dataflow import CallKind

__all__ = ["Phase", "PlannedCall", "walk_calls", "walk_results", "walk_supervised"]

Phase = Literal["warm start", "iterations", "evaluation", "divergence", "sets"]
"""`sets` are those of `[[evaluation]]`."""


_PlannedPhase = tuple[Phase, RowTokens, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call that a run will make: `num_rows` of `tokens`' rows.

    With fewer rows than `least_rows`, some of the ranks that share the rows would not get any.
    """

    phase: Phase
    role: str
    method: str
    kind: CallKind
    num_rows: int
    least_rows: int
    tokens: RowTokens


def walk_calls(config: Config, plan: MappingPlan, inputs: RunInputs) -> list[PlannedCall]:
    """Returns the calls of the warm start, of one iteration, and of the evaluation of validation and test rows.

    They are in the layouts of `plan`. Sets of `[[evaluation]]` are left out: their calls fit any number of ranks.

    Raises:
        HybridFlowError: for roles that do not fit the plan's pools, or a value that no worker takes.
    """
    found = []
    for phase, tokens, roles, calls, _ in _walk(config, plan, inputs, _list_phases):
        check_call_arguments(calls, {each.name: each.load_worker() for each in config.recipe.roles})
        found += [
            PlannedCall(
                phase=phase,
                role=call.role,
                method=call.method,
                kind=call.spec.kind,
                num_rows=call.num_rows,
                least_rows=least_rows(getattr(roles, call.role), call.method),
                tokens=tokens,
            )
            for call in calls
        ]
    return found


def walk_results(
    config: Config, plan: MappingPlan, inputs: RunInputs
) -> Iterator[tuple[Phase, RowTokens, list[TracedResult]]]:
    """Yields the phases of `walk_calls`, with the rows that each reads and the batches that it stores; and the sets.

    At most the responses of two calls of a set of `[[evaluation]]` are alive at once.

    Raises:
        HybridFlowError: as `walk_calls` does.
    """
    for list_phases in (_list_phases, *([_list_sets] if inputs.evaluations else [])):
        for phase, tokens, _, _, results in _walk(config, plan, inputs, list_phases):
            yield phase, tokens, results


def walk_supervised(
    config: Config, plan: MappingPlan, inputs: ModelInputs, tokens: RowTokens
) -> Iterator[tuple[Phase, RowTokens, list[TracedResult]]]:
    """Yields an iteration of a supervised run, without its batch; and sets, as `walk_results` does.

    The batch has the rows of `tokens`.

    Raises:
        HybridFlowError: as `walk_calls` does.
    """
    recipe = config.recipe
    assert isinstance(recipe, SupervisedRecipe), "a configuration that was read for a supervised command"

    def list_steps(executor: TracingExecutor, roles: Roles, *_: Any) -> Iterator[_PlannedPhase]:
        batch = executor.put_columns(recipe.columns, len(tokens.prompts))
        context = build_tracing_context(executor, SamplingParams(max_new_tokens=1))
        yield "iterations", tokens, partial(_run_step, roles, batch, config, context)

    for list_phases in (list_steps, *([_list_sets] if inputs.evaluations else [])):
        for phase, rows, _, _, results in _walk(config, plan, inputs, list_phases):
            yield phase, rows, [result for result in results if phase == "sets" or result.call is not None]


def _walk(
    config: Config, plan: MappingPlan, inputs: ModelInputs, list_phases: Callable[..., Iterator[_PlannedPhase]]
) -> Iterator[tuple[Phase, RowTokens, Roles, list[TracedCall], list[TracedResult]]]:
    executor = TracingExecutor()
    roles = build_roles(executor, config, plan, inputs, ())
    num_calls = num_results = 0
    for phase, tokens, make_calls in list_phases(executor, roles, config, inputs):
        make_calls()
        yield phase, tokens, roles, executor.calls[num_calls:], executor.results[num_results:]
        num_calls, num_results = len(executor.calls), len(executor.results)


def _list_phases(executor: TracingExecutor, roles: Roles, config: Config, inputs: RunInputs) -> Iterator[_PlannedPhase]:
    """Yields each phase: its name, the rows that it reads, and a function that makes its calls."""
    sampling = build_sampling(config, stop_ids=inputs.stop_ids, step=0)
    limit = sampling.max_new_tokens
    train, validation, test = (_generated(data, limit) for data in (inputs.train, inputs.validation, inputs.test))

    def prompts(num_rows: int) -> Any:
        return executor.put_columns(PROMPT_COLUMNS, num_rows)

    if config.warm_start.max_steps:
        batch = executor.put_columns((*PROMPT_COLUMNS, *SEQUENCE[1:]), config.warm_start.batch_size)
        responses = inputs.train.response_lengths(limit)
        learned = RowTokens(source=train.source, where=train.where, prompts=train.prompts, responses=responses)
        yield "warm start", learned, partial(_learn, roles, batch)
    batch, context = prompts(config.rollout.batch_size), build_tracing_context(executor, sampling)
    yield "iterations", train, partial(_run_step, roles, batch, config, context)
    for tokens in (validation, test):
        yield "evaluation", tokens, partial(request_evaluation, roles, prompts(len(tokens.prompts)), sampling)
    yield "divergence", test, partial(request_divergence, roles, prompts(len(test.prompts)), sampling)


def _run_step(roles: Roles, batch: Any, config: Config, context: StepContext) -> None:
    config.recipe.run_step(roles, batch, config.algorithm, context)
    if config.run.checkpoint_every:
        refuse_unkept(context.state)


def _list_sets(executor: TracingExecutor, roles: Roles, config: Config, inputs: ModelInputs) -> Iterator[_PlannedPhase]:
    """Yields the generation of each set of `[[evaluation]]`, as `_list_phases` does of a run's other calls."""
    for each in inputs.evaluations:
        group, sampling = roles.having("generate_sequences"), each.build_sampling(config, stop_ids=inputs.stop_ids)

        def generate(data: PromptDataset = each.data, group: Any = group, sampling: Any = sampling) -> None:
            for num_rows in list_draws(group, len(data), sampling)[:2]:
                group.generate_sequences(executor.put_columns(PROMPT_COLUMNS, num_rows), sampling)

        yield "sets", _generated(each.data, each.max_new_tokens), generate


def _generated(data: PromptDataset, limit: int) -> RowTokens:
    return RowTokens(source=data.source, where=data.where, prompts=data.prompt_lengths, responses=[limit] * len(data))


def _learn(roles: Roles, batch: Any) -> None:
    from hf_algorithms.losses import SupervisedLoss

    roles.having("update_actor").update_actor(batch, SupervisedLoss())
