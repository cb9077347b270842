"""Rows of a data set as batches of token ids, and which rows belong to which iteration."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from hf_algorithms.data._jsonl import Message, Row
from hf_protocols.errors import BatchError, ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptDataset", "select_rows"]


class PromptDataset:
    """Prompts and answers of a data set, tokenised once."""

    def __init__(
        self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, source: str = "the data set"
    ) -> None:
        """Tokenise every prompt, with whatever the tokenizer puts before a text.

        Args:
            rows: what :func:`~hf_algorithms.data.load_rows` read.
            tokenizer: the model's.
            source: where the rows come from, for messages, such as ``data.train = 'train.jsonl'``.

        Raises:
            DataError: for no rows, and for a prompt without tokens.
        """
        if not rows:
            raise DataError(f"{source} has no rows: it needs at least one")
        self.source = source
        self._rows = tuple(rows)
        self._tokenizer = tokenizer
        self._prompt_ids = _encode_prompts(rows, tokenizer)
        self._answer_bytes = [(row.answer or "").encode() for row in rows]
        _refuse_empty_prompts(source, self.prompt_lengths)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows as they were given."""
        return self._rows

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompt_lengths)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of every prompt, by row."""
        return [len(ids) for ids in self._prompt_ids]

    def response_lengths(self, max_response_tokens: int) -> list[int]:
        """Tokens of each row's response in a supervised batch."""
        return [min(len(ids), max_response_tokens) for ids in self._answer_ids]

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

        chosen = self._checked(indices)
        columns = {
            "row_id": torch.tensor(chosen, dtype=torch.int64),
            "prompt_ids": _jagged([self._prompt_ids[row] for row in chosen], torch.int64),
            "answer": _jagged([self._answer_bytes[row] for row in chosen], torch.uint8),
            "group_id": torch.arange(first_group, first_group + len(chosen)),
            "prompt_id": _name_prompts(epochs or [0] * len(chosen), chosen, attempt),
        }
        if self._has_extra:
            columns["row_extra"] = _jagged([_encode_extra(self._rows[row]) for row in chosen], torch.uint8)
        return TensorDict(columns, batch_size=[len(chosen)])

    def supervised(self, indices: Iterable[int], *, max_response_tokens: int) -> TensorDict:
        """The chosen rows with the answer as the response to learn: its tokens, then the end of sequence.

        A longer answer is cut to ``max_response_tokens`` and loses its end; :meth:`count_cut_answers` says how many.

        Returns:
            the columns of :meth:`prompts`, ``response_ids`` jagged int64 [B, tokens] and ``response_mask`` jagged
            bool [B, tokens], all true.

        Raises:
            BatchError: for a row that the data set does not have.
            ConfigError: when the tokenizer has no end of sequence.
        """
        import torch

        chosen = self._checked(indices)
        responses = [self._answer_ids[row][:max_response_tokens] for row in chosen]
        batch = self.prompts(chosen)
        batch["response_ids"] = _jagged(responses, torch.int64)
        batch["response_mask"] = _jagged([[True] * len(ids) for ids in responses], torch.bool)
        return batch

    def count_cut_answers(self, max_response_tokens: int) -> int:
        """How many answers of the data set, with their end of sequence, are longer than ``max_response_tokens``."""
        return sum(len(ids) > max_response_tokens for ids in self._answer_ids)

    @cached_property
    def _has_extra(self) -> bool:
        return any(row.columns or row.answer is None or not isinstance(row.prompt, str) for row in self._rows)

    @cached_property
    def _answer_ids(self) -> list[list[int]]:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError("the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json")
        texts = [row.answer or "" for row in self._rows]
        return [[*ids, end] for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def _checked(self, indices: Iterable[int]) -> list[int]:
        chosen = [int(index) for index in indices]
        for row in chosen:
            if not 0 <= row < len(self._rows):
                raise BatchError(f"row {row} of a data set with {len(self._rows)} rows, 0 to {len(self._rows) - 1}")
        return chosen


def select_rows(num_rows: int, batch_size: int, *, iteration: int, seed: int) -> list[int]:
    """The rows of iteration ``iteration`` (from 0) when shuffled epochs are read one after the other.

    Each epoch is a permutation of its own; each row comes once per epoch, and a batch may end one epoch and begin
    the next, or hold several. Nothing is remembered: a run resumed at iteration i reads what it would have read.

    Raises:
        ConfigError: for no rows, a batch without rows, or an iteration before the first.
    """
    if num_rows < 1 or batch_size < 1 or iteration < 0:
        raise ConfigError(
            f"num_rows={num_rows}, batch_size={batch_size}, iteration={iteration}: "
            "rows and batches start at 1, iterations at 0"
        )
    positions = range(iteration * batch_size, (iteration + 1) * batch_size)
    return [_permutation(num_rows, position // num_rows, seed)[position % num_rows] for position in positions]


@lru_cache(maxsize=8)
def _permutation(num_rows: int, epoch: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_rows))
    random.Random(f"epoch {epoch} of seed {seed}").shuffle(order)
    return tuple(order)


def _refuse_empty_prompts(source: str, lengths: Sequence[int]) -> None:
    lines = [line for line, length in enumerate(lengths, 1) if length == 0]
    if lines:
        others = f", and so have {len(lines) - 1} other rows" if len(lines) > 1 else ""
        raise DataError(
            f"{source}, line {lines[0]}: its prompt has no tokens, so nothing can follow it{others}. "
            "Give each row a prompt"
        )


def _encode_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    encoded = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [next(encoded) if isinstance(row.prompt, str) else _encode_chat(row.prompt, tokenizer) for row in rows]


def _encode_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    chat = [dict(each) for each in messages]
    ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def _encode_extra(row: Row) -> bytes:
    messages = None if isinstance(row.prompt, str) else row.prompt
    return json.dumps([messages, row.answer, dict(row.columns)], ensure_ascii=False).encode()


def _name_prompts(epochs: Sequence[int], rows: Sequence[int], attempt: int) -> torch.Tensor:
    import torch

    names = [(epoch, row, attempt) for epoch, row in zip(epochs, rows, strict=True)]
    return torch.tensor(names, dtype=torch.int64).reshape(-1, 3)


def _jagged(sequences: Sequence[Sequence[int] | bytes], dtype: torch.dtype) -> torch.Tensor:
    """A jagged nested tensor [B, ragged] of ``sequences``."""
    import torch

    offsets = torch.tensor(list(accumulate(map(len, sequences), initial=0)), dtype=torch.int64)
    values = torch.tensor(list(chain.from_iterable(sequences)), dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets)
