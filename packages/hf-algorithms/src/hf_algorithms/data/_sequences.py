"""A prompt and a response as the token ids of one tokenizer: for models that score both together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data._rows import Message
from hf_protocols.errors import DataError

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
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, label: str) -> None:
        self._tokenizer = tokenizer
        self._label = label
        ids = list(tokenizer(_PROBE)["input_ids"])
        special = set(tokenizer.all_special_ids)
        cut = len(ids)
        while cut and ids[cut - 1] in special:
            cut -= 1
        self._suffix = ids[cut:]
        end: Any = tokenizer.eos_token_id
        self._end = self._suffix or ([end] if type(end) is int else [])

    def encode_text(self, prompt: str, response: str, *, has_ended: bool = True) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt, with what the tokenizer puts before a text, and of the response.

        Args:
            prompt: text.
            response: text.
            has_ended: False for a response that was cut: it gets no end-of-sequence token.
        """
        first = list(self._tokenizer(prompt)["input_ids"])
        second = list(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        end = self._end if has_ended or self._suffix else []
        return first[: len(first) - len(self._suffix)], [*second, *end]

    def encode_chat(self, messages: Sequence[Message], responses: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Returns the ids of the prompt and then of each response, by the tokenizer's chat template.

        The prompt's are the same for all responses: the tokens that the rendered conversations begin with together.

        Raises:
            DataError: without a chat template.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f"{self._label}: its tokenizer has no chat template, and a row is a chat. Give the rows as texts, or "
                "add a chat_template to its tokenizer_config.json"
            )
        prompt = self._render(messages, add_generation_prompt=True)
        whole = [self._render([*messages, *response]) for response in responses]
        common = min(_common_length(prompt, each) for each in whole)
        return [prompt[:common], *(each[common:] for each in whole)]

    def count_prompt_tokens(self, prompt: str | Sequence[Message]) -> int:
        """Returns the tokens of a prompt, without those of a response."""
        if isinstance(prompt, str):
            return len(self.encode_text(prompt, "", has_ended=False)[0])
        return len(self.encode_chat(prompt, [({"role": "assistant", "content": ""},)])[0])

    def _render(self, messages: Sequence[Message], **options: Any) -> list[int]:
        chat = [dict(each) for each in messages]
        ids: Any = self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
        return list(ids)


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
