"""Report on a file of rows: format, columns, first row, tokens of turns, and rows that a run would leave out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hf_algorithms.data._batches import PromptDataset, TooLong
from hf_algorithms.data._rows import Row, Rows, open_rows
from hf_algorithms.data._turn_tokens import TurnTokens, describe_turns
from hf_algorithms.data._turns import TurnFormat
from hf_protocols.arguments import show

__all__ = ["DataReport", "FileReport", "FirstRow", "LengthReport", "TooLongReport", "describe_data"]

_MOST_TEXT = 400
_MOST_IDS = 40


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """A file: its format, its rows, and what its columns hold; `prompt` and `answer` are names of fields."""

    path: str
    format: str
    rows: int
    kind: str
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

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report to read."""
        found = [f"{each.path}: {each.format}, {each.rows:,} rows" for each in self.files]
        one = self.files[0]
        text = "text" if one.kind == "texts" else "answer"
        found += [
            f"rows: {one.kind}; prompt = {_name(one.prompt)}, {text} = {_name(one.answer)}",
            f"other columns: {', '.join(one.columns) or 'none'}",
            *([f"rows without an answer: {self.without_answer:,}"] if self.without_answer and one.answer else []),
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
        if (bound := self.too_long) is not None:
            done = {"error": "a run is refused", "drop": "left out", "truncate_left": "cut on the left"}[bound.action]
            found.append(
                f"prompts above {bound.limit:,} tokens: {bound.rows:,} of {self.rows:,}"
                + (f"; {done} (data.too_long = {bound.action!r})" if bound.rows else "")
            )
        return found


def describe_data(
    sources: Sequence[tuple[str, float | None]],
    *,
    turns: TurnFormat | None = None,
    model_ids: Mapping[str, Collection[int]] | None = None,
    num_logits: int | None = None,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    max_prompt_tokens: int | None = None,
    too_long: TooLong = "error",
) -> DataReport:
    """Reads every row and reports what a run finds.

    Args:
        sources: paths and weights, as `open_rows` takes them.
        turns: how the model's prompts are written; None: lengths are in characters, and nothing is said about tokens.
        model_ids: as `describe_turns` takes them.
        num_logits: likewise.
        prompt_field: as `data.prompt_field`.
        answer_field: as `data.answer_field`.
        max_prompt_tokens: what model and configuration leave for a prompt; None: unknown.
        too_long: as `data.too_long`.

    Raises:
        DataError: for the first row that a run refuses.
    """
    rows = open_rows(sources, prompt_field=prompt_field, answer_field=answer_field, promptless=("texts", "preferences"))
    without_answer = sum(row.answer is None for row in rows)
    lengths, bound = _measure(rows, turns, max_prompt_tokens, too_long)
    return DataReport(
        files=tuple(
            FileReport(
                path=each.path,
                format=each.table.format,
                rows=len(each.table),
                kind=each.columns.kind,
                prompt=each.columns.prompt,
                answer=each.columns.answer,
                columns=each.columns.others,
            )
            for each in rows.files
        ),
        rows=len(rows),
        without_answer=without_answer,
        first=_show_first(rows, turns),
        lengths=lengths,
        too_long=bound,
        turns=None if turns is None else describe_turns(turns, model_ids=model_ids, num_logits=num_logits),
    )


def _measure(
    rows: Rows, turns: TurnFormat | None, limit: int | None, action: TooLong
) -> tuple[LengthReport | None, TooLongReport | None]:
    if any(each.columns.prompt is None and each.columns.kind == "preferences" for each in rows.files):
        return None, None  # a prompt is what both responses begin with
    if turns is None:
        return _summarize("characters of a row's text", [_count_characters(row) for row in rows]), None
    data = PromptDataset(rows, turns.tokenizer, turns=turns, source=rows.files[0].path, texts=True)
    if any(each.columns.kind == "texts" for each in rows.files):
        return _summarize("tokens of a text and its end", [1 + each for each in data.response_lengths(1 << 40)]), None
    found = _summarize("tokens of a prompt", list(data.prompt_lengths))
    if limit is None:
        return found, None
    count = sum(length > limit for length in data.prompt_lengths)
    return found, TooLongReport(limit=limit, rows=count, action=action)


def _summarize(unit: str, lengths: Sequence[int]) -> LengthReport:
    return LengthReport(
        unit=unit,
        least=min(lengths),
        median=float(median(lengths)),
        mean=sum(lengths) / len(lengths),
        most=max(lengths),
        total=sum(lengths),
    )


def _show_first(rows: Rows, turns: TurnFormat | None) -> FirstRow:
    row = rows[0]
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(each) for each in row.prompt]
    ids = None
    if turns is not None and row.prompt:
        (column,) = PromptDataset([row], turns.tokenizer, turns=turns).prompts([0])["prompt_ids"].unbind()
        ids = tuple(column.tolist())
    return FirstRow(
        where=rows.where(0),
        prompt=prompt or None,
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
