"""Answers to learn: prompts with answers, whole chats, and texts, as token ids of which some are trained."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hf_algorithms.data._file_rows import build_order, locate
from hf_algorithms.data._jagged_columns import build_jagged, check_rows
from hf_algorithms.data._rows import Message, Row
from hf_algorithms.data._text_blocks import TextBlocks
from hf_algorithms.data._turns import TurnFormat, describe_texts
from hf_protocols.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.data._batches import TooLong

__all__ = ["AnswerDataset", "LearnedBlocks"]

_CHUNK_ROWS = 1024


class _Sequence(NamedTuple):
    """A row as tokens: the tokens before the first trained one, all later tokens, and which of these are trained."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]


class AnswerDataset:
    """Rows with their answers, of which the assistant's tokens are trained, each with the token that ends its turn.

    In a chat, all messages of the assistant are trained, each in the form that the template gives it as the last
    message. The template may write a message differently once others follow, for example without its reasoning. Such a
    message is read and not trained.

    Args:
        rows: what `open_rows(is_learned=True)` opened.
        tokenizer: of the model that is trained.
        max_tokens: of a row.
        source: where the rows are from, for messages: key and value.
        turns: how chats are written; by default with the tokenizer's own template.
        too_long: what happens to a longer row: it is refused, left out, or loses its start, except the token that
            begins every sequence.

    Raises:
        DataError: for a row without an answer or without tokens before it, one that is refused, a chat that no template
            writes, and if every row is left out.
        ConfigError: for a tokenizer without an end of sequence.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        source: str,
        turns: TurnFormat | None = None,
        too_long: TooLong = "error",
    ) -> None:
        self.source = source
        self.num_cut = 0
        """Rows that lost their start."""
        self.num_dropped = 0
        """Rows that are left out."""
        self.num_untrained_turns = 0
        """Earlier messages of the assistant that are read and not trained."""
        self.num_texts = 0
        """Rows that no chat template writes, those that are left out included."""
        self._rows = rows
        self._tokenizer = tokenizer
        self._turns = turns or TurnFormat(tokenizer, label=source)
        self._max_tokens = max_tokens
        self._too_long = too_long
        self._kept, self._prompts, self._responses = array("q"), array("q"), array("q")
        self._count_tokens()
        self.order = build_order(rows, self._kept, source=source)
        """In which order rows are drawn."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self._prompts)

    @property
    def max_response_tokens(self) -> int:
        """Tokens from the first trained one on, of the row where they are most."""
        return max(self._responses)

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest row, and its place."""
        totals = [prompt + response for prompt, response in zip(self._prompts, self._responses, strict=True)]
        return max(totals), self._where(self._kept[totals.index(max(totals))])

    def describe_rows(self) -> list[str]:
        """Lines for the user: how many rows there are, and what is not trained."""
        counts = (
            (self.num_cut, "rows are longer than {} tokens and lose their start (data.too_long)"),
            (self.num_dropped, "rows are longer than {} tokens and are left out (data.too_long)"),
            (self.num_untrained_turns, "earlier messages of the assistant are not trained: the template changes them"),
        )
        lines = [f"{self.source}: {count:,} {text.format(self._max_tokens)}" for count, text in counts if count]
        texts = describe_texts(self.num_texts, len(self._rows), source=self.source)
        return [f"{self.source}: {len(self):,} rows", *lines, *([texts] if texts else [])]

    def preview(self) -> dict[str, list[int]]:
        """Token ids of the first row's prompt, of what follows, and of the trained part of it."""
        first = next(self._encode([self._kept[0]]))
        trained = [token for token, is_trained in zip(first.response, first.mask, strict=True) if is_trained]
        return {"prompt": first.prompt, "response": first.response, "trained": trained}

    def batch(self, indices: Iterable[int]) -> TensorDict:
        """Returns the chosen rows.

        `row_id` int64 [B]; `prompt_ids` and `response_ids` jagged int64 [B, tokens]; and `response_mask` jagged bool
        [B, tokens], true for tokens that are trained.

        Raises:
            BatchError: for a row that the data set does not have.
        """
        import torch
        from tensordict import TensorDict

        chosen = [self._kept[row] for row in check_rows(indices, len(self))]
        found = list(self._encode(chosen))
        columns = {
            "row_id": torch.tensor(chosen, dtype=torch.int64, device="cpu"),
            "prompt_ids": build_jagged([each.prompt for each in found], torch.int64),
            "response_ids": build_jagged([each.response for each in found], torch.int64),
            "response_mask": build_jagged([each.mask for each in found], torch.bool),
        }
        return TensorDict(columns, batch_size=[len(chosen)])

    def _count_tokens(self) -> None:
        for start in range(0, len(self._rows), _CHUNK_ROWS):
            numbers = range(start, min(start + _CHUNK_ROWS, len(self._rows)))
            for number, found in zip(numbers, self._encode(numbers, counts=True), strict=True):
                length = len(found.prompt) + len(found.response)
                if length > self._max_tokens and self._too_long == "error":
                    raise DataError(
                        f"{self._where(number)}: it has {length} tokens, more than the model's context of "
                        f"{self._max_tokens}. Shorten it, or set data.too_long to drop or cut such rows"
                    )
                if length > self._max_tokens:
                    self.num_dropped += 1
                    continue
                self._kept.append(number)
                self._prompts.append(len(found.prompt))
                self._responses.append(len(found.response))
        if not self._kept:
            raise DataError(
                f"{self.source}: every row has more than {self._max_tokens} tokens, so data.too_long = 'drop' leaves "
                "none. Set data.too_long = 'truncate_left', or use a model with a longer context"
            )

    def _encode(self, numbers: Sequence[int], *, counts: bool = False) -> Iterator[_Sequence]:
        """Yields the tokens of rows, cut to the bound if that is asked for."""
        rows = [self._rows[number] for number in numbers]
        self.num_texts += counts * sum(self._turns.as_chat(row.prompt) is None for row in rows)
        turns = [self._list_turns(row, number) for row, number in zip(rows, numbers, strict=True)]
        places = [self._where(number) for number, each in zip(numbers, turns, strict=True) for _ in each]
        prompts, answers = ([turn[part] for each in turns for turn in each] for part in (0, 1))
        heads = self._turns.encode_prompts(prompts, name_row=places.__getitem__)
        ends = self._turns.encode_responses(prompts, answers, name_row=places.__getitem__)  # type: ignore[arg-type]
        pairs = zip(heads, ends, strict=True)
        for number, each in zip(numbers, turns, strict=True):
            found = self._join([next(pairs) for _ in each], counts=counts)
            if not found.prompt:
                raise DataError(f"{self._where(number)}: no token stands before its answer. Add a prompt to the row")
            if len(found.prompt) + len(found.response) > self._max_tokens and self._too_long == "truncate_left":
                self.num_cut += counts
                found = self._cut(found)
            yield found

    def _list_turns(self, row: Row, number: int) -> list[tuple[str | tuple[Message, ...], str]]:
        """Returns what stands before each message of the assistant, with its text; the last one is the answer."""
        if not row.answer:
            lack = "has no answer" if row.answer is None else "has an empty answer"
            raise DataError(
                f"{self._where(number)}: {lack}, so nothing can be learned from it. Add one, end a chat with the "
                "assistant's message, set data.answer_field, or remove the row"
            )
        chat = self._turns.as_chat(row.prompt) or ()
        earlier = [
            (chat[:place], chat[place]["content"])
            for place in range(1, len(chat) - 1)  # what ends the prompt is continued by the answer
            if _is_turn(chat[place]) and chat[place - 1].get("role") != "assistant"
        ]
        return [*earlier, (row.prompt, row.answer)]

    def _join(self, turns: list[tuple[list[int], list[int]]], *, counts: bool) -> _Sequence:
        """Returns the whole sequence of the last turn; earlier turns that are a beginning of it are trained as well."""
        whole = [token for part in turns[-1] for token in part]
        spans = []
        for head, end in turns:
            # Where no token ends a turn in the template, the one that ends the sequence is the last turn's alone.
            for ids in ([*head, *end], [*head, *end[:-1]]):
                if whole[: len(ids)] == ids:
                    spans.append((len(head), len(ids)))
                    break
        if counts:
            self.num_untrained_turns += len(turns) - len(spans)
        first, mask = spans[0][0], [False] * len(whole)
        for begin, stop in spans:
            mask[begin:stop] = [True] * (stop - begin)
        return _Sequence(whole[:first], whole[first:], mask[first:])

    def _cut(self, found: _Sequence) -> _Sequence:
        """Removes the start, except the token that begins a sequence; one token stays before those that are trained."""
        ids, mask = found.prompt + found.response, [False] * len(found.prompt) + found.mask
        keeps = self._max_tokens > 2 and ids[0] == self._tokenizer.bos_token_id
        start = len(ids) - self._max_tokens + keeps
        ids, mask = [*ids[:keeps], *ids[start:]], [*mask[:keeps], *mask[start:]]
        mask[0] = False
        first = mask.index(True)
        return _Sequence(ids[:first], ids[first:], mask[first:])

    def _where(self, number: int) -> str:
        return locate(self._rows, number, source=self.source)


class LearnedBlocks(TextBlocks):
    """Texts to learn, in blocks; arguments and errors are those of `TextBlocks`."""

    num_cut = 0

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens before the first trained one, at most."""
        return len(self._begin) + 1

    @property
    def max_response_tokens(self) -> int:
        """Tokens of a block's texts, at most."""
        return min(self._step, self._starts[-1])

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of a block at most, and the file."""
        return self.max_prompt_tokens + self.max_response_tokens, self.source

    def describe_rows(self) -> list[str]:
        """Lines for the user."""
        return [self.describe()]

    def preview(self) -> dict[str, list[int]]:
        """Token ids of the first block."""
        batch = self.batch([0])
        return {name: batch[f"{name}_ids"].unbind()[0].tolist() for name in ("prompt", "response")}


def _is_turn(message: Message) -> bool:
    content = message.get("content")
    return message.get("role") == "assistant" and isinstance(content, str) and bool(content)
