"""Rows and calls of a run against what bounds them: context, token budgets, caches, the ranks that share rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hf_algorithms.data import PromptDataset, SequenceEncoder, TextBlocks, load_tokenizer
from hf_algorithms.evaluation.responses import check_prompts
from hf_algorithms.preflight.row_limits import RowLimit, RowTokens, find_bound, find_context, find_long_rows
from hf_engine import SupportsPromptCheck, SupportsRowCheck, load_rollout_backend
from hf_engine.model_directory import read_model_directory
from hf_protocols import BackendError, ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config, RolloutConfig
    from hf_algorithms.preflight.inputs import ModelInputs, RunInputs
    from hf_algorithms.preflight.walk import PlannedCall
    from hf_protocols import MappingPlan

__all__ = [
    "check_blocks",
    "check_cache",
    "check_calls",
    "check_context",
    "check_row_cache",
    "check_scorers",
]

_BATCH_KEYS = {
    "generation": "rollout.batch_size",
    "training": "rollout.batch_size * rollout.samples_per_prompt / algorithm.mini_batches",
}
_SAMPLES_KEY = "rollout.batch_size * rollout.samples_per_prompt"


def check_context(config: Config, inputs: RunInputs) -> None:
    """Refuses rows for which the model's context has no room: a response follows every prompt of all three sets.

    Raises:
        ConfigError: with a line for every file, which names its longest row.
    """
    new = config.rollout.max_new_tokens
    rows = [
        RowTokens(source=data.source, where=data.where, prompts=data.prompt_lengths, responses=[new] * len(data))
        for data in (inputs.train, inputs.validation, inputs.test)
    ]
    limit = find_context(config, inputs.model.shape)
    problems = [*find_long_rows(rows, limit, new)]
    if isinstance(data := inputs.pretraining, PromptDataset):
        learned = data.response_lengths(new)
        row = RowTokens(source=data.source, where=data.where, prompts=data.prompt_lengths, responses=learned)
        problems += find_long_rows([row], find_bound(config, inputs.model.shape), new)
    _refuse(problems)


def check_blocks(config: Config, plan: MappingPlan, inputs: RunInputs) -> None:
    """Refuses blocks of texts that exceed a forward pass of a role that learns them, in a plan with budgets of its own.

    Raises:
        ConfigError: naming both numbers.
    """
    blocks = inputs.pretraining
    if not isinstance(blocks, TextBlocks):
        return
    for role, placed in plan.models.items():
        learns = hasattr(config.recipe.role(role).load_worker(), "hold_pretraining")
        if learns and placed.micro_batch_tokens < blocks.block_tokens:
            raise ConfigError(
                f"data.block_tokens = {blocks.block_tokens}: exceeds micro_batch_tokens = {placed.micro_batch_tokens} "
                f"of {role} in the plan. Set it to at most {placed.micro_batch_tokens}"
            )


def check_scorers(config: Config, inputs: RunInputs) -> None:
    """Refuses prompts that leave a reward model or cost model no room for a response.

    Of a model with the run's tokenizer the longest response must fit as well. Of another tokenizer the tokens of
    responses are not known: what is too long then loses its start.

    Raises:
        ConfigError: with a line for every file, which names its longest row.
        DataError: for a chat that the model's tokenizer has no template for.
    """
    for section, role in config.recipe.scorers.items():
        model = inputs.models[role]
        limit, new = model.shape.max_positions, config.rollout.max_new_tokens
        label = f"{section}.model.path = {show(config.scorer_paths[section])}"
        problems = []
        for data in (inputs.train, inputs.validation, inputs.test):
            if model.own_tokenizer_path is None:
                lengths, least = list(data.prompt_lengths), new
            else:
                encoder = SequenceEncoder(load_tokenizer(model.own_tokenizer_path, needs_end=False), label=label)
                prompts = [inputs.turns.as_chat(row.prompt) or row.prompt for row in data.rows]
                lengths, least = [encoder.count_prompt_tokens(each) for each in prompts], 1
            longest = max(lengths)
            if longest + least > limit:
                problems.append(
                    f"{data.where(lengths.index(longest))}: its prompt of {longest} tokens and a response "
                    f"of up to {new} exceed the context of {limit} tokens of {label}. Shorten the prompt, or use a "
                    "model with a longer context"
                )
        _refuse(problems)


def check_cache(rollout: RolloutConfig, inputs: RunInputs) -> None:
    """Refuses options of the rollout backend that have no room for a row; others must have been found good before.

    Refuses prompts as well from which the backend does not generate.

    Raises:
        ConfigError: naming the option and what is needed, or the row.
    """
    held_out = max(inputs.validation.max_prompt_tokens, inputs.test.max_prompt_tokens)
    longest = [
        (inputs.train.max_prompt_tokens + rollout.max_new_tokens, rollout.samples_per_prompt),
        (held_out + rollout.max_new_tokens, 1),
    ]
    _check_rows(rollout, inputs, longest)
    for data in (inputs.train, inputs.validation, inputs.test):
        _check_prompts(rollout, inputs, data, rollout.max_new_tokens)
    check_row_cache(rollout, inputs)


def check_row_cache(rollout: RolloutConfig, inputs: ModelInputs) -> None:
    """Does the same for the sets of `[[evaluation]]` alone.

    Raises:
        ConfigError: naming the option and what is needed, or the row.
    """
    _check_rows(
        rollout,
        inputs,
        [(each.data.max_prompt_tokens + each.max_new_tokens, each.config.samples) for each in inputs.evaluations],
    )
    for each in inputs.evaluations:
        _check_prompts(rollout, inputs, each.data, each.max_new_tokens)


def _check_prompts(rollout: RolloutConfig, inputs: ModelInputs, data: PromptDataset, max_new_tokens: int) -> None:
    backend = load_rollout_backend(rollout.backend)
    if not issubclass(backend, SupportsPromptCheck):
        return
    model = read_model_directory(inputs.model.path, needs_weights=False)
    check_prompts(backend, model, data, max_new_tokens=max_new_tokens)


def _check_rows(rollout: RolloutConfig, inputs: ModelInputs, longest: Sequence[tuple[int, int]]) -> None:
    backend = load_rollout_backend(rollout.backend)
    if not issubclass(backend, SupportsRowCheck):
        return
    for tokens, samples in longest:
        try:
            backend.check_row(rollout.options, inputs.model.shape, tokens=tokens, samples=samples)
        except BackendError as error:
            raise ConfigError(f"rollout.options.{error}") from None


def check_calls(config: Config, plan: MappingPlan, calls: Sequence[PlannedCall], *, is_given: bool) -> None:
    """Refuses calls with fewer rows than the ranks need, or with a row above the token budget of a forward pass.

    Args:
        config: the run's.
        plan: where the models go.
        calls: what `walk_calls` found.
        is_given: whether the plan is the user's; else it follows from the configuration.

    Raises:
        ConfigError: with a line for every problem, which names keys, files and lines.
    """
    problems = list(_find_shortages(config, calls, is_given=is_given))
    passes = [
        call for call in calls if call.role in config.recipe.model_roles and call.kind in ("inference", "training")
    ]
    for tokens, roles in _group_by_budget(plan, passes).items():
        name = f"training.micro_batch_tokens = {tokens}"
        if is_given:
            name = f"micro_batch_tokens = {tokens} of {', '.join(roles)} in the plan"
        limit = RowLimit(tokens=tokens, name=f"{name}, which bounds a forward pass", remedy=f"raise {name.split()[0]}")
        rows = [call.tokens for call in passes if call.role in roles]
        problems += find_long_rows(rows, limit, config.rollout.max_new_tokens)
    _refuse(problems)


def _refuse(problems: Iterable[str]) -> None:
    if lines := list(dict.fromkeys(problems)):
        raise ConfigError("\n".join(lines))


def _find_shortages(config: Config, calls: Iterable[PlannedCall], *, is_given: bool) -> Iterator[str]:
    """A line for every batch that gives some rank no row. Evaluations repeat rows, so they have enough."""
    for call in calls:
        if call.num_rows >= call.least_rows:
            continue
        key, knob = _BATCH_KEYS.get(call.kind, _SAMPLES_KEY), "rollout.batch_size"
        if call.phase == "warm start":
            key = knob = "warm_start.batch_size"
        ranks = (
            f"data-parallel ranks of the {call.role}"
            if call.role in config.recipe.model_roles
            else f"ranks of the {call.role}"
        )
        if call.kind == "generation":
            ranks = "generation replicas"
        fewer = "use a plan with fewer ranks" if is_given else "lower cluster.gpus_per_machine"
        yield (
            f"{key} = {call.num_rows}: {call.least_rows} {ranks} need at least {call.least_rows} rows. "
            f"Raise {knob}, or {fewer}"
        )


def _group_by_budget(plan: MappingPlan, passes: Iterable[PlannedCall]) -> dict[int, list[str]]:
    """The roles that compute, by the token budget of their forward passes."""
    found: dict[int, list[str]] = {}
    for role in dict.fromkeys(call.role for call in passes):
        found.setdefault(plan.models[role].micro_batch_tokens, []).append(role)
    return found
