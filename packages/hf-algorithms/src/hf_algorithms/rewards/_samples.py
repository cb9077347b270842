"""A batch as reward functions see it: texts, messages, token ids and columns of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from hf_algorithms.rewards._conventions import ANSWER_NAMES, Binding
from hf_algorithms.rewards._trainer import TRAINER_VALUES, CallLog, TrainerState
from hf_protocols.validation import show

__all__ = ["Samples"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Responses, and what belongs to each. All sequences have one item for each response.

    Attributes:
        prompts: texts.
        responses: texts.
        answers: reference answers; None where the data does not have one.
        prompt_ids: tokens.
        response_ids: tokens.
        truncated: True for a response that was cut by its length.
        messages: prompt as messages of a chat; None for a plain text.
        columns: further columns of the data by name.
        groups: number of the prompt that a response belongs to; left out: each response is a group.
        sample_ids: epoch, row, number in its group and attempt, for messages.
        answer_name: the data's own name of the answers.
        trainer_state: progress of the run, for TRL's functions.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str | None]
    prompt_ids: Sequence[Sequence[int]] = ()
    response_ids: Sequence[Sequence[int]] = ()
    truncated: Sequence[bool] = ()
    messages: Sequence[Sequence[Mapping[str, Any]] | None] = ()
    columns: Sequence[Mapping[str, Any]] = ()
    groups: Sequence[int] = ()
    sample_ids: Sequence[Sequence[int]] = ()
    answer_name: str = "answer"
    trainer_state: TrainerState = field(default_factory=TrainerState)
    _lists: dict[tuple[str, str], list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.responses)

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """Columns that any row has, in order."""
        return tuple(dict.fromkeys(name for row in self.columns for name in row))

    def split_calls(self, binding: Binding) -> list[list[int]]:
        """Returns the rows of every call: single ones, or all of a group."""
        if binding.convention.per_sample or not self.groups:
            return [[row] for row in range(len(self))]
        # rows of a group may stand apart where batches were joined
        order = sorted(range(len(self)), key=self.groups.__getitem__)
        return [list(rows) for _, rows in groupby(order, key=self.groups.__getitem__)]

    def build_arguments(self, binding: Binding, calls: Sequence[Sequence[int]]) -> Iterator[_Arguments]:
        """Yields positional and keyword arguments of each call, which is given by its rows.

        Raises:
            KeyError: with a parameter that neither the convention nor the data has a value for.
        """
        convention, names = binding.convention, self._choose_names(binding)
        of_trainer = [name for name in names if name in TRAINER_VALUES and name in convention.names]
        values = {name: self._list(binding.style, name) for name in names if name not in of_trainer}
        by_position = convention.positional if binding.keywords is None else ()
        for rows in calls:
            if convention.per_sample:
                found = {name: each[rows[0]] for name, each in values.items()}
            else:
                found = {name: [each[row] for row in rows] for name, each in values.items()}
            found |= self._build_trainer_values(of_trainer)
            yield tuple(found.pop(name) for name in by_position), found

    def _choose_names(self, binding: Binding) -> list[str]:
        """Parameters of a call in order, and what further names it gets."""
        convention, columns = binding.convention, set(self.column_names)
        further = (*convention.positional, *convention.offers, *self.column_names, self.answer_name)
        if binding.keywords is None:
            rest = [name for name in further if name not in binding.filled] if binding.takes_all else []
            return list(dict.fromkeys((*convention.positional, *rest)))
        known = convention.names | columns | {self.answer_name} | ANSWER_NAMES
        # a column may be absent from all rows of one batch: None stands for it
        names = [name for name in binding.keywords if name in known or name in binding.needed]
        if not columns and (missing := [name for name in names if name not in known]):
            raise KeyError(missing[0])
        return list(dict.fromkeys((*names, *further))) if binding.takes_all else names

    def describe(self, row: int) -> str:
        """Names a response in a message, with its texts."""
        name = f"sample {row}"
        if self.sample_ids:
            epoch, of_data, number, attempt = self.sample_ids[row]
            again = f", attempt {attempt}" if attempt else ""
            name = f"response {number} to row {of_data} (epoch {epoch}{again})"
        texts = f"prompt {show(self.prompts[row])}, response {show(self.responses[row])}"
        return f"{name}: {texts}, answer {show(self.answers[row])}"

    def _build_trainer_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Values of a whole call; what is logged goes into one log."""
        if not names:
            return {}
        log = CallLog()
        values = {"trainer_state": self.trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        return {name: values[name] for name in names}

    def _list(self, style: str, name: str) -> list[Any]:
        """One value for each response, of a parameter of a convention or of a column."""
        if (style, name) not in self._lists:
            build = _OF_STYLE[style].get(name) or _OF_ALL.get(name)
            if build is not None:
                values = build(self)
            elif name not in self.column_names and name in {self.answer_name, *ANSWER_NAMES}:
                values = list(self.answers)
            else:
                values = self._column(name)
            self._lists[style, name] = values
        return self._lists[style, name]

    def _column(self, name: str, default: Any = None) -> list[Any]:
        rows = self.columns or [{}] * len(self)
        return [default if row.get(name) is None else row[name] for row in rows]

    def _as_chats(self, texts: Sequence[str]) -> list[Any]:
        """Responses as messages where the prompt is a chat."""
        chats = self.messages or [None] * len(self)
        return [
            text if chat is None else [{"role": "assistant", "content": text}]
            for text, chat in zip(texts, chats, strict=True)
        ]

    def _prompts_or_chats(self) -> list[Any]:
        chats = self.messages or [None] * len(self)
        return [text if chat is None else chat for text, chat in zip(self.prompts, chats, strict=True)]

    def _truths(self) -> list[Any]:
        """The answers as the data has them: `reward_model.ground_truth` may be a list or a mapping."""
        given = [row.get("ground_truth") if isinstance(row, Mapping) else None for row in self._column("reward_model")]
        return [answer if truth is None else truth for truth, answer in zip(given, self.answers, strict=True)]


_Build = Callable[[Samples], list[Any]]

_OF_ALL: Mapping[str, _Build] = {
    "prompt_ids": lambda samples: list(samples.prompt_ids or [[]] * len(samples)),
    "response_ids": lambda samples: list(samples.response_ids or [[]] * len(samples)),
    "completion_ids": lambda samples: list(samples.response_ids or [[]] * len(samples)),
    "truncated": lambda samples: list(samples.truncated or [False] * len(samples)),
}

_OF_STYLE: Mapping[str, Mapping[str, _Build]] = {
    "hybridflow": {
        "prompts": lambda samples: list(samples.prompts),
        "responses": lambda samples: list(samples.responses),
        "answers": lambda samples: list(samples.answers),
        "messages": lambda samples: list(samples.messages or [None] * len(samples)),
    },
    "trl": {
        "prompts": lambda samples: samples._prompts_or_chats(),
        "completions": lambda samples: samples._as_chats(samples.responses),
    },
    "verl": {
        "data_source": lambda samples: samples._column("data_source"),
        "solution_str": lambda samples: list(samples.responses),
        "ground_truth": lambda samples: samples._truths(),
        "extra_info": lambda samples: samples._column("extra_info", {}),
    },
    "verl_batch": {
        "data_sources": lambda samples: samples._column("data_source"),
        "solution_strs": lambda samples: list(samples.responses),
        "ground_truths": lambda samples: samples._truths(),
        "extra_infos": lambda samples: samples._column("extra_info", {}),
    },
    "openrlhf": {
        "queries": lambda samples: [one + two for one, two in zip(samples.prompts, samples.responses, strict=True)],
        "prompts": lambda samples: list(samples.prompts),
        "labels": lambda samples: list(samples.answers),
    },
    "verifiers": {
        "prompt": lambda samples: samples._prompts_or_chats(),
        "completion": lambda samples: samples._as_chats(samples.responses),
        "answer": lambda samples: list(samples.answers),
        "state": lambda samples: [{} for _ in samples.responses],
        "info": lambda samples: samples._column("info", {}),
    },
}
"""By convention and parameter, the function that makes the value of the parameter."""
