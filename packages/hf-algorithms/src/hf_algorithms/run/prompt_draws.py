"""Rows that an iteration draws: its first prompts, further prompts, and rows to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.data import PromptDataset, TextBlocks
from hf_protocols import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PromptDraws"]


class PromptDraws:
    """The draws of one iteration. Equal arguments draw equal rows, independent of other iterations.

    Args:
        data: the training set.
        batch_size: prompts of `first`.
        iteration: from 1.
        seed: of the run.
        pretraining: the rows of `pretraining`; those of `data` by default.
        num_learned: rows that `pretraining` returned in earlier iterations.
    """

    def __init__(
        self,
        data: PromptDataset,
        batch_size: int,
        *,
        iteration: int,
        seed: int,
        pretraining: PromptDataset | TextBlocks | None = None,
        num_learned: int = 0,
    ) -> None:
        self._data = data
        self._pretraining = pretraining or data
        self._iteration, self._seed = iteration, seed
        drawn = data.order.draw(batch_size, iteration=iteration - 1, seed=seed)
        self._epochs = [epoch for epoch, _ in drawn]
        self._rows = [row for _, row in drawn]
        self._num_drawn = 0
        self.num_learned = num_learned
        """Rows that `pretraining` returned in the run."""
        self._attempt = 0
        self.newest: list[tuple[int, int, int]] = []
        """Epoch, row and attempt of the prompts that were drawn last, in order."""

    def first(self) -> TensorDict:
        """The prompts that the iteration begins with; see `PromptDataset.prompts`."""
        return self._number(self._rows, self._epochs)

    @property
    def num_left(self) -> int:
        """Rows that the iteration has not drawn yet."""
        return len(self._data) - len(set(self._rows))

    def more(self, num_prompts: int) -> TensorDict:
        """Prompts of rows that the iteration has not drawn yet.

        Raises:
            DataError: if fewer than `num_prompts` rows are left, or none is asked for.
        """
        if num_prompts < 1:
            raise DataError(f"{self._data.source}: the step asks for {num_prompts} more prompts. Ask for at least 1")
        taken = set(self._rows)
        order = self._data.order.arrange(iteration=self._iteration, seed=self._seed + 2)
        left = [row for row in order if row not in taken]
        if num_prompts > len(left):
            raise DataError(
                f"{self._data.source}: the step asks for {num_prompts} more prompts, {len(left)} of its "
                f"{len(self._data)} rows are not drawn yet in this iteration. Add rows, or ask for fewer prompts"
            )
        rows = left[:num_prompts]
        self._rows = [*self._rows, *rows]
        self._attempt += 1
        return self._number(rows, self._epochs[-1:] * num_prompts)

    def pretraining(self, num_rows: int, *, max_response_tokens: int) -> TensorDict:
        """Rows with their answers as responses, or blocks of texts: each once in an epoch of the whole run.

        Args:
            num_rows: at least 1.
            max_response_tokens: to which longer answers are cut; blocks have a length of their own.

        Raises:
            DataError: for less than one row.
        """
        data = self._pretraining
        if num_rows < 1:
            raise DataError(f"{data.source}: the step asks for {num_rows} rows to learn. Ask for at least 1")
        rows = [row for _, row in data.order.draw_from(self.num_learned, num_rows, seed=self._seed + 1)]
        self.num_learned += num_rows
        if isinstance(data, TextBlocks):
            return data.batch(rows)
        return data.supervised(rows, max_response_tokens=max_response_tokens)

    def _number(self, rows: list[int], epochs: list[int]) -> TensorDict:
        batch = self._data.prompts(rows, epochs=epochs, attempt=self._attempt, first_group=self._num_drawn)
        self._num_drawn += len(rows)
        self.newest = [(epoch, row, self._attempt) for epoch, row in zip(epochs, rows, strict=True)]
        return batch
