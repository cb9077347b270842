"""Chat templates as a configuration names them, and the tokens of a turn as people read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_algorithms.data._turns import TurnFormat
from hf_protocols.errors import ConfigError
from hf_protocols.paths import explain_variables
from hf_protocols.validation import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NamedToken", "TurnTokens", "count_spare_logits", "describe_turns", "read_template"]

_JINJA = ("{{", "{%")


@dataclass(frozen=True, kw_only=True)
class NamedToken:
    """A token id, its text, and where it is stated.

    Attributes:
        token_id: in the model's vocabulary.
        text: as the tokenizer has it; empty for an id that the tokenizer lacks.
        stated_by: such as `("tokenizer", "chat template")`.
    """

    token_id: int
    text: str
    stated_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """The tokens around a prompt and its response.

    Attributes:
        template: who provides the chat template; None without one.
        begin: what every prompt begins with, once.
        end_of_turn: what the template writes after an assistant's content; None if it writes no token of its own.
        stops: every token that ends a response, by id.
        pad: the tokenizer's, which nothing here needs; None without one.
        num_spare_logits: logits of the model beyond the tokenizer's ids.
    """

    template: Literal["tokenizer", "data.chat_template"] | None
    begin: tuple[NamedToken, ...]
    end_of_turn: NamedToken | None
    stops: tuple[NamedToken, ...]
    pad: NamedToken | None
    num_spare_logits: int

    def lines(self) -> list[str]:
        """The tokens to read, each as `text (id)`."""
        begin = " ".join(map(_show, self.begin)) or "no token of their own"
        stops = (f"{_show(each)}, of {' and '.join(each.stated_by)}" for each in self.stops)
        spare = f"{self.num_spare_logits} logits are beyond the tokenizer's ids and have no text"
        return [
            f"chat template: {self.template or 'none'}",
            f"prompts begin with: {begin}",
            f"responses end at: {'; '.join(stops) or 'no token'}",
            *([spare] if self.num_spare_logits else []),
        ]


def describe_turns(
    turns: TurnFormat, *, model_ids: Mapping[str, Collection[int]] | None = None, num_logits: int | None = None
) -> TurnTokens:
    """Lists the tokens at which turns begin and end, each with who states it.

    Args:
        turns: of a tokenizer and its template.
        model_ids: `eos_token_id` of the model, by the name of the file that states it.
        num_logits: the model's; None if there is none.
    """
    tokenizer = turns.tokenizer
    stated: dict[int, list[str]] = {}
    if tokenizer.eos_token_id is not None:
        stated.setdefault(tokenizer.eos_token_id, []).append("tokenizer")
    for file, ids in (model_ids or {}).items():
        for token_id in ids:
            stated.setdefault(token_id, []).append(file)
    end, pad = turns.end_of_turn_id, tokenizer.pad_token_id
    if end is not None:
        stated.setdefault(end, []).append("chat template")
    own: Literal["tokenizer", "data.chat_template"] = (
        "tokenizer" if turns.own_template is None else "data.chat_template"
    )
    return TurnTokens(
        template=own if turns.has_template else None,
        begin=tuple(_name(tokenizer, token_id) for token_id in turns.begin_ids),
        end_of_turn=None if end is None else _name(tokenizer, end),
        stops=tuple(_name(tokenizer, token_id, stated[token_id]) for token_id in sorted(stated)),
        pad=None if pad is None else _name(tokenizer, pad),
        num_spare_logits=0 if num_logits is None else count_spare_logits(tokenizer, num_logits),
    )


def count_spare_logits(tokenizer: PreTrainedTokenizerBase, num_logits: int) -> int:
    """Logits of a model beyond the largest id of its tokenizer: those of a padded vocabulary."""
    return max(0, num_logits - 1 - max(tokenizer.get_vocab().values()))


def read_template(value: str) -> str:
    """The text of `data.chat_template`: the value itself if it is Jinja, otherwise the content of that file.

    Raises:
        ConfigError: for a file that is absent or cannot be read.
    """
    if not value.strip():
        raise ConfigError("data.chat_template is empty. Remove the key, or set it to a file or a template's text")
    if any(mark in value for mark in _JINJA):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"data.chat_template = {show(value)}: cannot be read as a file ({reason}), and is not the text of a "
            f"template, which has {{{{ or {{%. Set it to either{explain_variables(value)}"
        ) from None


def _show(token: NamedToken) -> str:
    return f"{token.text or 'no text'} ({token.token_id})"


def _name(tokenizer: PreTrainedTokenizerBase, token_id: int, stated_by: Collection[str] = ()) -> NamedToken:
    text = tokenizer.convert_ids_to_tokens(token_id)
    return NamedToken(token_id=token_id, text=text if isinstance(text, str) else "", stated_by=tuple(stated_by))
