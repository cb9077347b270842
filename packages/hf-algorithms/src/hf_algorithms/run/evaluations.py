"""The sets of `[[evaluation]]`: read and checked before a run starts, evaluated when their iteration has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import PromptDataset, PromptRows, open_rows
from hf_algorithms.evaluation.responses import ResponseScorer, build_sampling_of, check_room, name_metrics
from hf_algorithms.evaluation.sets import evaluate_set
from hf_algorithms.rewards import check_metric
from hf_protocols import DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config, EvaluationConfig
    from hf_algorithms.preflight.inputs import ModelInputs
    from hf_algorithms.roles import Roles
    from hf_controller import Executor

__all__ = ["EvaluationInputs", "RunEvaluations", "check_evaluations", "load_evaluation_rows", "tokenize_evaluations"]


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """A set of `[[evaluation]]` as the model reads it."""

    config: EvaluationConfig
    data: PromptDataset
    max_new_tokens: int


def load_evaluation_rows(config: Config) -> dict[str, PromptRows]:
    """Returns the rows of every set by its name, after reading each row once.

    Raises:
        DataError: for a file that cannot be read, or a line of it.
    """
    found: dict[str, PromptRows] = {}
    for number, each in enumerate(config.evaluation):
        try:
            rows = open_rows(
                [(each.data, None)], prompt_field=config.data.prompt_field, answer_field=config.data.answer_field
            ).first(each.rows or config.data.max_eval_rows)
            for _ in rows:
                pass
        except DataError as error:
            raise DataError(f"evaluation[{number}].data: {error}") from error
        found[each.name] = rows
    return found


def check_evaluations(config: Config, rows: Mapping[str, PromptRows], *, search_path: Sequence[str] = ()) -> None:
    """Loads every metric function, and lets each look at the answers of the rows that it will score.

    Raises:
        ConfigError, DataError: for a function or an answer that cannot be used.
    """
    for number, each in enumerate(config.evaluation):
        key = f"evaluation[{number}].metrics"
        for function in name_metrics(_list_functions(config, each), key=key).values():
            check_metric(
                key,
                function,
                rows[each.name],
                source=_describe(number, each),
                answer_name=config.data.answer_field or "answer",
                allowed_hosts=config.reward.allowed_hosts,
                search_path=search_path,
            )


def tokenize_evaluations(
    config: Config, rows: Mapping[str, PromptRows], inputs: ModelInputs
) -> tuple[EvaluationInputs, ...]:
    """Returns the sets as the model's tokens.

    Raises:
        DataError: for a prompt without tokens.
        ConfigError: for a prompt that leaves no room for a response.
    """
    found = []
    for number, each in enumerate(config.evaluation):
        source = _describe(number, each)
        data = PromptDataset(rows[each.name], inputs.model.tokenizer, turns=inputs.turns, source=source)
        own = each.max_new_tokens is not None
        limit = config.rollout.max_new_tokens if each.max_new_tokens is None else each.max_new_tokens
        key = f"evaluation[{number}].max_new_tokens" if own else "rollout.max_new_tokens"
        check_room(data, context=inputs.model.shape.max_positions, max_new_tokens=limit, key=key)
        found.append(EvaluationInputs(config=each, data=data, max_new_tokens=limit))
    return tuple(found)


@dataclass
class RunEvaluations:
    """Evaluates the sets of a run; their metric functions run in processes of their own.

    Attributes:
        config: of the run.
        inputs: of the run.
        executor: of the run.
        roles: of the run.
        search_path: folders where modules of metrics are looked for first.
    """

    config: Config
    inputs: ModelInputs
    executor: Executor
    roles: Roles
    search_path: Sequence[str] = ()
    _scorers: dict[str, ResponseScorer] = field(default_factory=dict, init=False)

    def evaluate_due(self, iteration: int, *, is_last: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns the metrics and the samples of the sets whose turn it is after an iteration.

        Raises:
            RewardError: if a metric function fails, or scores no row of a set.
        """
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for each in self.inputs.evaluations:
            if not is_last and iteration % (each.config.every or self.config.run.eval_every):
                continue
            sampling = build_sampling_of(
                samples=each.config.samples,
                temperature=each.config.temperature,
                top_p=each.config.top_p,
                max_new_tokens=each.max_new_tokens,
                seed=self.config.run.seed,
                stop_ids=self.inputs.stop_ids,
                stop_strings=self.config.rollout.stop,
            )
            result = evaluate_set(
                each.config.name,
                each.data,
                executor=self.executor,
                group=self.roles.having("generate_sequences"),
                turns=self.inputs.turns,
                sampling=sampling,
                scorer=self._find_scorer(each.config),
                keep=samples.extend,
            )
            metrics |= result.to_metrics()
        return metrics, samples

    def close(self) -> None:
        """Ends the processes of the metric functions."""
        for scorer in self._scorers.values():
            scorer.close()

    def _find_scorer(self, evaluation: EvaluationConfig) -> ResponseScorer:
        """Built when a set is first evaluated, and kept."""
        if evaluation.name not in self._scorers:
            reward = self.config.reward
            self._scorers[evaluation.name] = ResponseScorer(
                name_metrics(_list_functions(self.config, evaluation), key="metrics"),
                self.inputs.turns,
                search_path=self.search_path,
                answer_name=self.config.data.answer_field or "answer",
                num_processes=reward.processes,
                allowed_hosts=reward.allowed_hosts,
            )
        return self._scorers[evaluation.name]


def _list_functions(config: Config, evaluation: EvaluationConfig) -> Sequence[str]:
    return evaluation.metrics or [config.reward.metric]


def _describe(number: int, evaluation: EvaluationConfig) -> str:
    return f"evaluation[{number}].data = {show(evaluation.data)}"
