"""Texts to pretrain on, as blocks of tokens: long texts are cut, short ones share a block, nothing is lost."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hf_algorithms.data._jagged_columns import build_jagged, check_rows
from hf_algorithms.data._order import RowOrder
from hf_algorithms.data._rows import Row
from hf_algorithms.data._turns import TurnFormat
from hf_protocols.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["TextBlocks", "choose_block_tokens"]

_TYPE = "i"
_ID_BYTES = array(_TYPE).itemsize


class _Block(NamedTuple):
    prompt: list[int]
    response: list[int]
    mask: list[bool]


class TextBlocks:
    """Texts as supervised rows of at most `block_tokens` tokens.

    The texts follow one another in the order of their rows, each with what the tokenizer puts before a text, and its
    EOS. This sequence is divided into blocks; the last block is as short as the rest. A block begins with the tokens
    that begin a text, and with the token before its own first one. So every token of every text, and every EOS, is
    learned exactly once. There is one exception: if the tokenizer puts nothing before a text, the first token of the
    first text is not learned.

    Token ids are kept in a file in the folder for temporary files, not in memory.

    Args:
        rows: whose answers are the texts.
        turns: of the model's tokenizer.
        block_tokens: of a block at most.
        source: where the texts come from, for messages, such as `data.pretraining = 'texts.jsonl'`.

    Raises:
        ConfigError: for blocks that are too short, and a tokenizer without an EOS.
        DataError: for no rows, and without space for the token ids.
    """

    default_tokens: ClassVar[int] = 512
    """Tokens of a block where neither the user nor the model's context says less."""

    def __init__(
        self, rows: Sequence[Row], turns: TurnFormat, *, block_tokens: int, source: str = "the data set"
    ) -> None:
        if not rows:
            raise DataError(f"{source} has no rows: it needs at least one")
        self.source = source
        self.rows = rows
        """The rows as they were given."""
        self.block_tokens = block_tokens
        """Tokens of a block at most."""
        self._begin = turns.begin_ids
        least = 2 * len(self._begin) + 3
        if block_tokens < least:
            raise ConfigError(
                f"data.block_tokens = {block_tokens}: a block of this tokenizer needs at least {least} tokens. Raise it"
            )
        self._step = block_tokens - len(self._begin) - 1
        self._starts = array("q", [0])
        self._file = TemporaryFile(prefix="hybridflow-data-")  # noqa: SIM115 - open as long as the blocks are
        try:
            self._write(turns)
        except OSError as error:
            raise DataError(
                f"{source}: its token ids cannot be written: {(error.strerror or str(error)).lower()}. Set TMPDIR to a "
                "folder with more space"
            ) from error
        self.order = RowOrder([len(self)])
        """In which order blocks are drawn."""

    def __len__(self) -> int:
        return -(-self._starts[-1] // self._step)

    @property
    def text_lengths(self) -> list[int]:
        """Tokens of each text, with what begins it and its EOS."""
        return [end - start for start, end in pairwise(self._starts)]

    def describe(self) -> str:
        """One line, such as `data.pretraining = 'a.jsonl': 1,024 tokens in 2 blocks of at most 512`."""
        return (
            f"{self.source}: {self._starts[-1]:,} tokens in {len(self):,} blocks of at most {self.block_tokens:,} "
            "(data.block_tokens)"
        )

    def batch(self, indices: Iterable[int]) -> TensorDict:
        """The chosen blocks.

        Returns:
            `row_id` int64 [B], `prompt_ids` and `response_ids` jagged int64 [B, tokens], and `response_mask` jagged
            bool [B, tokens], false at what the tokenizer puts before a text.

        Raises:
            BatchError: for a block that there is not.
        """
        import torch
        from tensordict import TensorDict

        chosen = check_rows(indices, len(self))
        blocks = [self._read_block(number) for number in chosen]
        columns = {
            "row_id": torch.tensor(chosen, dtype=torch.int64, device="cpu"),
            "prompt_ids": build_jagged([each.prompt for each in blocks], torch.int64),
            "response_ids": build_jagged([each.response for each in blocks], torch.int64),
            "response_mask": build_jagged([each.mask for each in blocks], torch.bool),
        }
        return TensorDict(columns, batch_size=[len(chosen)])

    def _write(self, turns: TurnFormat) -> None:
        for row in self.rows:
            ids = array(_TYPE, [*turns.encode_text(row.answer or ""), turns.eos_id])
            self._file.write(ids.tobytes())
            self._starts.append(self._starts[-1] + len(ids))
        self._file.flush()

    def _read_block(self, number: int) -> _Block:
        begin, first = self._begin, number * self._step
        end = min(first + self._step, self._starts[-1])
        text = bisect_right(self._starts, first) - 1
        opened = self._starts[text] + len(begin)
        if first < opened or first == 0:
            first = max(opened, 1)
        prompt = begin if begin and first == opened else [*begin, *self._read_ids(first - 1, first)]
        response = self._read_ids(first, end)
        mask = [True] * len(response)
        following = text + 1
        while begin and (start := self._starts[following]) < end:
            for place in range(start - first, min(start - first + len(begin), len(mask))):
                mask[place] = False
            following += 1
        return _Block(prompt, response, mask)

    def _read_ids(self, start: int, end: int) -> list[int]:
        found = array(_TYPE)
        found.frombytes(os.pread(self._file.fileno(), (end - start) * _ID_BYTES, start * _ID_BYTES))
        return found.tolist()


def choose_block_tokens(given: int | None, *, context: int, budget: int) -> int:
    """Returns the tokens of a block: `given`, or as many as fit up to `TextBlocks.default_tokens`.

    Args:
        given: `data.block_tokens`; None: it is left out.
        context: tokens of the model's context.
        budget: tokens of a forward pass, `training.micro_batch_tokens`.

    Raises:
        ConfigError: for more than the model's context or a forward pass takes.
    """
    most = min(context, budget)
    if given is not None and given > most:
        bound = (
            f"the model's context of {context} tokens"
            if context <= budget
            else f"training.micro_batch_tokens = {budget}"
        )
        raise ConfigError(f"data.block_tokens = {given}: exceeds {bound}. Lower it to at most {most}")
    return given or min(most, TextBlocks.default_tokens)
