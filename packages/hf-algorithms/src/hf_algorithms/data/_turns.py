"""Tokenization of texts and chats, and the tokens at which a response ends.

Prompts, supervised responses and rewards all read tokens through this module, so that they agree about templates, the
beginning of a sequence and the end of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_algorithms.data._rows import Message
from hf_protocols.errors import ConfigError, DataError, ModelError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TurnFormat", "decode_responses", "describe_texts"]

Prompt = str | Sequence[Message]

_MARK = "HybridFlowMark"
"""Content of an assistant's message, after which a template shows how it ends a turn."""
_PROBE = "a 1"
_BLANKS = " \t\r\n\u2581"


class _TurnEnd(NamedTuple):
    """Text that a template writes after the content of an assistant's message."""

    text: str
    """All of it."""
    closing: str
    """Its part before the end-of-turn token."""
    token_id: int | None


class TurnFormat:
    """Writes prompts and responses as the token ids that a model reads.

    A chat is rendered by a chat template. A text is tokenized as it is, unless a template, options or a system prompt
    are passed: it is then the message of a user. Every prompt begins with what the tokenizer puts before a text, once.

    Args:
        tokenizer: the model's.
        template: text of a chat template in Jinja; None: the tokenizer's own.
        options: further variables of the template, such as `{"enable_thinking": False}`.
        system_prompt: first message of chats that have no system message.
        label: the model in messages, such as `model.path = 'my-model'`.

    Raises:
        ConfigError: for a template that cannot be parsed or is absent, or an option that is not a template's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        label: str = "the model",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = dict(options or {})
        self._system_prompt = system_prompt
        self._label = label
        self._takes_texts_as_chats = template is not None or bool(self._options) or system_prompt is not None
        self._check_options()
        self._refuse_malformed()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that was passed."""
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        """True if chats can be rendered."""
        return bool(self._template or getattr(self._tokenizer, "chat_template", None))

    @property
    def own_template(self) -> str | None:
        """The template that was passed in place of the tokenizer's."""
        return self._template

    @property
    def system_prompt(self) -> str | None:
        """The first message of chats that have no system message."""
        return self._system_prompt

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that the template writes after an assistant's content; None without one."""
        return self._turn_end.token_id if self._turn_end else None

    @cached_property
    def begin_ids(self) -> list[int]:
        """Ids that the tokenizer puts before a text: its BOS, in most cases."""
        full, bare = self._tokenizer(_PROBE)["input_ids"], self._encode_bare([_PROBE])[0]
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return list(full[:start])
        return [token for token in full if token != self._tokenizer.eos_token_id] if not bare else []

    def as_chat(self, prompt: Prompt) -> tuple[Message, ...] | None:
        """The messages that a prompt is rendered from; None for a text that is tokenized as it is."""
        if isinstance(prompt, str):
            if not self._takes_texts_as_chats:
                return None
            prompt = ({"role": "user", "content": prompt},)
        if self._system_prompt is None or (prompt and prompt[0].get("role") in ("system", "developer")):
            return tuple(prompt)
        return ({"role": "system", "content": self._system_prompt}, *prompt)

    def encode_prompts(self, prompts: Sequence[Prompt], *, name_row: Callable[[int], str] = str) -> list[list[int]]:
        """The ids of every prompt, up to where a response begins.

        Nothing that ends a text follows: a tokenizer that appends its EOS to texts does not end a prompt with it. A
        chat whose last message is the assistant's is continued.

        Args:
            prompts: texts, or the messages of chats.
            name_row: beginning of messages about a prompt, by its number.

        Raises:
            DataError: for a chat that the template refuses, or a chat without a template.
        """
        texts = [self._render_prompt(prompt, name_row(row)) for row, prompt in enumerate(prompts)]
        return [self._begin(ids) for ids in self._encode_bare(texts)]

    def encode_responses(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, name_row: Callable[[int], str] = str
    ) -> list[list[int]]:
        """The ids that follow each prompt's in a supervised sequence: the response, then the token that ends it.

        In a chat that is the template's end-of-turn token, otherwise the tokenizer's EOS. Where the whole chat begins
        with the prompt's ids the response is the rest of it, otherwise its text is tokenized apart.

        Args:
            prompts: texts, or the messages of chats.
            responses: texts, one for each prompt.
            name_row: beginning of messages about a prompt, by its number.

        Raises:
            ConfigError: for a tokenizer without an EOS, where no template ends the turn.
            DataError: as `encode_prompts`.
        """
        chats = [self.as_chat(prompt) for prompt in prompts]
        wholes = [
            "" if chat is None else self._render_whole(chat, response, name_row(row))
            for row, (chat, response) in enumerate(zip(chats, responses, strict=True))
        ]
        heads = [self._render_prompt(prompt, name_row(row)) for row, prompt in enumerate(prompts)]
        pieces = [
            response if chat is None else self._response_text(head, whole, response)
            for chat, head, whole, response in zip(chats, heads, wholes, responses, strict=True)
        ]
        encoded = zip(self._encode_bare(heads), self._encode_bare(wholes), self._encode_bare(pieces), strict=True)
        return [
            self._rest_of(head, whole) or [*piece, self._end_id(is_chat=chat is not None)]
            for chat, (head, whole, piece) in zip(chats, encoded, strict=True)
        ]

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text that no template writes, such as one to pretrain on; nothing ends it."""
        return self._begin(self._encode_bare([text])[0])

    @property
    def eos_id(self) -> int:
        """The tokenizer's EOS.

        Raises:
            ConfigError: for a tokenizer without one.
        """
        return self._end_id(is_chat=False)

    def list_stop_ids(self, model_ids: Collection[int] = ()) -> tuple[int, ...]:
        """The ids at which a response ends: the tokenizer's EOS, the template's end of a turn, and `model_ids`.

        Args:
            model_ids: `eos_token_id` of the model's generation configuration.
        """
        own = (self._tokenizer.eos_token_id, self.end_of_turn_id)
        return tuple(sorted({*model_ids, *(each for each in own if isinstance(each, int))}))

    @cached_property
    def _turn_end(self) -> _TurnEnd | None:
        from hf_engine.model_directory import errors_of

        if not self.has_template:
            return None
        chat = ({"role": "user", "content": "1"}, {"role": "assistant", "content": _MARK})
        try:
            with errors_of("jinja2", "the chat template"):
                rendered = self._render(chat)
        except ModelError:  # rows that it refuses are reported one by one
            return None
        _, found, after = rendered.rpartition(_MARK)
        if not found:
            return None
        for token_id in self._encode_bare([after])[0]:
            text = self._named_tokens.get(token_id, "")
            if text.strip(_BLANKS) and text in after:
                return _TurnEnd(after, after[: after.index(text)], token_id)
        return _TurnEnd(after, "", None)

    @cached_property
    def _named_tokens(self) -> dict[int, str]:
        """Tokens that tokenizers never build out of text: added ones, special or not."""
        added = {token_id: str(token) for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        return added | dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))

    def _end_id(self, *, is_chat: bool) -> int:
        end = self.end_of_turn_id if is_chat and self.end_of_turn_id is not None else self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError("the tokenizer has no end-of-sequence token. Set eos_token in its tokenizer_config.json")
        return int(end)

    def _rest_of(self, head: list[int], whole: list[int]) -> list[int] | None:
        """Text after `head` in `whole`, up to the token that ends the turn; None if it cannot be found."""
        end = self._turn_end
        if end is None or end.token_id is None or not whole or whole[: len(head)] != head:
            return None
        after = self._encode_bare([end.text])[0]
        last = len(whole) - len(after) + after.index(end.token_id)
        return whole[len(head) : last + 1] if last >= len(head) and whole[last] == end.token_id else None

    def _response_text(self, head: str, whole: str, response: str) -> str:
        end = self._turn_end or _TurnEnd("", "", None)
        follows = whole.startswith(head) and whole.endswith(end.text)
        text = whole[len(head) :].removesuffix(end.text) if follows else response
        return text + end.closing

    def _render_prompt(self, prompt: Prompt, where: str) -> str:
        chat = self.as_chat(prompt)
        if chat is None:
            return str(prompt)
        continues = bool(chat) and chat[-1].get("role") == "assistant"
        return self._render_row(chat, where, add_generation_prompt=not continues, continue_final_message=continues)

    def _render_whole(self, chat: tuple[Message, ...], response: str, where: str) -> str:
        if chat and chat[-1].get("role") == "assistant":
            last = {**chat[-1], "content": f"{chat[-1].get('content', '')}{response}"}
            return self._render_row((*chat[:-1], last), where)
        return self._render_row((*chat, {"role": "assistant", "content": response}), where)

    def _render_row(self, chat: Sequence[Message], where: str, **how: Any) -> str:
        from hf_engine.model_directory import one_line

        if not self.has_template:
            raise DataError(
                f"{where}: is a chat, and the tokenizer of {self._label} has no chat template. Set data.chat_template "
                "to a file or a text"
            )
        with raised_as(
            lambda error: DataError(
                f"{where}: the chat template refuses this chat: {one_line(error).rstrip('.')}. Change the row's "
                f"messages, {'data.template_options, ' if self._options else ''}data.system_prompt or "
                "data.chat_template"
            )
        ):
            return self._render(chat, **how)

    def _render(self, chat: Sequence[Message], **how: Any) -> str:
        messages = [dict(message) for message in chat]
        text: Any = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, **how, **self._options
        )
        return str(text)

    def _encode_bare(self, texts: Sequence[str]) -> list[list[int]]:
        found: Any = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [list(ids) for ids in found]

    def _begin(self, ids: list[int]) -> list[int]:
        """The ids after exactly one of what begins a text; a template or the text may have written it too."""
        bos = self._tokenizer.bos_token_id
        begin = self.begin_ids or ([bos] if bos is not None and ids[:1] == [bos] else [])
        start = 0
        while begin and ids[start : start + len(begin)] == begin:
            start += len(begin)
        return begin + ids[start:]

    def _check_options(self) -> None:
        parameters = signature(self._tokenizer.apply_chat_template).parameters
        fixed = {"messages", *(name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD)}
        if taken := sorted((fixed - {"tools", "documents"}) & self._options.keys()):
            raise ConfigError(
                f"data.template_options has {taken[0]}, which is not a variable of a chat template. Remove it"
            )
        if self.has_template:
            self._refuse_unread()
        if self._takes_texts_as_chats and not self.has_template:
            key = "data.template_options" if self._system_prompt is None else "data.system_prompt"
            raise ConfigError(
                f"{key} is set, and the tokenizer of {self._label} has no chat template. Set data.chat_template to a "
                f"file or a text, or remove {key}"
            )

    def _refuse_unread(self) -> None:
        """Refuses an option that the template does not name."""
        template: Any = self._template or getattr(self._tokenizer, "chat_template", None)
        words = dict.fromkeys(
            re.findall(r"\w+", " ".join(template.values()) if isinstance(template, dict) else template)
        )
        for name in self._options:
            if name not in words:
                near = find_similar(name, words)
                hint = f"Did you mean {show(near[0])}?" if near else "Remove it"
                raise ConfigError(f"data.template_options has {name}, which the chat template does not read. {hint}")

    def _refuse_malformed(self) -> None:
        from hf_engine.model_directory import one_line

        if not self.has_template:
            return
        name = "data.chat_template" if self._template else f"the chat template of {self._label}"
        chats = [({"role": "user", "content": content},) for content in ("1", _MARK)]
        with Caught() as caught:
            texts = {self._render(chat, add_generation_prompt=True) for chat in chats}
        if caught.error is not None:  # only what no row can mend is refused here
            if type(caught.error).__name__ != "TemplateSyntaxError":
                return
            reason = one_line(caught.error).rstrip(".")
            raise ConfigError(f"{name} is not valid Jinja: {reason}. Correct it") from caught.error
        if len(texts) == 1:
            raise ConfigError(
                f"{name} leaves out a user's message: every chat becomes {show(texts.pop())}. Write the content of "
                "messages in it"
            )


def describe_texts(num_texts: int, num_rows: int, *, source: str) -> str | None:
    """Returns a line about texts among chats, which are read without the template; None if all rows are alike.

    Args:
        num_texts: rows that `TurnFormat.as_chat` does not make chats.
        num_rows: all of them.
        source: of the rows, for messages.
    """
    if num_texts in (0, num_rows):
        return None
    return f"{source}: {num_texts:,} of {num_rows:,} rows are texts among chats: the chat template does not write them"


def decode_responses(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]], *, stop_ids: Collection[int] = ()
) -> list[str]:
    """The texts of responses, without special tokens and without the token that ended each, special or not.

    Args:
        tokenizer: the model's.
        responses: token ids, one list a response.
        stop_ids: ids at which responses end.
    """
    contents = [tuple(ids[:-1] if ids and ids[-1] in stop_ids else ids) for ids in responses]
    if not tokenizer.is_fast:  # these fail at an id without a token, as a padded vocabulary has
        known = frozenset(tokenizer.get_vocab().values())
        contents = [tuple(token for token in ids if token in known) for ids in contents]
    distinct = list(dict.fromkeys(contents))  # each sample repeats its prompt
    decoded: list[str] = tokenizer.batch_decode([list(ids) for ids in distinct], skip_special_tokens=True)
    texts = dict(zip(distinct, decoded, strict=True))
    return [texts[ids] for ids in contents]
