"""A prompt and a response as the token ids of one tokenizer: for models that score both together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data._rows import Message
from hf_algorithms.data._turns import TurnFormat
from hf_protocols.errors import DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SequenceEncoder", "cut_to"]

_PROBE = "a"


class SequenceEncoder:
    """Encodes prompts and responses, texts or chats, for one tokenizer.

    What the tokenizer puts after a text, such as BERT's separator, ends the response. Where it puts nothing there, a
    response that has ended has its end-of-sequence token.

    Args:
        tokenizer: of the model that scores.
        label: beginning of messages: the user's key and value.
        turns: how chats are written; by default with the tokenizer's own template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, label: str, turns: TurnFormat | None = None) -> None:
        self._tokenizer = tokenizer
        self._turns = turns or TurnFormat(tokenizer, label=label)
        self._label = label
        bare = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        self._suffix = list(tokenizer(_PROBE)["input_ids"])[len(self._turns.begin_ids) + len(bare) :]
        end: Any = tokenizer.eos_token_id
        self._end = self._suffix or ([end] if type(end) is int else [])

    def encode_text(
        self, prompt: str, response: str, *, has_ended: bool = True, where: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt, with what the tokenizer puts before a text, and of the response.

        Args:
            prompt: text.
            response: text.
            has_ended: False for a response that was cut: it gets no end-of-sequence token.
            where: place of the row, for messages.
        """
        if (chat := self._turns.as_chat(prompt)) is not None:
            answer = {"role": "assistant", "content": response}
            ids = self.encode_chat(chat, [(answer,)], has_ended=has_ended, where=where)
            return ids[0], ids[1]
        first = list(self._tokenizer(prompt)["input_ids"])
        second = list(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        end = self._end if has_ended or self._suffix else []
        return first[: len(first) - len(self._suffix)], [*second, *end]

    def encode_chat(
        self,
        messages: Sequence[Message],
        responses: Sequence[Sequence[Message]],
        *,
        has_ended: bool = True,
        where: str | None = None,
    ) -> list[list[int]]:
        """Returns the ids of the prompt and then of each response, by the chat template.

        The prompt's are the same for all responses: the tokens that the rendered conversations begin with together.

        Args:
            messages: of the prompt.
            responses: messages of each, the last of them the assistant's.
            has_ended: False for responses that were cut: they do not get the token that ends a turn.
            where: place of the row, for messages.

        Raises:
            DataError: without a chat template, or for a response that does not end with a text of the assistant.
        """
        turns, label = self._turns, where or self._label
        if not turns.has_template:
            raise DataError(
                f"{label}: its tokenizer has no chat template, and a row is a chat. Write the rows as texts, or "
                "add a chat_template to its tokenizer_config.json"
            )
        before = [(*messages, *response[:-1]) for response in responses]
        texts = [_read_last(response, label) for response in responses]
        prompt, *heads = turns.encode_prompts([messages, *before], name_row=lambda _: label)
        ends = turns.encode_responses(before, texts, name_row=lambda _: label)
        whole = [[*head, *(end if has_ended else end[:-1])] for head, end in zip(heads, ends, strict=True)]
        common = min(_common_length(prompt, each) for each in whole)
        return [prompt[:common], *(each[common:] for each in whole)]

    def count_prompt_tokens(self, prompt: str | Sequence[Message]) -> int:
        """Returns the tokens of a prompt, without those of a response."""
        if isinstance(prompt, str):
            return len(self.encode_text(prompt, "", has_ended=False)[0])
        return len(self.encode_chat(prompt, [({"role": "assistant", "content": ""},)])[0])


def _read_last(response: Sequence[Message], label: str) -> str:
    last: Message = response[-1] if response else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        raise DataError(
            f"{label}: a response ends with {show(dict(last))}, which is not a text of the assistant. Correct the row"
        )
    return content


def cut_to(max_tokens: int, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the prompt and the responses without what is too long: starts go, the ends of responses stay.

    All responses keep the same prompt.

    Args:
        max_tokens: of a prompt and a response together, at least 2.
        prompt: token ids.
        responses: token ids of each.
    """
    room = max(1, max_tokens - max(map(len, responses)))
    kept = list(prompt[-room:])
    return [kept, *(list(each[max(0, len(each) - (max_tokens - len(kept))) :]) for each in responses)]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
