"""The sets of `[[evaluation]]` before a run: their rows are read, their functions are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_algorithms.data import PromptDataset, PromptRows, TurnFormat, open_rows
from hf_algorithms.evaluation.responses import build_sampling_of, check_room, name_metrics
from hf_algorithms.preflight.reward_functions import check_metric
from hf_protocols import DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config, EvaluationConfig
    from hf_algorithms.models.initial_model import InitialModel
    from hf_engine import SamplingParams

__all__ = ["EvaluationInputs", "check_evaluations", "load_evaluation_rows", "tokenize_evaluations"]


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """A set of `[[evaluation]]` as the model reads it."""

    config: EvaluationConfig
    data: PromptDataset
    max_new_tokens: int
    functions: Sequence[str]
    """Metric functions that score its responses."""

    def build_sampling(self, config: Config, *, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Returns how its responses are drawn in a run of `config`. They end at any of `stop_ids`."""
        return build_sampling_of(
            samples=self.config.samples,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            max_new_tokens=self.max_new_tokens,
            seed=config.run.seed,
            stop_ids=stop_ids,
            stop_strings=config.rollout.stop,
        )


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
    config: Config, rows: Mapping[str, PromptRows], model: InitialModel, turns: TurnFormat
) -> tuple[EvaluationInputs, ...]:
    """Returns the sets as the tokens of the model that generates.

    Raises:
        DataError: for a prompt without tokens.
        ConfigError: for a prompt that leaves no room for a response.
    """
    found = []
    for number, each in enumerate(config.evaluation):
        source = _describe(number, each)
        data = PromptDataset(rows[each.name], model.tokenizer, turns=turns, source=source)
        own = each.max_new_tokens is not None
        limit = config.rollout.max_new_tokens if each.max_new_tokens is None else each.max_new_tokens
        key = f"evaluation[{number}].max_new_tokens" if own else "rollout.max_new_tokens"
        check_room(data, context=model.shape.max_positions, max_new_tokens=limit, key=key)
        functions = _list_functions(config, each)
        found.append(EvaluationInputs(config=each, data=data, max_new_tokens=limit, functions=functions))
    return tuple(found)


def _list_functions(config: Config, evaluation: EvaluationConfig) -> Sequence[str]:
    return evaluation.metrics or [config.reward.metric]


def _describe(number: int, evaluation: EvaluationConfig) -> str:
    return f"evaluation[{number}].data = {show(evaluation.data)}"
