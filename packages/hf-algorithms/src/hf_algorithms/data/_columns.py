"""Roles of a table's columns: found by name, or set by the user."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_protocols.errors import DataError
from hf_protocols.validation import shorten_list, show

__all__ = [
    "ANSWER_COLUMNS",
    "PAIR_PROMPT_COLUMNS",
    "PROMPT_COLUMNS",
    "ColumnMapping",
    "Kind",
    "check_blanks",
    "describe_answer",
    "describe_media",
    "find_columns",
    "find_prompt_of_pairs",
    "get_field",
    "has_answers_in_chats",
    "is_chat",
    "list_blanks",
    "refuse_sharegpt",
]

PROMPT_COLUMNS = (("prompt", "messages"), ("question", "problem", "query", "instruction", "input"))
"""Names of a prompt's column. Those of a later line count where none of an earlier line is there."""
PAIR_PROMPT_COLUMNS = (("prompt",), *PROMPT_COLUMNS[1:])
"""Names of the prompt's column of pairs, in which `messages` is a whole chat."""
ANSWER_COLUMNS = (
    ("answer", "solution", "ground_truth", "label", "reward_model.ground_truth", "reward_spec.ground_truth"),
    ("completion", "output"),
)
"""Names of an answer's column, in the same order."""
Kind = Literal["prompts", "chats", "preferences", "texts"]
"""Kind of the rows of a table."""

_TEXT_COLUMN = "text"
_ALPACA = frozenset({"instruction", "input"})
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
_PAIRS = (("chosen", "rejected"), ("response_0", "response_1"))


@dataclass(frozen=True, kw_only=True)
class ColumnMapping:
    """Columns of a table.

    Attributes:
        kind: of its rows: prompts in text, chats, pairs of a better and a worse response, texts to pretrain on.
        prompt: field of the prompt, with dots between nested names; None for texts.
        answer: field of the answer, or of a text; None if there is none.
        others: all other columns.
        blanks: columns that might hold the prompt or the answer as well, and have no text in the first rows; each with
            the column that is read.
    """

    kind: Kind
    prompt: str | None
    answer: str | None
    others: tuple[str, ...]
    blanks: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """One line, such as `prompts; prompt = 'question', answer = 'answer'`."""
        found = [f"prompt = {show(self.prompt)}"] if self.prompt else []
        found.append(describe_answer(self.kind, self.prompt, self.answer))
        others = f"; other columns: {', '.join(map(show, self.others))}" if self.others else ""
        return f"{self.kind}; {', '.join(found)}{others}{describe_media(self.others)}"


def describe_media(columns: Collection[str]) -> str:
    """Returns `; models read text only, not 'images'` where columns hold images, videos or sound; else nothing."""
    media = ", ".join(show(name) for name in columns if name.lower() in _MEDIA)
    return f"; models read text only, not {media}" if media else ""


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
    is_pair = has_pairs and "preferences" in promptless
    if is_pair:
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
        for name, value in (item for record in records for item in record.items()):
            refuse_sharegpt(value, f"{where}: the messages of field {show(name)}")
        raise DataError(f"{absent.format(f'for the prompt, such as {known}')}. Set data.prompt_field")
    answers = ANSWER_COLUMNS[::-1] if is_learned else ANSWER_COLUMNS
    answer = _choose(records, answer_field, answers, "answer", absent=absent, where=where)
    others = tuple(name for name in names if name != prompt and not name == answer == "answer")
    kind: Kind = "prompts"
    if has_pairs:
        kind = "preferences"
    elif any(is_chat(get_field(record, prompt)) for record in records):
        kind = "chats"
    blanks = list_blanks(records, prompt, prompt_field, PAIR_PROMPT_COLUMNS if is_pair else PROMPT_COLUMNS)
    blanks += list_blanks(records, answer, answer_field, answers)
    return ColumnMapping(kind=kind, prompt=prompt, answer=answer, others=others, blanks=blanks)


def find_prompt_of_pairs(records: Sequence[Mapping[str, Any]], *, where: str, prompt_field: str | None) -> str | None:
    """Returns the column of the prompts of pairs, or None. `messages` is not one: it holds a whole chat.

    Raises:
        DataError: as `find_columns` does.
    """
    absent = _describe_absent(list(dict.fromkeys(name for record in records for name in record)), where)
    return _choose(records, prompt_field, PAIR_PROMPT_COLUMNS, "prompt", absent=absent, where=where)


def list_blanks(
    records: Sequence[Mapping[str, Any]], chosen: str | None, given: str | None, candidates: Iterable[Sequence[str]]
) -> tuple[tuple[str, str], ...]:
    """Returns columns that were left out because these records have no text there, each with the one that is read.

    Args:
        records: the first ones.
        chosen: the column that is read.
        given: the user's name for it; then there are none.
        candidates: names of such a column, in ranks.
    """
    if chosen is None or given is not None:
        return ()
    rank = next((names for names in candidates if chosen in names), ())
    blank = [name for name in rank if _is_present(records, name) and not _has_text(records, name)]
    return tuple((name, chosen) for name in blank if name != chosen)


def check_blanks(record: Mapping[str, Any], blanks: Iterable[tuple[str, str]]) -> None:
    """Refuses a record with text in a column that was left out because it has no text in the first rows.

    Raises:
        DataError: which follows the place of the row.
    """
    for name, chosen in blanks:
        if _has_text([record], name):
            role = "answer" if any(name in names for names in ANSWER_COLUMNS) else "prompt"
            raise DataError(
                f": field {show(name)} has text, and it was left out, because it has no text in the first rows: "
                f"{show(chosen)} holds the {role}. {_describe_choice((name, chosen), role)}"
            )


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
        if len(found) > 1 and (filled := [name for name in found if _has_text(records, name)]):
            found = filled
        if len(found) > 1:
            holds = _has_text if any(_has_text(records, name) for name in found) else _is_present
            first = {name: next(n for n, each in enumerate(records, 1) if holds([each], name)) for name in found}
            is_spread = len({*first.values()}) > 1
            shown = [show(name) + (f" (row {row})" if is_spread else "") for name, row in first.items()]
            raise DataError(f"{where}: {' and '.join(shown)} may each hold the {role}. {_describe_choice(found, role)}")
        if found:
            return found[0]
    return None


def _describe_choice(names: Iterable[str], role: str) -> str:
    """The remedy where several fields may hold a prompt or an answer; Alpaca splits its prompt over two of them."""
    join = "Join the two texts of each row into one field 'prompt', or set" if {*names} >= _ALPACA else "Set"
    return f"{join} data.{role}_field to the one that does"


def _is_present(records: Iterable[Mapping[str, Any]], name: str) -> bool:
    """True if a record has a value there. Booleans label whole responses: they are not read as answers."""
    return any((value := get_field(record, name)) is not None and not isinstance(value, bool) for record in records)


def _has_text(records: Iterable[Mapping[str, Any]], name: str) -> bool:
    """True if a record has a value there that is not an empty text or list."""
    values = [get_field(each, name) for each in records if _is_present([each], name)]
    return any(value.strip() if isinstance(value, str) else value != [] for value in values)


def refuse_sharegpt(value: object, label: str, wanted: str = "a field 'messages', whose messages have") -> None:
    """Refuses a chat whose messages have `from` and `value`, by what to write in its place.

    Args:
        value: of a field.
        label: beginning of the message, with the row and the field.
        wanted: what to write, before the keys of messages.

    Raises:
        DataError: for a list of such messages.
    """
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(each, Mapping) and {"from", "value"} <= each.keys() for each in value)
    ):
        raise DataError(
            f"{label} have 'from' and 'value', which are not read. Write {wanted} 'role' and 'content': the role is "
            "user for human, assistant for gpt"
        )


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
