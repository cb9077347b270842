"""Commits of a run while it goes on: when they are due, what they hold, and which of them are kept.

States are staged between iterations, and written and committed during the next.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hf_algorithms.atomic_files import describe_refusal, link_folder
from hf_algorithms.checkpoints.commit import (
    STEPS,
    WARM_START,
    CommittedFile,
    find_commits,
    read_commit,
    remove_step,
    write_commit,
)
from hf_algorithms.checkpoints.pending_step import PendingStep
from hf_algorithms.checkpoints.program import Program, save_generators, write_program
from hf_algorithms.roles import Roles, list_trained
from hf_algorithms.run_directory import RunDirectoryError
from hf_protocols import ConfigError, HybridFlowError

if TYPE_CHECKING:
    from hf_algorithms.checkpoints.ledger import Ledger
    from hf_algorithms.config import RunConfig
    from hf_algorithms.run_directory import RunDirectory

__all__ = ["BestCommits", "Cadence", "Checkpoints", "SupportsSummary"]

_REMEDY = "Earlier commits are whole. Free some space and use --resume"
_MODEL = "model"
"""Folder of a run, and of a commit that `run.keep_best` keeps, with the weights in Hugging Face's format."""


def _find_unsaved(roles: Roles) -> list[str]:
    """Roles that are trained by a worker of one's own which has no `save_state`."""
    return [
        role
        for role, group in roles.groups.items()
        if "save_state" not in group.methods and any(each.kind == "training" for each in group.methods.values())
    ]


class SupportsSummary(Protocol):
    """Numbers of a run that a commit holds, and to which its place and cost are added."""

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of what the numbers depend on."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a number."""

    def kept(self) -> Mapping[str, Any]:
        """Returns the numbers that a run takes over when it goes on after a commit."""

    def write(self) -> None:
        """Writes the numbers so far."""


class Checkpoints:
    """Commits of all roles and of the program, in `steps/`.

    Args:
        config: `[run]`.
        directory: of the run.
        roles: of the run.
        summary: gets the last commit, and the share of the time.
        note: shows the user a line: a run with a role that cannot be saved makes no commit.
        lower_is_better: of the validation score, by which `run.keep_best` chooses.
        of_warm_start: commits hold steps of the warm start and the policy alone, in `warm_start/steps/`.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        roles: Roles,
        summary: SupportsSummary,
        note: Callable[[str], None],
        *,
        lower_is_better: bool = False,
        of_warm_start: bool = False,
    ) -> None:
        self._config = config
        self._directory = directory
        self._of_warm_start = of_warm_start
        self._place = directory.path / WARM_START if of_warm_start else directory.path
        self._trained = list_trained(roles)
        if of_warm_start:
            policy = roles.having("generate_sequences").role
            self._trained = {role: group for role, group in self._trained.items() if role == policy}
        self._summary = summary
        unsaved = _find_unsaved(roles)
        self._every = 0 if unsaved else config.checkpoint_every
        if unsaved and config.checkpoint_every and not of_warm_start:
            note(f"no checkpoints are made: the worker of role {unsaved[0]} has no save_state and load_state")
        self._cadence = Cadence(self._every)
        self._best = BestCommits(config.keep_best if self._every else 0, lower_is_better=lower_is_better)
        self._pending: PendingStep | None = None
        self._last: int | None = None
        self._unreported_s = 0.0

    def restore(self, program: Program) -> None:
        """Takes over which commits an earlier part of the run keeps."""
        self._best.restore(program.best, find_commits(self._place))
        self._note_best()

    def end_iteration(
        self,
        iteration: int,
        *,
        is_last: bool,
        state: Mapping[str, Any],
        totals: Mapping[str, float],
        ledger: Ledger,
        data: Mapping[str, Any],
        score: float | None = None,
        skipped_draws: int = 0,
    ) -> None:
        """Commits the run after an iteration whose metrics are written, if it is time.

        Args:
            iteration: from 1, 0 after the warm start; its steps from 1.
            is_last: of the run, or of the warm start.
            state: of the recipe.
            totals: sums from which numbers of the summary are computed.
            ledger: of the run, in which the iteration is settled.
            data: position in the training rows.
            score: on the validation rows, whose evaluation has written `model/`; None: not evaluated.
            skipped_draws: that rollbacks passed over.

        Raises:
            HybridFlowError: if a state cannot be written; earlier commits stay.
        """
        if not self._cadence.is_due(iteration, is_last=is_last) and not self._best.is_better(score):
            return
        ledger.check()
        self.finish()  # before a better score lets go of a commit
        is_best = self._best.add(iteration, score)
        self.save(
            Program(
                iteration=iteration,
                state=state,
                summary=self._summary.kept(),
                totals=totals,
                ledger=ledger.counts,
                data=data,
                generators=save_generators(),
                sizes=self._directory.measure(),
                best=self._best.scores,
                skipped_draws=skipped_draws,
            ),
            with_model=is_best,
        )

    def save(self, program: Program, *, with_model: bool = False) -> None:
        """Copies the states of all roles and starts to write them; the commit before this one is completed first.

        Args:
            program: of the iteration.
            with_model: `model/` is of this iteration, and part of the commit.

        Raises:
            HybridFlowError: if a state cannot be written; earlier commits stay.
        """
        self.finish()
        folder = self._place / STEPS / str(program.iteration)
        self._directory.require(f"{STEPS}/{program.iteration}")
        with self._reporting(folder), self._timing() as spent:
            remove_step(folder)
            folder.mkdir(parents=True)
            write_program(folder, program)
            if with_model:
                link_folder(self._directory.path / _MODEL, folder / _MODEL)
            staged = [group.save_state(str(folder / role), background=True) for role, group in self._trained.items()]
            for each in staged:
                each.result()
            ranks = {role: group.world_size for role, group in self._trained.items()}
            commit = partial(self._commit, folder, program)
            self._pending = PendingStep(folder, program.iteration, ranks, commit)
        self._cadence.note_commit(spent[0])

    def finish(self) -> None:
        """Waits until the last save is committed, which happens as soon as its files are on the disk.

        Raises:
            HybridFlowError: if it could not be written; earlier commits stay.
        """
        pending = self._pending
        if pending is None:
            return
        with self._reporting(pending.folder), self._timing() as spent:
            ends = {role: group.finish_state() for role, group in self._trained.items()}
            pending.finish({role: [file for rank in end.result() for file in rank] for role, end in ends.items()})
        self._pending = None
        self._cadence.note_wait(spent[0])
        self._note_commit(pending.iteration)

    def close(self) -> None:
        """Waits for nothing but a commit that has begun. A step that is still being written stays without one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.stop()
            if pending.is_committed and not self._of_warm_start:
                self._summary["last_commit"] = pending.iteration

    def measure(self) -> dict[str, float]:
        """Returns `checkpoint/*` of an iteration: what commits have cost since the one before; nothing without any.

        Raises:
            HybridFlowError: if the last commit could not be written; earlier commits stay.
        """
        if self._every == 0:
            return {}
        if self._pending is not None and self._pending.has_failed:
            self.finish()  # now, not at the next commit: what is computed until then could not be kept
        if self._pending is not None and self._pending.is_committed:
            self._note_commit(self._pending.iteration)
        seconds, self._unreported_s = self._unreported_s, 0.0
        return {"checkpoint/blocked_s": seconds, "checkpoint/share": self._cadence.share}

    def _commit(self, folder: Path, program: Program, files: Sequence[CommittedFile]) -> None:
        write_commit(folder, program.iteration, files, ledger=program.ledger, versions=self._summary.versions)
        self._prune()
        shutil.rmtree(self._place / WARM_START, ignore_errors=True)  # it is over

    def _note_commit(self, iteration: int) -> None:
        if iteration != self._last and not self._of_warm_start:
            self._last = iteration
            self._summary["last_commit"] = iteration
            self._note_best()
            self._summary["checkpoint_share"] = self._cadence.share
            self._summary.write()

    def _note_best(self) -> None:
        if self._config.keep_best:
            self._summary["best_commits"] = self._best.iterations

    def _prune(self) -> None:
        """Removes old commits; one that would leave the newest alone waits until that is verified."""
        steps = self._place / STEPS
        commits = find_commits(self._place)
        if self._config.keep == 1 and len(commits) > 1:
            read_commit(steps / str(commits[-1])).verify()
        for iteration in set(commits[: -self._config.keep]) - set(self._best.iterations):
            remove_step(steps / str(iteration))

    @contextmanager
    def _timing(self) -> Iterator[list[float]]:
        started_s, found = time.perf_counter(), [0.0]
        yield found
        found[0] = time.perf_counter() - started_s
        self._unreported_s += found[0]

    @contextmanager
    def _reporting(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"{folder.relative_to(self._directory.path)} in run.output_dir={str(self._directory.path)!r} cannot be "
                f"written: {describe_refusal(error)}. {_REMEDY}"
            ) from error
        except ConfigError:  # of a recipe's state
            raise
        except HybridFlowError as error:  # of a rank
            error.add_note(_REMEDY)
            raise


_COMMIT_SHARE = 0.05
"""Of the run's time that commits take, for `auto`."""
_FIRST_COST_S = 1.0
"""Expected of the first commit."""


class Cadence:
    """Decides after each iteration, by `run.checkpoint_every`.

    Args:
        every: iterations, 0 for never; seconds such as `"60s"`; or `"auto"`, for at most 5 % of the time.
        clock: seconds that only grow.
    """

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._started_s = self._last_s = clock()
        self._cost_s = _FIRST_COST_S
        self.spent_s = 0.0
        """Seconds for which commits have held up the run."""

    def is_due(self, iteration: int, *, is_last: bool = False) -> bool:
        """Returns True if the run commits after this iteration; after its last one it does, unless it never does."""
        if self._every == 0:
            return False
        if is_last:
            return True
        if isinstance(self._every, int):
            return iteration % self._every == 0
        if self._every == "auto":
            return self.spent_s + self._cost_s <= _COMMIT_SHARE * (self._clock() - self._started_s)
        return self._clock() - self._last_s >= float(self._every.removesuffix("s"))

    def note_commit(self, seconds: float) -> None:
        """Takes for how long a commit has held up the run."""
        self._last_s = self._clock()
        self._cost_s = seconds
        self.spent_s += seconds

    def note_wait(self, seconds: float) -> None:
        """Takes for how long the run has waited for a commit to be written."""
        self._cost_s += seconds
        self.spent_s += seconds

    @property
    def share(self) -> float:
        """Share of the time since the start that commits have held up the run."""
        return self.spent_s / max(self._clock() - self._started_s, 1e-9)


class BestCommits:
    """Scores of the commits that are kept for their score.

    Args:
        keep: how many; 0 for none.
        lower_is_better: the metric falls as the model improves.
    """

    def __init__(self, keep: int, *, lower_is_better: bool = False) -> None:
        self._keep = keep
        self._sign = -1.0 if lower_is_better else 1.0
        self._scores: dict[int, float] = {}

    @property
    def scores(self) -> dict[str, float]:
        """Scores by iteration, as a commit stores them."""
        return {str(iteration): self._scores[iteration] for iteration in self.iterations}

    @property
    def iterations(self) -> list[int]:
        """Iterations of the commits, the best first; of equal scores the earlier one."""
        return sorted(self._scores, key=lambda each: (-self._sign * self._scores[each], each))

    def restore(self, scores: Mapping[str, float], present: Collection[int]) -> None:
        """Takes over the scores of a commit, as far as their commits are still there."""
        known = {int(iteration): score for iteration, score in scores.items()}
        for iteration in sorted(known.keys() & set(present)):
            self.add(iteration, known[iteration])

    def is_better(self, score: float | None) -> bool:
        """Returns True if a commit with this score would be kept; None: the iteration was not evaluated."""
        if self._keep == 0 or score is None or not math.isfinite(score):
            return False
        if len(self._scores) < self._keep:
            return True
        worst = self._scores[self.iterations[-1]]
        return self._sign * score > self._sign * worst

    def add(self, iteration: int, score: float | None) -> bool:
        """Takes a commit if its score is good enough; returns True if so. The worst one makes room."""
        if score is None or not self.is_better(score):
            return False
        self._scores[iteration] = score
        for dropped in self.iterations[self._keep :]:
            del self._scores[dropped]
        return True
