"""Runs that go on by themselves after a failure: the way of `--resume`, inside the program.

A group that lost a rank is not repaired: the whole executor is closed, and the run goes on from its last commit with a
new one. What a run does between a start and a failure belongs to `loop` and `supervised`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.resume import reopen
from hf_algorithms.replay import describe_recorded, drop_states
from hf_algorithms.run.stop import RunStop
from hf_algorithms.run_lock import training_alone
from hf_controller import LostClusterError, RemoteCallError
from hf_protocols import BackendError, HybridFlowError, NonFiniteLossError, WorkerError

if TYPE_CHECKING:
    from hf_algorithms.checkpoints import Ledger, Resumption
    from hf_algorithms.checkpoints.program import Program
    from hf_algorithms.config import Config, RunConfig
    from hf_algorithms.data import RowOrder
    from hf_algorithms.run_directory import RunDirectory
    from hf_algorithms.trackers import MetricsHook
    from hf_protocols import MappingPlan

__all__ = ["Attempt", "Restarts", "run_with_restarts"]

_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
"""Pause before the second restart, which doubles with each later one, and its limit. The first follows at once."""


@dataclass
class Restarts:
    """Decides after which failures a run goes on.

    Attributes:
        config: `[run]`.
        total: restarts of the run, those before a resume included.
        rolls_back: an update that is not finite is followed by a rollback: a restart with other draws.
        rollbacks: of the run: the `iteration` that failed, and the one `after` which the run went on.
        skipped_draws: draws of an iteration's rows that rollbacks passed over.
        num_made: of the restarts, those of this program.
        stop: of the run; a run that was asked to stop is not restarted.
    """

    config: RunConfig
    total: int = 0
    rolls_back: bool = False
    rollbacks: list[dict[str, int]] = field(default_factory=list)
    skipped_draws: int = 0
    num_made: int = field(default=0, init=False)
    stop: RunStop = field(init=False)
    _failed: set[int] = field(default_factory=set, init=False)
    _is_due: bool = field(default=False, init=False)
    _refused: int | None = field(default=None, init=False)
    _shift: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.stop = RunStop(self.config, time.monotonic(), self._settle)

    @property
    def failed(self) -> frozenset[int]:
        """Iterations that failed. Their calls are recorded while they run: a second failure finds them on disk."""
        return frozenset(self._failed)

    def decide(self, error: BaseException, iteration: int, where: str) -> str | None:
        """Decides whether the run restarts after a failure; returns a line about the restart, or None if the run ends.

        Args:
            error: with which this part of the run ended. It gets a note where a restart would not help.
            iteration: that was under way.
            where: how a run that goes on does so, such as "goes on after iteration 3".
        """
        if self.config.max_restarts == 0 or self.stop.code is not None or not self._may_pass(error, iteration):
            return None
        if iteration in self._failed:
            error.add_note(f"iteration {iteration} failed twice, so that the run is not restarted")
            if recorded := describe_recorded(Path(self.config.output_dir).resolve(), iteration):
                error.add_note(recorded)
            return None
        if self.num_made == self.config.max_restarts:
            error.add_note(f"run.max_restarts = {self.config.max_restarts} restarts were made before")
            return None
        is_rollback = isinstance(error, NonFiniteLossError)
        if is_rollback:  # other draws may pass, and the update is recorded already
            self._refused = iteration
        else:
            self._failed.add(iteration)
        self.num_made += 1
        self.total += 1
        self._is_due = True
        reason = str(error).partition("\n")[0].rstrip(".:")
        draws = " with other draws" if is_rollback else ""
        made = f"Restart {self.num_made} of run.max_restarts = {self.config.max_restarts}"
        return f"{reason}. {made}: the run {where}{draws}"

    def take(self) -> bool:
        """Returns True if the failure that was just decided on is followed by a restart."""
        is_due, self._is_due = self._is_due, False
        return is_due

    def begin(self, start: int) -> None:
        """Takes the iteration after which a restarted run goes on; 0: at its beginning."""
        if self._refused is not None:
            self.rollbacks.append({"iteration": self._refused, "after": start})
            self.skipped_draws += self._refused - start
            self._refused = None

    def continue_draws(
        self, ledger: Ledger, order: RowOrder, program: Program | None, *, batch_size: int, samples: int, seed: int
    ) -> None:
        """Draws go on after those of the commit from which the run does, and after those that rollbacks pass over.

        The samples of draws that are passed over are planned and dropped.
        """
        iteration, known = (0, 0) if program is None else (program.iteration, program.skipped_draws)
        position = 0 if program is None else program.data["rows_drawn"]
        # A resume may change the size of batches: draws go on where they were.
        self._shift = position - (iteration + known) * batch_size
        if self.skipped_draws > known:
            drawn = order.draw_from(position, (self.skipped_draws - known) * batch_size, seed=seed)
            ledger.drop(iteration + 1, samples, [(epoch, row, 0) for epoch, row in drawn])

    def count_drawn(self, iteration: int, batch_size: int) -> int:
        """Rows that the run has drawn after an iteration, those that rollbacks passed over included, without refills.

        The next iteration draws from there on.
        """
        return self._shift + (iteration + self.skipped_draws) * batch_size

    def measure(self) -> dict[str, float]:
        """Returns `rollback/count` of an iteration: the rollbacks of the run so far; nothing where it makes none."""
        return {"rollback/count": float(len(self.rollbacks))} if self.rolls_back else {}

    def pause(self) -> None:
        """Waits before a restart."""
        if self.num_made > 1:
            time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (self.num_made - 2)))

    def _settle(self, iteration: int) -> None:
        """Removes what was recorded of an iteration that failed before and has now ended well."""
        if iteration in self._failed:
            drop_states(Path(self.config.output_dir), iteration)

    def _may_pass(self, error: BaseException, iteration: int) -> bool:
        """True for lost processes and lost local clusters, and for errors and timeouts of ranks in an iteration.

        Errors of ranks before the first iteration are mistakes, which a restart repeats. A cluster that the run did not
        start is restarted by its owner.
        """
        if isinstance(error, NonFiniteLossError):
            is_trained = (
                self.stop.has_begun and iteration <= self.config.iterations
            )  # the last evaluation draws nothing
            return self.rolls_back and is_trained
        if isinstance(error, LostClusterError):
            return error.is_local
        if isinstance(error, RemoteCallError) and not error.cause_type:
            return True
        return self.stop.has_begun and (isinstance(error, WorkerError) or type(error) is BackendError)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A run from its start, or from a commit, to its end or a failure.

    Attributes:
        config: of the run.
        directory: of the run; closed after it.
        plan: where the models go; None lets the mapper decide.
        search_path: folders of users' modules.
        on_metrics: see `run_training`.
        resume: the run goes on from there.
        restarts: of the run.
        started_s: of `time.perf_counter`.
    """

    config: Config
    directory: RunDirectory
    plan: MappingPlan | None
    search_path: Sequence[str]
    on_metrics: MetricsHook | None
    resume: Resumption | None
    restarts: Restarts
    started_s: float = field(default_factory=time.perf_counter)


@training_alone()
def run_with_restarts(
    run_once: Callable[[Attempt], dict[str, Any]],
    config: Config,
    directory: RunDirectory,
    *,
    plan: MappingPlan | None,
    search_path: Sequence[str],
    on_metrics: MetricsHook | None,
    resume: Resumption | None,
) -> dict[str, Any]:
    """Runs, and after a failure that may pass runs again from the last commit.

    Returns:
        The contents of `summary.json`.

    Raises:
        HybridFlowError: of the attempt after which the run is not restarted.
    """
    restarts = Restarts(config.run, rolls_back=config.training.on_nonfinite == "rollback")
    if resume is not None:
        restarts.total, restarts.skipped_draws = resume.restarts, resume.skipped_draws
        restarts.rollbacks += resume.rollbacks
    while True:
        attempt = Attempt(
            config=config,
            directory=directory,
            plan=plan,
            search_path=search_path,
            on_metrics=on_metrics,
            resume=resume,
            restarts=restarts,
        )
        try:
            with closing(directory):
                summary = run_once(attempt)
        except HybridFlowError as error:
            if not restarts.take():
                if restarts.num_made and not directory.has_begun:
                    error.add_note(f"restart {restarts.num_made} failed so. --resume {directory.path} goes on later")
                raise
            try:
                resume = reopen(config, directory.path, search_path)
            except HybridFlowError as failure:
                error.add_note(f"the run cannot be restarted: {failure}")
                raise error from failure
            directory, plan = resume.directory, resume.plan
            restarts.begin(resume.iteration)
        else:
            restarts.stop.end()
            return summary
        restarts.pause()
