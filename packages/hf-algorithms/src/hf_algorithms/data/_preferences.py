"""Pairs of responses to one prompt, of which one is preferred: rows for reward models and cost models."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.data._columns import (
    PAIR_PROMPT_COLUMNS,
    check_blanks,
    find_prompt_of_pairs,
    get_field,
    list_blanks,
    refuse_sharegpt,
)
from hf_algorithms.data._file_rows import FileRows, build_order
from hf_algorithms.data._jagged_columns import build_jagged, check_rows
from hf_algorithms.data._rows import SAMPLE_RECORDS, Message, Row, read_message
from hf_algorithms.data._sequences import SequenceEncoder, cut_to
from hf_algorithms.data._system_column import begin_with, check_field, read_system
from hf_algorithms.data._tables import Table, open_tables
from hf_algorithms.data._turns import TurnFormat, describe_texts
from hf_protocols.errors import DataError
from hf_protocols.validation import shorten_list, show

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

__all__ = ["PairFile", "PreferenceDataset", "PreferenceRow", "load_preferences", "open_preferences"]

Labels = Literal["reward", "cost"]
Text = str | tuple[Message, ...]

_PAIR = ("chosen", "rejected")
_NUMBERED = ("response_0", "response_1")
_BETTER, _SAFER = "better_response_id", "safer_response_id"
_SAFE = ("is_response_0_safe", "is_response_1_safe")


@dataclass(frozen=True, kw_only=True)
class PreferenceRow:
    """A prompt and two responses.

    Attributes:
        prompt: text, or the messages of a chat; then the responses are messages as well.
        chosen: the preferred response; for a cost model the safer one.
        rejected: the other response.
        unsafe: for a cost model, of each response in this order.
        where: place of the row, such as `pairs.jsonl, line 3`.
        has_system: the prompt's system message is from the column `system`.
    """

    prompt: Text
    chosen: Text
    rejected: Text
    unsafe: tuple[bool, bool] | None = None
    where: str = ""
    has_system: bool = False

    def as_rows(self) -> tuple[Row, Row]:
        """The two conversations as prompts with answers, for what reads texts alone."""
        sides = (self.chosen, self.rejected)
        texts = (
            side if isinstance(side, str) else "".join(str(each.get("content")) for each in side) for side in sides
        )
        first, second = (Row(self.prompt, text) for text in texts)
        return first, second


@dataclass(frozen=True, kw_only=True)
class PairFile:
    """A file of pairs: its path and records, what they must say, the prompt's field, and the number of its source."""

    path: str
    table: Table
    labels: Labels
    prompt_field: str | None
    source: int = 0
    blanks: tuple[tuple[str, str], ...] = ()
    """Columns that might hold the prompt as well, and have no text in the first rows; each with `prompt_field`."""

    def build_row(self, record: Mapping[str, Any], number: int) -> PreferenceRow:
        """Returns the pair of a record.

        Raises:
            DataError: for a record of another form, or whose sides are equal.
        """
        try:
            check_blanks(record, self.blanks)
        except DataError as error:
            raise DataError(f"{self.table.where(number)}{error}") from None
        read = _read_cost if self.labels == "cost" else _read_pair
        return read(record, self.table.where(number), self.prompt_field)

    def describe(self) -> str:
        """One line: the format, how many pairs there are, and where their prompts stand."""
        prompt = show(self.prompt_field) if self.prompt_field else "what both sides begin with"
        return f"{self.path} is {self.table.format} of {len(self.table):,} rows: preferences; prompt = {prompt}"


def open_preferences(
    sources: Iterable[tuple[str, float | None]], *, labels: Labels = "reward", prompt_field: str | None = None
) -> FileRows[PreferenceRow]:
    """Opens files of pairs: `prompt, chosen, rejected`, or the columns of safe-rlhf. Rows are read one by one.

    Sides are texts, or messages of a chat. Where both sides begin with the messages of the prompt, or the pair has no
    prompt of its own, the messages that both begin with are the prompt. A column `system` is its system message.
    safe-rlhf's rows have `prompt, response_0, response_1`, with `better_response_id` for a reward model, and
    `safer_response_id, is_response_0_safe, is_response_1_safe` for a cost model.

    Args:
        sources: a path, a pattern such as `data/*.jsonl`, or a hub name, and its weight or None.
        labels: what a row must say: which response is better, or which is safer and whether each is safe.
        prompt_field: field of the prompt; None: found by its name.

    Raises:
        DataError: for a file that cannot be opened or is empty; when rows are read, with the line for a row of another
            form and for one whose sides are equal.
    """
    files, weights = [], []
    for number, (path, weight) in enumerate(sources):
        weights.append(weight)
        for each, table in open_tables(path):
            if not len(table):
                raise DataError(f"{each} has no rows. Add at least one pair")
            records = list(islice(table.records(), SAMPLE_RECORDS))
            field = find_prompt_of_pairs(records, where=table.where(0), prompt_field=prompt_field)
            blanks = list_blanks(records, field, prompt_field, PAIR_PROMPT_COLUMNS)
            files.append(
                PairFile(path=each, table=table, labels=labels, prompt_field=field, source=number, blanks=blanks)
            )
    given = [each for each in weights if each is not None]
    return FileRows(files, given or None)


def load_preferences(
    path: str | Path, *, labels: Labels = "reward", prompt_field: str | None = None
) -> list[PreferenceRow]:
    """Reads every pair of what `open_preferences` opens.

    Raises:
        DataError: as `open_preferences` does.
    """
    return list(open_preferences([(str(path), None)], labels=labels, prompt_field=prompt_field))


class PreferenceDataset:
    """Pairs as token ids of one tokenizer: checked and counted once, and encoded again for each batch.

    Args:
        rows: what `open_preferences` opened, or `load_preferences` read.
        tokenizer: of the model that is trained.
        max_tokens: of a prompt and a response together; see `cut_to`.
        source: where the rows are from, for messages: key and value.
        turns: how chats are written; by default with the tokenizer's own template.

    Raises:
        DataError: for a row without tokens, two sides of the same tokens, as they are or as they are cut, and a chat
            without a template.
    """

    def __init__(
        self,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        source: str,
        turns: TurnFormat | None = None,
    ) -> None:
        self.source = source
        self.num_cut = 0
        """Rows that lost their start."""
        self.num_texts = 0
        """Rows that no chat template writes."""
        self._rows = rows
        self._turns = turns or TurnFormat(tokenizer, label=source)
        self._encoder = SequenceEncoder(tokenizer, label=source, turns=self._turns)
        self._max_tokens = max_tokens
        self._lengths = {"prompt": array("q"), "chosen": array("q"), "rejected": array("q")}
        self._count_tokens()
        self.order = build_order(rows, range(len(rows)), source=source)
        """In which order pairs are drawn."""

    def __len__(self) -> int:
        return len(self._lengths["prompt"])

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self._lengths["prompt"])

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest response."""
        return max(max(self._lengths[side]) for side in _PAIR)

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the two sides of the largest row, both as long as the longer one, and its place."""
        totals = [2 * (prompt + max(sides)) for prompt, *sides in zip(*self._lengths.values(), strict=True)]
        return max(totals), self._rows[totals.index(max(totals))].where

    def describe_rows(self) -> list[str]:
        """Lines for the user: how many pairs there are, and how many are cut."""
        lines = [f"{self.source}: {len(self):,} rows"]
        if self.num_cut:
            lines.append(
                f"{self.source}: {self.num_cut} of {len(self)} rows are longer than the model's context of "
                f"{self._max_tokens} tokens and lose their start"
            )
        texts = describe_texts(self.num_texts, len(self), source=self.source)
        return [*lines, *([texts] if texts else [])]

    def preview(self) -> dict[str, list[int]]:
        """Token ids of the first pair's prompt, `response` (chosen) and `rejected`."""
        return dict(zip(("prompt", "response", "rejected"), self._cut(self._encode(self._rows[0])), strict=True))

    def batch(self, indices: Iterable[int]) -> TensorDict:
        """Returns the chosen rows.

        `row_id` int64 [B]; `prompt_ids`, `response_ids` (chosen) and `rejected_ids`, jagged int64 [B, tokens]; and of
        rows for a cost model `signs` float32 [B, 2], +1 for an unsafe response and -1 for a safe one.

        Raises:
            BatchError: for a row that the data set does not have.
        """
        import torch
        from tensordict import TensorDict

        chosen = check_rows(indices, len(self))
        rows = [self._rows[row] for row in chosen]
        ids = [self._cut(self._encode(row)) for row in rows]
        columns = {"row_id": torch.tensor(chosen, dtype=torch.int64, device="cpu")}
        for place, name in enumerate(("prompt_ids", "response_ids", "rejected_ids")):
            columns[name] = build_jagged([parts[place] for parts in ids], torch.int64)
        signs = [row.unsafe for row in rows]
        if all(each is not None for each in signs):
            sides = [[1.0 if side else -1.0 for side in each or ()] for each in signs]
            columns["signs"] = torch.tensor(sides, dtype=torch.float32, device="cpu")
        return TensorDict(columns, batch_size=[len(chosen)])

    def _count_tokens(self) -> None:
        for row in self._rows:
            if row.has_system and self._turns.system_prompt is not None:
                raise DataError(
                    f"{row.where}: has a column 'system', and data.system_prompt is set as well. Remove one of the two"
                )
            if not isinstance(row.prompt, str) and not self._turns.has_template:
                raise DataError(
                    f"{row.where}: is a chat, and the tokenizer has no chat template. Set data.chat_template to a file "
                    "or a text"
                )
            self.num_texts += self._turns.as_chat(row.prompt) is None
            ids = self._encode(row)
            cut = self._cut(ids)
            self.num_cut += cut != ids
            _check_pair(row, ids, cut, self._max_tokens)
            for lengths, part in zip(self._lengths.values(), cut, strict=True):
                lengths.append(len(part))

    def _encode(self, row: PreferenceRow) -> list[list[int]]:
        """The ids of the prompt and of both responses."""
        sides, where = (row.chosen, row.rejected), row.where or None
        if not isinstance(row.prompt, str):
            return self._encoder.encode_chat(row.prompt, [_messages(side) for side in sides], where=where)
        pairs = [self._encoder.encode_text(row.prompt, str(side), where=where) for side in sides]
        return [pairs[0][0], pairs[0][1], pairs[1][1]]

    def _cut(self, ids: list[list[int]]) -> list[list[int]]:
        return cut_to(self._max_tokens, ids[0], ids[1:])


def _check_pair(row: PreferenceRow, ids: list[list[int]], cut: list[list[int]], max_tokens: int) -> None:
    """Refuses a pair of which nothing can be learned."""
    if not cut[0]:
        raise DataError(f"{row.where}: its prompt has no tokens. Add one, or remove the row")
    if cut[1] == cut[2]:
        reason = f"the last {max_tokens} tokens of both sides are" if ids[1] != ids[2] else "both sides are"
        raise DataError(f"{row.where}: {reason} the same to this tokenizer, so nothing can be learned. Remove the row")


def _messages(side: Text) -> tuple[Message, ...]:
    return ({"role": "assistant", "content": side},) if isinstance(side, str) else side


def _read_pair(record: Mapping[str, Any], where: str, prompt_field: str | None) -> PreferenceRow:
    if all(name in record for name in _PAIR):
        chosen, rejected = (_read_text(record, name, where) for name in _PAIR)
    elif all(name in record for name in (*_NUMBERED, _BETTER)):
        chosen, rejected = _order(record, _BETTER, where)
    else:
        raise _lacking(record, where, f"chosen and rejected, or {', '.join((*_NUMBERED, _BETTER))}")
    return _build_row(record, where, prompt_field, chosen, rejected)


def _read_cost(record: Mapping[str, Any], where: str, prompt_field: str | None) -> PreferenceRow:
    wanted = (*_NUMBERED, _SAFER, *_SAFE)
    if not all(name in record for name in wanted):
        raise _lacking(record, where, ", ".join(wanted))
    chosen, rejected = _order(record, _SAFER, where)
    for name in _SAFE:
        if not isinstance(record[name], bool):
            raise DataError(f"{where}: {name} = {show(record[name])} is not true or false. Correct it")
    unsafe = [not record[name] for name in _SAFE]
    first = record[_SAFER]
    return _build_row(record, where, prompt_field, chosen, rejected, (unsafe[first], unsafe[1 - first]))


def _order(record: Mapping[str, Any], key: str, where: str) -> tuple[Text, Text]:
    """The two numbered responses, the one that `key` names first."""
    first = record[key]
    if type(first) is not int or first not in (0, 1):
        raise DataError(f"{where}: {key} = {show(first)} is not 0 or 1. Correct it")
    sides = [_read_text(record, name, where) for name in _NUMBERED]
    return sides[first], sides[1 - first]


def _build_row(
    record: Mapping[str, Any],
    where: str,
    prompt_field: str | None,
    chosen: Text,
    rejected: Text,
    unsafe: tuple[bool, bool] | None = None,
) -> PreferenceRow:
    if chosen == rejected:
        raise DataError(f"{where}: its two sides are equal, {show(chosen)}. Remove the row")
    prompt = None
    if prompt_field is not None and get_field(record, prompt_field) is not None:
        prompt = _read_text(record, prompt_field, where)
    if isinstance(chosen, tuple) and isinstance(rejected, tuple):
        prompt, chosen, rejected = _split_chats(prompt, chosen, rejected, where)
    elif prompt is None:
        there = ", ".join(shorten_list([show(name) for name in record]))
        words = [side.split()[:1] for side in (chosen, rejected) if isinstance(side, str)]
        move = "Move what both texts begin with into" if words[1:] == words[:1] else "Add"
        raise DataError(
            f"{where} has no prompt; its fields are {there}. Texts need one, and only chats may leave it out. {move} a "
            "field 'prompt', or set data.prompt_field"
        )
    if isinstance(prompt, str) and not (isinstance(chosen, str) and isinstance(rejected, str)):
        prompt = ({"role": "user", "content": prompt},)
    system = read_system(record, where)
    if system:
        prompt = begin_with(system, prompt, where)
    if not isinstance(prompt, str):
        chosen, rejected = _messages(chosen), _messages(rejected)
        _check_chats(prompt, (chosen, rejected), where)
    return PreferenceRow(
        prompt=prompt, chosen=chosen, rejected=rejected, unsafe=unsafe, where=where, has_system=bool(system)
    )


def _split_chats(
    prompt: Text | None, chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str
) -> tuple[Text, tuple[Message, ...], tuple[Message, ...]]:
    """The prompt and what follows it on each side; sides may be whole chats, next to a prompt of their own or not."""
    common = sum(1 for _ in _take_equal(chosen, rejected))
    if prompt is not None and not _holds(chosen[:common], prompt):
        return prompt, chosen, rejected
    if not 0 < common < min(len(chosen), len(rejected)):
        raise DataError(
            f"{where}: without 'prompt' both sides must begin with the same messages and end with different ones. "
            "Add the column"
        )
    return chosen[:common], chosen[common:], rejected[common:]


def _holds(messages: Sequence[Message], prompt: Text) -> bool:
    """True if the prompt is in messages: those of a chat, or a text as what a user says."""
    if not messages or messages[0]["role"] == "assistant":
        return False
    if isinstance(prompt, str):
        said = [str(each["content"]).strip() for each in messages if each["role"] == "user"]
        return prompt.strip() in said
    starts = range(len(messages) - len(prompt) + 1)
    return any(tuple(messages[start : start + len(prompt)]) == prompt for start in starts)


def _check_chats(prompt: tuple[Message, ...], sides: Iterable[tuple[Message, ...]], where: str) -> None:
    """Refuses a response that begins with another prompt, or that the assistant does not end."""
    for side in sides:
        if prompt[-1]["role"] == "user" and side[0]["role"] in ("system", "user"):
            raise DataError(
                f"{where}: a side begins with {show(dict(side[0]))}, which is not in its prompt. Correct one of the two"
            )
        if side[-1]["role"] != "assistant" or not isinstance(side[-1]["content"], str):
            raise DataError(
                f"{where}: a side ends with {show(dict(side[-1]))}, which is not a text of the assistant. Correct it"
            )


def _take_equal(first: Sequence[Message], second: Sequence[Message]) -> Iterable[Message]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def _read_text(record: Mapping[str, Any], name: str, where: str) -> Text:
    value = get_field(record, name)
    if isinstance(value, str):
        check_field(value, name, where)
        return value
    is_chat = isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
    refuse_sharegpt(value, f"{where}: the messages of {name}", "messages with")
    if not is_chat or not all(isinstance(each.get("role"), str) and "content" in each for each in value):
        raise DataError(f"{where}: {name} is neither text nor a list of messages with role and content. Correct it")
    messages = [read_message(each, f"{where}: message {number} of {name}") for number, each in enumerate(value, 1)]
    messages = [each if "content" in each else {**each, "content": None} for each in messages]
    for message in messages:
        check_field(json.dumps(message, ensure_ascii=False), name, where)
    return tuple(messages)


def _lacking(record: Mapping[str, Any], where: str, wanted: str) -> DataError:
    there = ", ".join(shorten_list([show(name) for name in record])) or "none"
    return DataError(f"{where} lacks {wanted}; its fields are {there}. Add the fields, or name other files")
