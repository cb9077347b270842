"""One iteration as its step sees it: prompts, more of them, and where the run listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes import StepContext
from hf_algorithms.run.prompt_draws import PromptDraws

if TYPE_CHECKING:
    from hf_algorithms.checkpoints import Ledger
    from hf_algorithms.config import Config
    from hf_algorithms.preflight.inputs import RunInputs
    from hf_controller import BatchFuture, Executor
    from hf_engine import SamplingParams

__all__ = ["RunIteration"]

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
        shown: batches that the step showed.
    """

    config: Config
    inputs: RunInputs
    executor: Executor
    ledger: Ledger
    state: dict[str, Any]
    iteration: int
    sampling: SamplingParams
    shown: list[BatchFuture] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        self._draws = PromptDraws(
            self.inputs.train,
            rollout.batch_size,
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
