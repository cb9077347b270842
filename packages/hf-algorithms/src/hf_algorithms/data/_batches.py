"""Rows of a data set as batches of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal

from hf_algorithms.data._file_rows import build_order, locate
from hf_algorithms.data._jagged_columns import build_jagged, check_rows
from hf_algorithms.data._rows import Row
from hf_algorithms.data._turns import TurnFormat, describe_texts
from hf_algorithms.json_text import format_json
from hf_protocols.errors import DataError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptDataset", "TooLong"]

TooLong = Literal["error", "drop", "truncate_left"]
"""Treatment of a prompt that is too long."""

_CHUNK_ROWS = 1024


class PromptDataset:
    """Prompts and answers of a data set; their tokens are counted once and made again for each batch."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        *,
        turns: TurnFormat | None = None,
        source: str = "the data set",
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
    ) -> None:
        """Tokenises every prompt once, with the ids that the tokenizer puts before a text.

        Args:
            rows: rows that `open_rows` or `load_rows` read.
            tokenizer: the model's.
            turns: how its chats are written; by default with the tokenizer's own template.
            source: where the rows come from, for messages, such as `data.train = 'train.jsonl'`.
            max_prompt_tokens: bound on the tokens of a prompt; None: no bound.
            too_long: what happens to a longer prompt: it is refused, its row dropped, or its beginning cut off, except
                the token that begins every sequence.

        Raises:
            DataError: for no rows, a prompt without tokens, one that is refused, a chat that no template writes, and if
                every row is dropped.
        """
        if not rows:
            raise DataError(f"{source} has no rows: it needs at least one")
        self.source = source
        self.max_tokens = max_prompt_tokens
        self._rows = rows
        self._tokenizer = tokenizer
        self._turns = turns or TurnFormat(tokenizer)
        self._too_long = too_long
        self._kept = array("q")
        self._lengths = array("q")
        self._has_extra = False
        self.num_too_long = 0
        """Rows whose prompts are above the bound, dropped or cut."""
        self.longest = 0
        """Tokens of the longest prompt before that."""
        self.num_unanswered = 0
        """Rows without an answer, those that are dropped included."""
        self.num_texts = 0
        """Prompts that no chat template writes, those that are dropped included."""
        self._count_tokens()
        self.order = build_order(rows, self._kept, source=source)
        """In which order rows are drawn; it counts rows as `prompts` does."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> Sequence[Row]:
        """The rows as they were given, those that are dropped included."""
        return self._rows

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self._lengths)

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of every prompt, by row."""
        return self._lengths

    def row(self, index: int) -> Row:
        """The row of a number, as `prompts` counts rows."""
        return self._rows[self._kept[index]]

    def where(self, index: int) -> str:
        """Place of a row for messages, such as `data.train = 'train.jsonl', line 3`."""
        return self._where(self._kept[index])

    def describe_unanswered(self) -> str | None:
        """One line about rows without an answer; None if all rows are alike."""
        if self.num_unanswered in (0, len(self._rows)):
            return None
        return f"{self.source}: {self.num_unanswered:,} of {len(self._rows):,} rows have no answer"

    def describe_mixture(self) -> str | None:
        """One line about texts among chats; None if all prompts are alike."""
        return describe_texts(self.num_texts, len(self._rows), source=self.source)

    def describe_too_long(self) -> str | None:
        """One line about prompts that were dropped or cut; None if there are none."""
        if not self.num_too_long:
            return None
        done = "left out" if self._too_long == "drop" else "cut on the left"
        return (
            f"{self.source}: {self.num_too_long} of {len(self._rows)} prompts have more than {self.max_tokens} tokens "
            f"(the longest has {self.longest}) and are {done} (data.too_long)"
        )

    def response_lengths(self, max_response_tokens: int) -> list[int]:
        """Tokens of each row's response in a supervised batch."""
        return [min(length, max_response_tokens) for length in self._answer_lengths]

    def prompts(
        self, indices: Iterable[int], *, epochs: Sequence[int] = (), attempt: int = 0, first_group: int = 0
    ) -> TensorDict:
        """The chosen rows to generate from.

        Args:
            indices: of the rows.
            epochs: one for each row, for `prompt_id`; 0 for all by default.
            attempt: how many times the iteration had drawn prompts before, for `prompt_id`.
            first_group: group id of the first row; the others follow.

        Returns:
            `row_id` int64 [B], `prompt_ids` jagged int64 [B, tokens], `answer` jagged uint8 [B, UTF-8 bytes],
            `group_id` int64 [B], and `prompt_id` int64 [B, 3]: epoch, row, attempt. If any row of the data set is a
            chat, has columns, or lacks an answer, also `row_extra` jagged uint8 [B, UTF-8 bytes], the JSON array
            `[messages or null, answer or null, columns]` of each row.

        Raises:
            BatchError: for a row that the data set does not have.
        """
        import torch
        from tensordict import TensorDict

        from hf_algorithms.jagged import encode_text

        chosen = self._checked(indices)
        rows = [self._rows[number] for number in chosen]
        columns = {
            "row_id": torch.tensor(chosen, dtype=torch.int64, device="cpu"),
            "prompt_ids": build_jagged([ids for ids, _ in self._encode(rows, chosen)], torch.int64),
            "answer": encode_text([row.answer or "" for row in rows]),
            "group_id": torch.arange(first_group, first_group + len(chosen), device="cpu"),
            "prompt_id": _name_prompts(epochs or [0] * len(chosen), chosen, attempt),
        }
        if self._has_extra:
            columns["row_extra"] = encode_text([self._encode_extra(row) for row in rows])
        return TensorDict(columns, batch_size=[len(chosen)])

    def supervised(self, indices: Iterable[int], *, max_response_tokens: int) -> TensorDict:
        """The chosen rows with the answer as the response to learn: its tokens, then the one that ends a turn.

        A longer answer is cut to `max_response_tokens` and loses its end; `count_cut_answers` counts them.

        Returns:
            the columns of `prompts`, `response_ids` jagged int64 [B, tokens] and `response_mask` jagged
            bool [B, tokens], all true.

        Raises:
            BatchError: for a row that the data set does not have.
            ConfigError: when the tokenizer has no end of sequence.
        """
        import torch

        indices = list(indices)
        responses = [
            ids[:max_response_tokens]
            for ids in self._encode_responses([self._rows[number] for number in self._checked(indices)])
        ]
        batch = self.prompts(indices)
        batch["response_ids"] = build_jagged(responses, torch.int64)
        batch["response_mask"] = build_jagged([[True] * len(ids) for ids in responses], torch.bool)
        return batch

    def count_cut_answers(self, max_response_tokens: int) -> int:
        """Returns the number of answers that, with their end of sequence, are longer than `max_response_tokens`."""
        return sum(length > max_response_tokens for length in self._answer_lengths)

    @cached_property
    def _answer_lengths(self) -> array[int]:
        chunks = _chunked(self._rows[number] for number in self._kept)
        return array("q", (len(ids) for chunk in chunks for ids in self._encode_responses(chunk)))

    def _count_tokens(self) -> None:
        empty: list[int] = []
        number = 0
        for chunk in _chunked(self._rows):
            self._has_extra = self._has_extra or any(map(self._needs_extra, chunk))
            self.num_unanswered += sum(row.answer is None for row in chunk)
            self.num_texts += sum(self._turns.as_chat(row.prompt) is None for row in chunk)
            for ids, length in self._encode(chunk, range(number, number + len(chunk))):
                self.longest = max(self.longest, length)
                is_too_long = self.max_tokens is not None and length > self.max_tokens
                self.num_too_long += is_too_long
                if not length:
                    empty.append(number)
                elif not is_too_long or self._too_long != "drop":
                    self._kept.append(number)
                    self._lengths.append(len(ids))
                if is_too_long and self._too_long == "error":
                    raise DataError(
                        f"{self._where(number)}: its prompt has {length} tokens, more than data.max_prompt_tokens = "
                        f"{self.max_tokens}. Shorten it, or set data.too_long to drop or cut such prompts"
                    )
                number += 1
        if empty:
            others = f", and so have {len(empty) - 1} other rows" if len(empty) > 1 else ""
            raise DataError(
                f"{self._where(empty[0])}: its prompt has no tokens, so nothing can follow it{others}. "
                "Add one, or remove the row"
            )
        if not self._kept:
            raise DataError(
                f"{self.source}: every prompt has more than {self.max_tokens} tokens, so data.too_long = 'drop' leaves "
                "no row. Raise data.max_prompt_tokens, lower rollout.max_new_tokens, or set data.too_long = "
                "'truncate_left'"
            )

    def _encode(self, rows: Sequence[Row], numbers: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Yields the ids of each prompt, cut to the bound if that is asked for, and how many it has uncut."""
        prompts = [row.prompt for row in rows]
        for ids in self._turns.encode_prompts(prompts, name_row=lambda index: self._where(numbers[index])):
            length = len(ids)
            if self.max_tokens is not None and self._too_long == "truncate_left":
                ids = _cut_left(ids, self.max_tokens, self._tokenizer.bos_token_id)
            yield ids, length

    def _encode_responses(self, rows: Sequence[Row]) -> list[list[int]]:
        """The ids of each response, its end included."""
        answers = [row.answer or "" for row in rows]
        return self._turns.encode_responses([row.prompt for row in rows], answers, name_row=self._name_row)

    def _name_row(self, _: int) -> str:
        return self.source

    def _needs_extra(self, row: Row) -> bool:
        return bool(row.columns) or row.answer is None or self._turns.as_chat(row.prompt) is not None

    def _encode_extra(self, row: Row) -> str:
        messages = self._turns.as_chat(row.prompt)
        return format_json([messages, row.answer, dict(row.columns)])

    def _where(self, number: int) -> str:
        return locate(self._rows, number, source=self.source)

    def _checked(self, indices: Iterable[int]) -> list[int]:
        """Numbers of the rows among all that were given."""
        return [self._kept[row] for row in check_rows(indices, len(self))]


def _chunked(rows: Iterable[Row]) -> Iterator[list[Row]]:
    left = iter(rows)
    while chunk := list(islice(left, _CHUNK_ROWS)):
        yield chunk


def _cut_left(ids: list[int], most: int, begin: int | None) -> list[int]:
    if len(ids) <= most:
        return ids
    if ids[0] == begin and most > 1:
        return [ids[0], *ids[len(ids) - most + 1 :]]
    return ids[len(ids) - most :]


def _name_prompts(epochs: Sequence[int], rows: Sequence[int], attempt: int) -> torch.Tensor:
    import torch

    names = [(epoch, row, attempt) for epoch, row in zip(epochs, rows, strict=True)]
    return torch.tensor(names, dtype=torch.int64, device="cpu").reshape(-1, 3)
