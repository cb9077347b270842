"""Report on a file of rows: format, columns, first row, tokens of turns, and rows that a run would leave out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from hf_algorithms.data._batches import PromptDataset, TooLong
from hf_algorithms.data._columns import Kind, describe_answer, describe_media
from hf_algorithms.data._rows import PromptRows, Row, RowFile
from hf_algorithms.data._text_blocks import TextBlocks
from hf_algorithms.data._turn_tokens import TurnTokens, describe_turns
from hf_algorithms.data._turns import TurnFormat
from hf_protocols.validation import show

__all__ = [
    "BlocksReport",
    "DataReport",
    "FileReport",
    "FirstRow",
    "LengthReport",
    "RoomReport",
    "TooLongReport",
    "describe_data",
]

_MOST_TEXT = 400
_MOST_IDS = 40
_NEW_TOKENS = 256
"""The default of `rollout.max_new_tokens`."""
_MANY = 1 << 40
"""Tokens of a block that no text fills."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """A file: its format, its rows, and what its columns hold; `prompt` and `answer` are names of fields.

    `weight` is that of its source, for the share of its rows in a batch.
    """

    path: str
    format: str
    rows: int
    weight: float | None = None
    kind: Kind
    prompt: str | None
    answer: str | None
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """The first row as read; with a tokenizer also its text after the template, and its ids."""

    where: str
    prompt: Any
    answer: str | None
    columns: dict[str, Any]
    text: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Lengths of all rows: their prompts, or texts to pretrain on."""

    unit: str
    least: int
    median: float
    mean: float
    most: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RoomReport:
    """Tokens of prompt and response together, those of the response, and what is left for a prompt.

    `is_lowered` says that nothing was given for the response, and that the default of a run does not fit.
    """

    context: int
    max_new_tokens: int
    prompt: int
    is_lowered: bool


@dataclass(frozen=True, kw_only=True)
class BlocksReport:
    """Blocks into which texts to pretrain on are cut."""

    block_tokens: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class TooLongReport:
    """Rows whose prompts have more than `limit` tokens, and what a run does with them."""

    limit: int
    rows: int
    action: TooLong


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """All that `hybridflow data check` prints."""

    files: tuple[FileReport, ...]
    rows: int
    without_answer: int
    first: FirstRow
    lengths: LengthReport | None
    too_long: TooLongReport | None
    turns: TurnTokens | None = None
    room: RoomReport | None = None
    blocks: BlocksReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it; NaN and infinities, which JSON lacks, are texts."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return found

    @property
    def refusal(self) -> str | None:
        """The reason for which a run refuses these rows; None if it takes them."""
        bound = self.too_long
        if bound is None or not bound.rows:
            return None
        if bound.action == "drop" and bound.rows == self.rows:
            return (
                f"{self.files[0].path}: every prompt has more than {bound.limit:,} tokens, so data.too_long = 'drop' "
                "leaves no row. Lower rollout.max_new_tokens, or set data.too_long = 'truncate_left'"
            )
        if bound.action != "error":
            return None
        return (
            f"{self.files[0].path}: {bound.rows:,} of {self.rows:,} prompts have more than {bound.limit:,} tokens, so "
            "a run refuses the rows. Shorten them, lower rollout.max_new_tokens, or set data.too_long to drop or cut "
            "such prompts"
        )

    def lines(self) -> list[str]:
        """The report to read."""
        found = [
            f"{each.path}: {each.format}, {each.rows:,} rows" + (f", weight {each.weight:g}" if each.weight else "")
            for each in self.files
        ]
        if self.rows < sum(each.rows for each in self.files):
            found.append(f"the first {self.rows:,} rows are used (data.max_eval_rows)")
        one = self.files[0]
        text = "text" if one.kind == "texts" else "answer"
        has_some = one.answer is not None or self.without_answer < self.rows
        found += [
            f"rows: {one.kind}; prompt = {_name(one.prompt)}, {describe_answer(one.kind, one.prompt, one.answer)}",
            f"other columns: {', '.join(one.columns) or 'none'}{describe_media(one.columns)}",
            *([f"rows without an answer: {self.without_answer:,}"] if has_some and self.without_answer else []),
            f"first row ({self.first.where})",
            f"  prompt: {_shorten(self.first.prompt)}",
            f"  {text}: {_shorten(self.first.answer)}",
            *(f"  {name}: {_shorten(value)}" for name, value in self.first.columns.items()),
        ]
        if self.first.ids is not None:
            ids = " ".join(map(str, self.first.ids[:_MOST_IDS])) + (" ..." if len(self.first.ids) > _MOST_IDS else "")
            found += [f"  after the template: {_shorten(self.first.text)}", f"  its {len(self.first.ids)} ids: {ids}"]
        if self.turns is not None:
            found += self.turns.lines()
        if (size := self.lengths) is not None:
            found.append(
                f"{size.unit}: {size.least:,} to {size.most:,}, median {size.median:,g}, mean {size.mean:,.1f}, "
                f"together {size.total:,}"
            )
        if (blocks := self.blocks) is not None:
            found.append(f"blocks of at most {blocks.block_tokens:,} tokens: {blocks.blocks:,} (data.block_tokens)")
        if (room := self.room) is not None:
            lowered = f"; {_NEW_TOKENS}, its default, does not fit" if room.is_lowered else ""
            found.append(
                f"room: {room.context:,} tokens, less {room.max_new_tokens:,} for a response "
                f"(rollout.max_new_tokens{lowered}), are {room.prompt:,} for a prompt"
            )
        if (bound := self.too_long) is not None:
            done = {"error": "a run is refused", "drop": "left out", "truncate_left": "cut on the left"}[bound.action]
            found.append(
                f"prompts above {bound.limit:,} tokens: {bound.rows:,} of {self.rows:,}"
                + (f"; {done} (data.too_long = {bound.action!r})" if bound.rows else "")
            )
        return found


def describe_data(
    rows: PromptRows,
    *,
    turns: TurnFormat | None = None,
    model_ids: Mapping[str, Collection[int]] | None = None,
    num_logits: int | None = None,
    context: int | None = None,
    max_new_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    too_long: TooLong = "error",
    block_tokens: int | None = None,
) -> DataReport:
    """Reads every row and reports what a run finds.

    Args:
        rows: as `open_rows` opened them, `texts` and `preferences` included.
        turns: how the model's prompts are written; None: lengths are in characters, and nothing is said about tokens.
        model_ids: as `describe_turns` takes them.
        num_logits: likewise.
        context: tokens of a prompt and its response together; None: unknown.
        max_new_tokens: of a response; None: the default of a run or, where that does not fit the context, what the
            longest prompt leaves.
        max_prompt_tokens: as `data.max_prompt_tokens`.
        too_long: as `data.too_long`.
        block_tokens: as `data.block_tokens`; None: texts are not split into blocks.

    Raises:
        DataError: for the first row that a run refuses.
    """
    without_answer = sum(row.answer is None for row in rows)
    measured = _Measured()
    kinds = {each.columns.kind for each in rows.files}
    if any(each.columns.prompt is None and each.columns.kind == "preferences" for each in rows.files):
        pass  # a prompt is what both responses begin with
    elif turns is None:
        measured = _Measured(_summarize("characters of a row's text", [_count_characters(row) for row in rows]))
    elif "texts" in kinds:
        measured = _measure_texts(rows, turns, block_tokens)
    else:
        measured = _measure_prompts(rows, turns, context, max_new_tokens, max_prompt_tokens, too_long)
    return DataReport(
        files=tuple(_describe_file(each, rows.weights) for each in rows.files),
        rows=len(rows),
        without_answer=without_answer,
        first=_show_first(rows, turns),
        turns=None if turns is None else describe_turns(turns, model_ids=model_ids, num_logits=num_logits),
        lengths=measured.lengths,
        too_long=measured.too_long,
        room=measured.room,
        blocks=measured.blocks,
    )


class _Measured(NamedTuple):
    lengths: LengthReport | None = None
    too_long: TooLongReport | None = None
    room: RoomReport | None = None
    blocks: BlocksReport | None = None


def _describe_file(file: RowFile, weights: Sequence[float] | None) -> FileReport:
    return FileReport(
        path=file.path,
        format=file.table.format,
        rows=len(file.table),
        weight=None if weights is None else weights[file.source],
        kind=file.columns.kind,
        prompt=file.columns.prompt,
        answer=file.columns.answer,
        columns=file.columns.others,
    )


def _measure_texts(rows: PromptRows, turns: TurnFormat, block_tokens: int | None) -> _Measured:
    texts = TextBlocks(rows, turns, block_tokens=block_tokens or _MANY, source=rows.files[0].path)
    blocks = None if block_tokens is None else BlocksReport(block_tokens=block_tokens, blocks=len(texts))
    return _Measured(_summarize("tokens of a text and its end", texts.text_lengths), blocks=blocks)


def _measure_prompts(
    rows: PromptRows,
    turns: TurnFormat,
    context: int | None,
    max_new_tokens: int | None,
    max_prompt_tokens: int | None,
    action: TooLong,
) -> _Measured:
    lengths = list(PromptDataset(rows, turns.tokenizer, turns=turns, source=rows.files[0].path).prompt_lengths)
    room = None if context is None else _find_room(context, max_new_tokens, max(lengths))
    bounds = [each for each in (max_prompt_tokens, None if room is None else room.prompt) if each is not None]
    if not bounds:
        return _Measured(_summarize("tokens of a prompt", lengths))
    count = sum(length > min(bounds) for length in lengths)
    too_long = TooLongReport(limit=min(bounds), rows=count, action=action)
    return _Measured(_summarize("tokens of a prompt", lengths), too_long, room)


def _find_room(context: int, max_new_tokens: int | None, longest: int) -> RoomReport:
    is_lowered = max_new_tokens is None and context <= _NEW_TOKENS
    new = max_new_tokens or (max(1, context - longest) if is_lowered else _NEW_TOKENS)
    return RoomReport(context=context, max_new_tokens=new, prompt=context - new, is_lowered=is_lowered)


def _summarize(unit: str, lengths: Sequence[int]) -> LengthReport:
    return LengthReport(
        unit=unit,
        least=min(lengths),
        median=float(median(lengths)),
        mean=sum(lengths) / len(lengths),
        most=max(lengths),
        total=sum(lengths),
    )


def _show_first(rows: PromptRows, turns: TurnFormat | None) -> FirstRow:
    row = rows[0]
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(each) for each in row.prompt]
    ids = None
    if turns is not None and row.prompt:
        (column,) = PromptDataset([row], turns.tokenizer, turns=turns).prompts([0])["prompt_ids"].unbind()
        ids = tuple(column.tolist())
    return FirstRow(
        where=rows.where(0),
        prompt=None if rows.files[0].columns.prompt is None else prompt,
        answer=row.answer,
        columns=dict(row.columns),
        text=None if ids is None or turns is None else str(turns.tokenizer.decode(list(ids))),
        ids=ids,
    )


def _count_characters(row: Row) -> int:
    if isinstance(row.prompt, str):
        return len(row.prompt or row.answer or "")
    return sum(len(str(each.get("content") or "")) for each in row.prompt)


def _name(field: str | None) -> str:
    return "none" if field is None else show(field)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text):,} characters)"
