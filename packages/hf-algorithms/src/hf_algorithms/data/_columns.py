"""Roles of a table's columns: found by name, or set by the user."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_protocols.errors import DataError
from hf_protocols.validation import shorten_list, show

__all__ = [
    "ANSWER_COLUMNS",
    "PROMPT_COLUMNS",
    "ColumnMapping",
    "Kind",
    "describe_answer",
    "find_columns",
    "find_prompt_of_pairs",
    "get_field",
    "has_answers_in_chats",
    "is_chat",
]

PROMPT_COLUMNS = (("prompt", "messages"), ("question", "problem", "query", "instruction", "input"))
"""Names of a prompt's column. Those of a later line count where none of an earlier line is there."""
ANSWER_COLUMNS = (
    ("answer", "solution", "ground_truth", "label", "reward_model.ground_truth", "reward_spec.ground_truth"),
    ("completion", "output"),
)
"""Names of an answer's column, in the same order."""
Kind = Literal["prompts", "chats", "preferences", "texts"]
"""Kind of the rows of a table."""

_TEXT_COLUMN = "text"
_PAIRS = (("chosen", "rejected"), ("response_0", "response_1"))


@dataclass(frozen=True, kw_only=True)
class ColumnMapping:
    """Columns of a table.

    Attributes:
        kind: of its rows: prompts in text, chats, pairs of a better and a worse response, texts to pretrain on.
        prompt: field of the prompt, with dots between nested names; None for texts.
        answer: field of the answer, or of a text; None if there is none.
        others: all other columns.
    """

    kind: Kind
    prompt: str | None
    answer: str | None
    others: tuple[str, ...]

    def describe(self) -> str:
        """One line, such as `prompts; prompt = 'question', answer = 'answer'`."""
        found = [f"prompt = {show(self.prompt)}"] if self.prompt else []
        found.append(describe_answer(self.kind, self.prompt, self.answer))
        others = f"; other columns: {', '.join(map(show, self.others))}" if self.others else ""
        return f"{self.kind}; {', '.join(found)}{others}"


def has_answers_in_chats(prompt: str | None) -> bool:
    """True for a column of whole chats: an assistant's last message is the answer."""
    return prompt is not None and prompt.rpartition(".")[2] == "messages"


def describe_answer(kind: Kind, prompt: str | None, answer: str | None) -> str:
    """Returns the place of the answers in rows of this kind, such as `answer = 'label'`."""
    if answer is None and kind == "chats" and has_answers_in_chats(prompt):
        return "answer = the last message, where it is the assistant's"
    return f"{'text' if kind == 'texts' else 'answer'} = {show(answer) if answer else 'none'}"


def find_columns(
    records: Sequence[Mapping[str, Any]],
    *,
    where: str,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    promptless: Collection[Kind] = (),
    is_learned: bool = False,
) -> ColumnMapping:
    """Finds what the columns of a table hold.

    Args:
        records: the first ones; a column that has no value in any of them is absent.
        where: file and row of the first one, for messages.
        prompt_field: the user's name for the prompt's field.
        answer_field: the user's name for the answer's field.
        promptless: kinds of rows that may lack a prompt: `texts`, `preferences`.
        is_learned: answers are what a model learns to write, so that a `completion` counts before an `answer`.

    Raises:
        DataError: for no column with prompts, for two that may hold prompts or answers, and for a field that the user
            named and no record has.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    absent = _describe_absent(names, where)
    has_pairs = any(all(_is_present(records, name) for name in pair) for pair in _PAIRS)
    if has_pairs and "preferences" in promptless:
        prompt = find_prompt_of_pairs(records, where=where, prompt_field=prompt_field)
        if prompt is None:
            return ColumnMapping(kind="preferences", prompt=None, answer=None, others=tuple(names))
    else:
        prompt = _choose(records, prompt_field, PROMPT_COLUMNS, "prompt", absent=absent, where=where)
    if prompt is None and _is_present(records, _TEXT_COLUMN):
        if "texts" in promptless:
            others = tuple(name for name in names if name != _TEXT_COLUMN)
            return ColumnMapping(kind="texts", prompt=None, answer=_TEXT_COLUMN, others=others)
        raise DataError(
            f"{where} has a field 'text' and no prompt: a text is learned, not answered. Set data.prompt_field if it "
            "holds prompts, or name the file as data.pretraining"
        )
    if prompt is None and has_pairs:
        raise DataError(
            f"{where} has two responses and no prompt: such pairs train a policy or a reward model. Use "
            "`hybridflow dpo` or `hybridflow reward-model`, or name a file with prompts"
        )
    if prompt is None:
        known = ", ".join(show(name) for tier in PROMPT_COLUMNS for name in tier)
        if empty := [show(name) for tier in PROMPT_COLUMNS for name in tier if name in names]:
            raise DataError(
                f"{where}: no prompt stands in this row or the next ones: {empty[0]} holds no text, where it is there; "
                f"the fields are {_list_fields(names)}. Fill it in, or set data.prompt_field"
            )
        raise DataError(f"{absent.format(f'for the prompt, such as {known}')}. Set data.prompt_field")
    answers = ANSWER_COLUMNS[::-1] if is_learned else ANSWER_COLUMNS
    answer = _choose(records, answer_field, answers, "answer", absent=absent, where=where)
    others = tuple(name for name in names if name != prompt and not name == answer == "answer")
    kind: Kind = "prompts"
    if has_pairs:
        kind = "preferences"
    elif any(is_chat(get_field(record, prompt)) for record in records):
        kind = "chats"
    return ColumnMapping(kind=kind, prompt=prompt, answer=answer, others=others)


def find_prompt_of_pairs(records: Sequence[Mapping[str, Any]], *, where: str, prompt_field: str | None) -> str | None:
    """Returns the column of the prompts of pairs, or None. `messages` is not one: it holds a whole chat.

    Raises:
        DataError: as `find_columns` does.
    """
    absent = _describe_absent(list(dict.fromkeys(name for record in records for name in record)), where)
    return _choose(records, prompt_field, (("prompt",), *PROMPT_COLUMNS[1:]), "prompt", absent=absent, where=where)


def get_field(record: Mapping[str, Any], field: str) -> Any:
    """The value of a field; its name may lead into nested objects by dots. None if it is absent."""
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def is_chat(value: object) -> bool:
    """True for a list of messages, each of which has a role."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value)
    )


def _choose(
    records: Sequence[Mapping[str, Any]],
    given: str | None,
    candidates: Iterable[Sequence[str]],
    role: str,
    *,
    absent: str,
    where: str,
) -> str | None:
    if given is not None:
        if not any(_has_field(record, given) for record in records):
            raise DataError(absent.format(show(given)) + f". Correct data.{role}_field")
        return given
    for names in candidates:
        found = [name for name in names if _is_present(records, name)]
        if len(found) > 1:
            first = {name: next(n for n, each in enumerate(records, 1) if _is_present([each], name)) for name in found}
            is_spread = len({*first.values()}) > 1
            shown = [show(name) + (f" (row {row})" if is_spread else "") for name, row in first.items()]
            raise DataError(
                f"{where}: {' and '.join(shown)} may each hold the {role}. Set data.{role}_field to the one that does"
            )
        if found:
            return found[0]
    return None


def _is_present(records: Iterable[Mapping[str, Any]], name: str) -> bool:
    """True if a record has a value there. Booleans label whole responses: they are not read as answers."""
    return any((value := get_field(record, name)) is not None and not isinstance(value, bool) for record in records)


def _has_field(record: Mapping[str, Any], field: str) -> bool:
    if field in record:
        return True
    parent, _, name = field.rpartition(".")
    holder = get_field(record, parent) if parent else None
    return isinstance(holder, Mapping) and name in holder


def _describe_absent(names: Sequence[str], where: str) -> str:
    there = _list_fields(names).replace("{", "{{").replace("}", "}}")
    return f"{where.replace('{', '{{').replace('}', '}}')} has no field {{}}; its fields are {there}"


def _list_fields(names: Sequence[str]) -> str:
    return ", ".join(shorten_list([show(name) for name in names])) or "none"
