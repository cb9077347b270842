"""The parts of the page that show samples: an iteration's rewards, groups side by side, one sample's tokens."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

from hf_algorithms.report._sample_files import SampleRecord
from hf_algorithms.report._tokens import COLOURINGS, NO_RATIO, describe_shades, list_colourings, render_tokens
from hf_algorithms.report.live._run import LiveRun
from hf_protocols.drawing import format_number, render_table

__all__ = [
    "Bin",
    "Choice",
    "compute_bins",
    "export_samples",
    "render_histogram",
    "render_sample_part",
    "render_samples_part",
]

_MOST_GROUPS = 12
_MOST_IN_GROUP = 16
_MOST_CHARACTERS = 400
"""Of a text in a card; the sample's own view has all of it."""
_LONGEST_TEXT = 100_000


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The reader's choice.

    Attributes:
        iteration: None for the last one.
        set: name of the rows; empty for the first.
        reward: whose histogram is drawn; empty for the score.
        bin: of the histogram, or None.
        page: of groups, from 0.
        row: number of a sample, or None.
        colouring: of its tokens; empty for the first that has values.
    """

    iteration: int | None = None
    set: str = ""
    reward: str = ""
    bin: int | None = None
    page: int = 0
    row: int | None = None
    colouring: str = ""


class _Chosen:
    """The rows that a choice means."""

    def __init__(self, run: LiveRun, choice: Choice) -> None:
        self.iteration, self.before, self.after = run.samples.nearest(choice.iteration)
        self.rows: list[SampleRecord] = []
        self.notes: list[str] = []
        if self.iteration is not None:
            self.rows, self.notes = run.samples.read(self.iteration)
        self.sets = list(dict.fromkeys(row.set for row in self.rows))
        self.set = choice.set if choice.set in self.sets else next(iter(self.sets), "")
        self.of_set = [row for row in self.rows if row.set == self.set]
        names = dict.fromkeys(name for row in self.of_set for name in row.rewards)
        has_score = any(row.score is not None for row in self.of_set)
        self.rewards = [""] * has_score + list(names)
        self.reward = choice.reward if choice.reward in self.rewards else next(iter(self.rewards), "")
        values = [value for row in self.of_set if (value := row.reward(self.reward)) is not None]
        self.bins = compute_bins(values)
        self.bin: Bin | None = None
        if choice.bin is not None and 0 <= choice.bin < len(self.bins):
            self.bin = self.bins[choice.bin]
        self.shown = [row for row in self.of_set if self.bin is None or self.bin.holds(row.reward(self.reward))]


def render_samples_part(run: LiveRun, choice: Choice) -> str:
    """Returns the histogram of an iteration's rewards, and its groups, those with the widest spread first."""
    found = _Chosen(run, choice)
    if found.iteration is None:
        return _note("No samples: the run has no file samples/ITERATION.jsonl.")
    notes = "".join(map(_note, found.notes))
    if not found.rows:
        return _navigate(found, run, choice) + (notes or _note(f"samples/{found.iteration}.jsonl is empty."))
    parts = [_navigate(found, run, choice), notes]
    if found.bins:
        chosen = None if found.bin is None else found.bins.index(found.bin)
        parts.append(_choose("reward", found.rewards, found.reward, {"": "score"}))
        parts.append(render_histogram(found.bins, name=found.reward or "score", chosen=chosen))
    return "".join(parts) + _list_groups(found, choice)


def _navigate(found: _Chosen, run: LiveRun, choice: Choice) -> str:
    """Buttons to the iterations before and after, a choice of rows, and the export."""

    def step(name: str, key: str, to: int | None) -> str:
        change = f'data-set="{_change(iteration=to, row="", bin="", page="")}"' if to is not None else "disabled"
        return f'<button data-key="{key}" {change}>{name}{"" if to is None else f" {to}"}</button>'

    wanted = choice.iteration
    asked = f" <small>(at or before {wanted})</small>" if wanted is not None and wanted != found.iteration else ""
    query = asdict(choice) | {"run": run.index, "iteration": found.iteration}
    export = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    return (
        f'<div class="bar" data-iteration="{found.iteration}">{step("&larr;", "before", found.before)}'
        f"<b>Iteration {found.iteration}</b>{asked}"
        f"{step('&rarr;', 'after', found.after)}{_choose('set', found.sets, found.set, {})}"
        f'<a href="samples.jsonl?{escape(export)}" download>Export {len(found.shown)} rows</a></div>'
    )


def _choose(key: str, names: Sequence[str], chosen: str, titles: Mapping[str, str]) -> str:
    if len(names) < 2:
        return ""
    buttons = "".join(
        f'<button data-set="{_change(**{key: name}, bin="", page="", row="")}" '
        f'aria-pressed="{"true" if name == chosen else "false"}">{escape(titles.get(name, name))}</button>'
        for name in names
    )
    return f'<span class="choice" role="group" aria-label="{key}">{buttons}</span>'


def _list_groups(found: _Chosen, choice: Choice) -> str:
    groups: dict[str, list[SampleRecord]] = {}
    for row in found.of_set:
        groups.setdefault(row.group, []).append(row)
    shown = {row.number for row in found.shown}
    spreads = {group: _spread(rows, found.reward) for group, rows in groups.items()}
    kept = [group for group, rows in groups.items() if any(row.number in shown for row in rows)]
    kept.sort(key=lambda group: -(spreads[group] or 0.0))
    several = [group for group, rows in groups.items() if len(rows) > 1 and spreads[group] is not None]
    equal = sum(spreads[group] == 0 for group in several)
    share = f", {equal / len(several):.0%} of them with equal rewards" if several else ""
    chosen = f" {found.reward or 'score'} {found.bin.label}," if found.bin else ""
    lead = f"<p>{len(found.shown)} responses,{escape(chosen)} to {len(kept)} prompts{share}.</p>"
    if any(row.lacks_ratios for row in found.shown):
        lead += _note(f"Ratios are {NO_RATIO}.")
    pages = -(-len(kept) // _MOST_GROUPS)
    page = min(max(choice.page, 0), max(pages - 1, 0))
    cards = "".join(
        _group([row for row in groups[group] if row.number in shown], spreads[group], choice)
        for group in kept[page * _MOST_GROUPS : (page + 1) * _MOST_GROUPS]
    )
    return lead + cards + (_turn_pages(page, pages) if pages > 1 else "")


def _spread(rows: Sequence[SampleRecord], reward: str) -> float | None:
    values = [value for row in rows if (value := row.reward(reward)) is not None]
    return statistics.pstdev(values) if values else None


def _turn_pages(page: int, pages: int) -> str:
    def turn(name: str, to: int) -> str:
        change = f'data-set="{_change(page=to)}"' if 0 <= to < pages else "disabled"
        return f"<button {change}>{name}</button>"

    return f'<div class="bar">{turn("&larr;", page - 1)}page {page + 1} of {pages}{turn("&rarr;", page + 1)}</div>'


def _group(rows: Sequence[SampleRecord], spread: float | None, choice: Choice) -> str:
    first = rows[0]
    facts = [f"standard deviation {format_number(spread)}"] if spread is not None and len(rows) > 1 else []
    facts += [f"answer {_cut(first.answer, 80)}"] if first.answer is not None else []
    cards = "".join(_card(row, is_chosen=row.number == choice.row) for row in rows[:_MOST_IN_GROUP])
    rest = len(rows) - _MOST_IN_GROUP
    more = _note(f"{rest} further responses of this group. Choose a bar above to narrow them.") if rest > 0 else ""
    return (
        f'<article class="group"><pre class="prompt">{escape(_cut(first.prompt, _MOST_CHARACTERS))}</pre>'
        f'<small>{escape("; ".join(facts))}</small><div class="cards">{cards}</div>{more}</article>'
    )


def _card(row: SampleRecord, *, is_chosen: bool) -> str:
    facts = [f"score {format_number(row.score)}"] if row.score is not None else []
    facts += [f"{name} {format_number(value)}" for name, value in row.rewards.items()]
    facts += [f"advantage {format_number(row.advantage)}"] if row.advantage is not None else []
    facts += [f"{row.num_tokens} tokens"] if row.num_tokens else []
    facts += ["cut"] if row.finish_reason == "length" else []
    # a button holds no block, so its text is in spans
    return (
        f'<button class="card" data-key="row{row.number}" data-row="{row.number}" data-set="{_change(row=row.number)}" '
        f'aria-pressed="{"true" if is_chosen else "false"}"><small>{escape(", ".join(facts))}</small>'
        f'<span class="said">{escape(_cut(row.response, _MOST_CHARACTERS)) or "<i>nothing</i>"}</span></button>'
    )


def render_sample_part(run: LiveRun, choice: Choice) -> str:
    """Returns one sample with its rewards, and its tokens where the run wrote them; empty without a chosen row."""
    if choice.row is None:
        return ""
    found = _Chosen(run, choice)
    row = next((row for row in found.rows if row.number == choice.row), None)
    if row is None:
        return _note(f"samples/{found.iteration}.jsonl has no line {choice.row + 1}.")
    facts = {
        "sample (epoch/row/number/attempt)": row.sample or None,
        "score": row.score,
        **row.rewards,
        "advantage": row.advantage,
        "finish reason": row.finish_reason or None,
        "tokens": row.num_tokens or None,
        "ratio": NO_RATIO if row.lacks_ratios else None,
        "trained tokens": sum(token.is_trained for token in row.tokens) if row.tokens else None,
        **row.extra,
    }
    table = render_table(
        ("", ""), [(name, _show(value)) for name, value in facts.items() if value is not None], style="facts"
    )
    answer = "" if row.answer is None else f"<h4>answer</h4><pre>{escape(_cut(row.answer, _LONGEST_TEXT))}</pre>"
    return (
        f'<div class="bar"><h3>Line {row.number + 1} of iteration {found.iteration}</h3>'
        f'<button data-key="close" data-set="row=">Close</button></div>'
        f"<h4>prompt</h4><pre>{escape(_cut(row.prompt, _LONGEST_TEXT))}</pre>{answer}"
        f"<h4>response</h4>{_show_response(row, choice.colouring)}"
        f"{table}"
    )


def _show_response(row: SampleRecord, colouring: str) -> str:
    if not row.tokens:
        text = escape(_cut(row.response, _LONGEST_TEXT)) or "<i>nothing</i>"
        return f"<pre>{text}</pre>" + _note("The run wrote no tokens of this response.")
    known = list_colourings(row.tokens)
    chosen = colouring if colouring in known else known[0]
    buttons = "".join(
        f'<button data-key="colour-{name}" data-set="{_change(colouring=name)}" '
        f'aria-pressed="{"true" if name == chosen else "false"}">{COLOURINGS[name]}</button>'
        for name in known
    )
    return (
        f'<span class="choice colourings" role="group" aria-label="colour">{buttons}</span>'
        f"<p><small>{describe_shades(chosen)}</small></p>{render_tokens(row.tokens, chosen)}"
    )


def export_samples(run: LiveRun, choice: Choice) -> str:
    """Returns the rows of a choice as JSON lines."""
    found = _Chosen(run, choice)
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in found.shown)


def _show(value: object) -> str:
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most:,} characters more]"


def _change(**values: object) -> str:
    return escape(urlencode({name: "" if value is None else value for name, value in values.items()}))


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


_MOST_BINS = 12
_BAR_HEIGHT = 64.0


class Bin(NamedTuple):
    """Values from `low` to `high`; `high` itself belongs to the next bin, except in the last one."""

    low: float
    high: float
    num_values: int
    is_last: bool

    def holds(self, value: float | None) -> bool:
        """Returns True if the value lies in the bin."""
        return value is not None and (self.low <= value < self.high or (self.is_last and value == self.high))

    @property
    def label(self) -> str:
        """The value, or the range."""
        if self.low == self.high:
            return format_number(self.low)
        return f"{format_number(self.low)} to {format_number(self.high)}"


def compute_bins(values: Sequence[float]) -> list[Bin]:
    """Returns the bins of finite values: one for each value where there are few, else of equal width."""
    distinct = sorted(set(values))
    if len(distinct) <= _MOST_BINS:
        return [Bin(value, value, values.count(value), is_last=True) for value in distinct]
    low, high = distinct[0], distinct[-1]
    width = (high - low) / _MOST_BINS
    if not (width > 0 and math.isfinite(width)):
        return [Bin(low, high, len(values), is_last=True)]
    edges = [low + number * width for number in range(_MOST_BINS)] + [high]
    empty = [Bin(edges[n], edges[n + 1], 0, is_last=n == _MOST_BINS - 1) for n in range(_MOST_BINS)]
    return [each._replace(num_values=sum(map(each.holds, values))) for each in empty]


def render_histogram(bins: Sequence[Bin], *, name: str, chosen: int | None) -> str:
    """Returns one button a bin, which chooses it; the chosen one takes the choice back.

    Args:
        bins: at least one.
        name: what is counted.
        chosen: number of a bin, or None.
    """
    most = max(each.num_values for each in bins) or 1
    bars = []
    for number, each in enumerate(bins):
        height = _BAR_HEIGHT * each.num_values / most
        is_chosen = number == chosen
        hint = f"{name} {each.label}: {each.num_values} responses"
        bars.append(
            f'<button class="bin" data-set="bin={"" if is_chosen else number}" '
            f'aria-pressed="{"true" if is_chosen else "false"}" title="{escape(hint)}" aria-label="{escape(hint)}">'
            f'<svg viewBox="0 0 10 {_BAR_HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect x="0" width="10" y="{_BAR_HEIGHT - height:.1f}" height="{height:.1f}"/></svg>'
            f"<b>{each.num_values}</b><small>{each.label}</small></button>"
        )
    return f'<div class="histogram" role="group" aria-label="{escape(name)}">{"".join(bars)}</div>'
