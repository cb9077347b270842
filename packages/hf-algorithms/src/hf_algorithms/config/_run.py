"""Section `[run]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hf_algorithms.config._section import Positive, Section, UserPath, described
from hf_algorithms.trackers import check_names

__all__ = ["RunConfig"]

_Count = Annotated[int, Field(ge=1, le=1 << 53)]
_Iterations = Annotated[int, Field(ge=0, le=1 << 53)]
_Seconds = Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?s$")]
_Interval = Annotated[
    Literal["auto"] | _Iterations | _Seconds,
    described("must be 'auto', a number of iterations (0: never), or seconds such as '60s'"),
]
_Seed = Annotated[int, Field(ge=0, lt=1 << 62)]


class RunConfig(Section):
    """`[run]`: what is run, and where its files go."""

    output_dir: UserPath = "runs/run"
    """Directory of the run's files; must be new or empty."""
    seed: _Seed = 0
    """Same seed, same number of ranks: same metrics."""
    iterations: _Count = 100
    """Iterations of the algorithm."""
    eval_every: _Count = 10
    """Iterations between two greedy evaluations on the validation rows; each writes `model/`."""
    executor: Literal["ray", "in_process"] = "ray"
    """`in_process` runs one rank in the program itself, for debuggers."""
    checkpoint_every: _Interval = "auto"
    """Interval between two commits of all roles to `steps/`: iterations (0: never), seconds such as `"60s"`, or
    `"auto"`: as often as possible while commits take at most 5 % of the time. The last iteration is committed,
    too, unless the interval is 0.
    """
    keep: Annotated[int, Field(ge=1, le=1 << 20)] = 2
    """Commits that are kept; with 1 the one before goes when the newest is verified."""
    keep_best: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Commits that are kept in addition for the best scores on the validation rows, each with its `model/`; an
    evaluation that finds one commits it.
    """
    max_restarts: Annotated[int, Field(ge=0, le=1 << 20)] = 2
    """Restarts that the program makes by itself, from the last commit, after ranks raise, end or hang, or a local Ray
    cluster is lost; an iteration that fails twice ends the run. Rollbacks of `training.on_nonfinite` count, too.
    """
    max_seconds: Positive | None = None
    """The run stops after the iteration in which this time is over, with a commit; left out: it runs to its end."""
    grace_s: Positive = 30.0
    """Time that an iteration has to finish after SIGTERM, SIGHUP or `max_seconds`; then it is dropped."""
    trackers: tuple[str, ...] = Field(default=(), strict=False)
    """Experiment trackers that get configuration, metrics and summary next to `metrics.jsonl`: `tensorboard`, `wandb`,
    `mlflow`, `trackio`. Each is an extra of hf-algorithms.
    """
    on_metrics: str | None = None
    """`module:function` or `file.py:function` that is called with the iteration and its metrics."""

    @field_validator("trackers")
    @classmethod
    def _refuse_wrong_trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        check_names(names)
        return names
