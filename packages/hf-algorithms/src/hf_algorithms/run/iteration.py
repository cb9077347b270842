"""One iteration as its step sees it: the rows that it draws, and what it shows to the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import PromptDataset, TextBlocks
from hf_algorithms.recipes import StepContext
from hf_protocols import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.checkpoints import Ledger
    from hf_algorithms.config import Config
    from hf_algorithms.preflight.inputs import RunInputs
    from hf_controller import BatchFuture, Executor
    from hf_engine import SamplingParams

__all__ = ["PromptDraws", "RunIteration"]

_NUM_LEARNED = "pretraining/rows"
"""Key of the run's state: rows of `data.pretraining` that were learned."""


@dataclass
class RunIteration:
    """The draws of one iteration, and what its step shows of them.

    Attributes:
        config: of the run.
        inputs: of the run.
        executor: of the run.
        ledger: of the run; it learns of every prompt before a response is generated.
        state: of the run, see `StepContext.state`.
        iteration: from 1.
        sampling: how responses are drawn; its step numbers the draw of prompts, too.
        position: rows that the run has drawn before.
        shown: batches that the step showed.
    """

    config: Config
    inputs: RunInputs
    executor: Executor
    ledger: Ledger
    state: dict[str, Any]
    iteration: int
    sampling: SamplingParams
    position: int
    shown: list[BatchFuture] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        self._draws = PromptDraws(
            self.inputs.train,
            rollout.batch_size,
            position=self.position,
            iteration=self.sampling.step,
            seed=self.config.run.seed,
            pretraining=self.inputs.pretraining,
            num_learned=self.state.get(_NUM_LEARNED, 0),
        )
        self.ledger.begin(self.iteration, rollout.samples_per_prompt)

    def first(self) -> BatchFuture:
        """The prompts with which the iteration begins."""
        batch = self._draws.first()
        self.ledger.plan(self._draws.newest)
        return self.executor.put(batch)

    def context(self) -> StepContext:
        """Returns the context that the step gets."""
        return StepContext(
            sampling=self.sampling,
            iteration=self.iteration,
            state=self.state,
            more_prompts=self._draw_more,
            count_prompts_left=lambda: self._draws.num_left,
            pretrain_rows=self._draw_pretraining,
            show_samples=self.shown.append,
            note_generated=self.ledger.note_generated,
            note_scored=self.ledger.note_scored,
            note_trained=self.ledger.note_trained,
            note_filtered=self.ledger.note_filtered,
        )

    def _draw_more(self, num_prompts: int) -> BatchFuture:
        batch = self._draws.more(num_prompts)
        self.ledger.plan(self._draws.newest)
        return self.executor.put(batch)

    def _draw_pretraining(self, num_rows: int) -> BatchFuture:
        limit = self.config.rollout.max_new_tokens
        batch = self.executor.put(self._draws.pretraining(num_rows, max_response_tokens=limit))
        self.state[_NUM_LEARNED] = self._draws.num_learned
        return batch


class PromptDraws:
    """The draws of one iteration. Equal arguments draw equal rows, independent of other iterations.

    Args:
        data: the training set.
        batch_size: prompts of `first`.
        position: rows that the run has drawn before.
        iteration: from 1; numbers the order of `more`.
        seed: of the run.
        pretraining: the rows of `pretraining`; those of `data` by default.
        num_learned: rows that `pretraining` returned in earlier iterations.
    """

    def __init__(
        self,
        data: PromptDataset,
        batch_size: int,
        *,
        position: int,
        iteration: int,
        seed: int,
        pretraining: PromptDataset | TextBlocks | None = None,
        num_learned: int = 0,
    ) -> None:
        self._data = data
        self._pretraining = pretraining or data
        self._iteration, self._seed = iteration, seed
        drawn = data.order.draw_from(position, batch_size, seed=seed)
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
