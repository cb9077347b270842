"""Bounds on the tokens of a row, the model's context and the budget of a forward pass, and rows that exceed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_protocols import ConfigError

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_protocols import ModelShape

__all__ = [
    "RowLimit",
    "RowTokens",
    "find_bound",
    "find_context",
    "find_long_rows",
    "find_prompt_room",
    "find_response_room",
]


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """Tokens of each row of a data set: its prompt, and the longest response that it may have.

    `source` is where the rows come from, for messages, and `where` says it of one row.
    """

    source: str
    where: Callable[[int], str]
    prompts: Sequence[int]
    responses: Sequence[int]

    @property
    def totals(self) -> list[int]:
        """Prompt and response together, by row."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """A bound on the tokens of one row: how messages name it, and what raises it."""

    tokens: int
    name: str
    remedy: str


def find_prompt_room(config: Config, shape: ModelShape) -> int | None:
    """Returns the tokens of a prompt where longer ones are dropped or cut, or `data.max_prompt_tokens` bounds them.

    Without either it is None: a row that does not fit is then refused with all that could be changed.
    """
    given = config.data.max_prompt_tokens
    if config.data.too_long == "error":
        return given
    context = find_bound(config, shape).tokens
    room = context - config.rollout.max_new_tokens
    return given if room < 1 else min(room, given or room)


def find_response_room(config: Config, shape: ModelShape) -> int:
    """Returns the tokens of a prompt and its response together: what the model's context and a forward pass take.

    Raises:
        ConfigError: if `rollout.max_new_tokens` leaves none for a prompt.
    """
    bound, new = find_bound(config, shape), config.rollout.max_new_tokens
    if new >= bound.tokens:
        raise ConfigError(
            f"rollout.max_new_tokens = {new} exceeds {bound.name}: a prompt and its response have together at most "
            f"{bound.tokens} tokens. Lower rollout.max_new_tokens"
        )
    return bound.tokens


def find_context(config: Config, shape: ModelShape) -> RowLimit:
    """Returns the context of the model, or the smaller one of `rollout.options`."""
    tokens = shape.max_positions
    engine = config.rollout.options.get("max_positions")
    if type(engine) is int and engine < tokens:
        remedy = "raise rollout.options.max_positions"
        return RowLimit(tokens=engine, name=f"rollout.options.max_positions = {engine}", remedy=remedy)
    remedy = "raise model.max_positions" if config.model.path is None else "choose a model whose context has room for"
    return RowLimit(tokens=tokens, name=f"the model's context of {tokens} tokens", remedy=remedy)


def find_bound(config: Config, shape: ModelShape) -> RowLimit:
    """Returns the context or the budget of a forward pass, the smaller of them."""
    return min(find_context(config, shape), _find_budget(config), key=lambda each: each.tokens)


def _find_budget(config: Config) -> RowLimit:
    tokens = config.training.micro_batch_tokens
    return RowLimit(
        tokens=tokens, name=f"training.micro_batch_tokens = {tokens}", remedy="raise training.micro_batch_tokens"
    )


def find_long_rows(rows: Iterable[RowTokens], limit: RowLimit, max_new_tokens: int) -> Iterator[str]:
    """Yields a line for every file with rows above the limit, or one where no row could be below it."""
    worst: dict[str, RowTokens] = {}
    for each in rows:
        known = worst.get(each.source)
        if known is None or max(each.totals) > max(known.totals):
            worst[each.source] = each
    needed = max((max(each.totals) for each in worst.values()), default=0)
    if needed <= limit.tokens:
        return
    room = limit.tokens - max(max(each.prompts) for each in worst.values())
    lower = f"lower rollout.max_new_tokens to at most {room}" if room > 0 else "lower rollout.max_new_tokens"
    raised = f"{limit.remedy} to at least {needed}" if "raise" in limit.remedy else f"{limit.remedy} {needed} tokens"
    if max_new_tokens >= limit.tokens:
        yield (
            f"rollout.max_new_tokens = {max_new_tokens} exceeds {limit.name}: a prompt and its response have "
            f"together at most {limit.tokens} tokens. {_start(lower)}, or {raised}"
        )
        return
    for each in worst.values():
        totals = each.totals
        if (longest := max(totals)) > limit.tokens:
            row = totals.index(longest)
            others = sum(total > limit.tokens for total in totals) - 1
            yield (
                f"{each.where(row)}: its prompt of {each.prompts[row]} tokens and a response of up to "
                f"{each.responses[row]} (rollout.max_new_tokens = {max_new_tokens}) are {longest} tokens, above "
                f"{limit.name}{f'; so are {others} other rows' if others else ''}. "
                f"{_start(raised)}, {lower}, shorten the prompt, or set data.too_long"
            )


def _start(text: str) -> str:
    return text[0].upper() + text[1:]
