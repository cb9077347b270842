"""A run that goes on in its directory: its configuration, its last commit, and what may have changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.commit import STEPS, WARM_START, CheckpointError, Commit, find_last_commit
from hf_algorithms.checkpoints.origin import read_origin
from hf_algorithms.checkpoints.program import Program, load_generators, read_program
from hf_algorithms.config import DeadlinesConfig
from hf_algorithms.held_functions import find_lost
from hf_algorithms.roles import Roles, list_trained
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import ConfigError, MappingPlan, PlanError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config

__all__ = ["FREE_KEYS", "Resumption", "open_resumption", "reopen"]

_FREE_OF_RUN = (
    "iterations", "keep", "keep_best", "max_restarts", "max_seconds", "grace_s", "trackers", "on_metrics", "output_dir",
)  # fmt: skip
FREE_KEYS = (
    *(f"run.{name}" for name in _FREE_OF_RUN),
    *(f"deadlines.{name}" for name in DeadlinesConfig.model_fields),
    "cluster.call_timeout_s",
    "cluster.object_store_bytes",
)
"""Keys that may change without `--allow-changed`."""
_RESTORE = "Restore it, or start another run"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run that goes on.

    Attributes:
        config: its configuration, with what was changed.
        directory: of the run.
        plan: the recorded one.
        search_path: folders of users' modules.
        commit: the last one that can be used; None: the run starts at iteration 1.
        program: of that commit.
        warm: the last commit of a warm start that is not over, and its program.
        notes: one line for each commit that cannot be used.
        is_finished: there is nothing left to do.
        restarts: that the run made by itself so far.
        rollbacks: those of them after an update that was not finite, see `Restarts`.
    """

    config: Config
    directory: RunDirectory
    plan: MappingPlan
    search_path: Sequence[str]
    commit: Commit | None
    program: Program | None
    warm: tuple[Commit, Program] | None
    notes: Sequence[str]
    is_finished: bool
    restarts: int = 0
    rollbacks: Sequence[dict[str, int]] = ()

    @property
    def iteration(self) -> int:
        """The last one that is committed, or 0."""
        return self.program.iteration if self.program is not None else 0

    @property
    def has_state(self) -> bool:
        """True if there is a commit, of the warm start or after it, from which the run goes on."""
        return self.program is not None or self.warm is not None

    @property
    def skipped_draws(self) -> int:
        """Draws that rollbacks passed over: the last one may be newer than the commit."""
        known = 0 if self.program is None else self.program.skipped_draws
        return max(known, sum(each["iteration"] - each["after"] for each in self.rollbacks))

    def begin(self) -> None:
        """Removes what the run wrote after its last commit; without one, all but commits of its warm start.

        Raises:
            RunDirectoryError: if a file is shorter than it was then.
        """
        if self.program is None:
            self.directory.clear(keeps=("config.toml", "plan.json", *(() if self.warm is None else (WARM_START,))))
            if self.warm is not None:
                self._remove_steps(WARM_START, self.warm[1].iteration)
            return
        path = self.directory.path
        for samples in (path / "samples").glob("*.jsonl"):
            if samples.stem.isdecimal() and int(samples.stem) > self.program.iteration:
                self.directory.remove(f"samples/{samples.name}")
        self._remove_steps(".", self.program.iteration)
        for name, size in self.program.sizes.items():
            self.directory.truncate(name, size)

    def _remove_steps(self, place: str, last: int) -> None:
        """Removes the steps after the last one."""
        for step in (self.directory.path / place / STEPS).iterdir():
            if step.name.isdecimal() and int(step.name) > last:
                self.directory.remove(f"{place}/{STEPS}/{step.name}")

    def load_warm_start(self, roles: Roles) -> int:
        """Gives the policy the state of the last commit of the warm start; returns the number of its step, or 0."""
        if self.warm is None:
            return 0
        commit, program = self.warm
        policy = roles.having("generate_sequences")
        policy.load_state(str(commit.folder / policy.role)).result()
        load_generators(program.generators)
        return program.iteration

    def load(self, roles: Roles) -> None:
        """Gives all trained roles, and the program's generators, the states of the commit.

        Raises:
            HybridFlowError: for a state that a role cannot go on from.
        """
        assert self.commit is not None and self.program is not None, "a run without a commit starts at its beginning"
        loads = [group.load_state(str(self.commit.folder / role)) for role, group in list_trained(roles).items()]
        for each in loads:
            each.result()
        load_generators(self.program.generators)


def open_resumption(
    run: Path, overrides: Mapping[str, Any], allowed: Sequence[str] = (), *, command: str | None = None
) -> Resumption:
    """Reads how a run goes on; nothing is changed.

    Args:
        run: its directory, which may have been moved.
        overrides: new values by `section.key`.
        allowed: keys of them that change the run, and may.
        command: of `hybridflow`, which must be the one that started the run; None: any.

    Raises:
        ConfigError: for a directory that is not a run's or is in use, a changed key that is not allowed, and changed
            input files.
        CheckpointError: if there are commits and none can be used.
    """
    from hf_algorithms.config import parse_config, set_key

    if run.exists() and not run.is_dir():
        raise ConfigError(f"--resume {run}: is not a directory. Give the directory of a run")
    directory = RunDirectory(run, resume=True)
    place = overrides.get("run.output_dir", directory.path)
    if Path(str(place)).resolve() != directory.path.resolve():
        raise ConfigError(f"run.output_dir = {show(str(place))}: a run goes on in its directory. Leave the key out")
    origin = read_origin(directory.path)
    search_path = (os.getcwd(), *origin.search_path)
    body = deepcopy(dict(origin.sections))
    for key in find_lost(body):
        again = f"Pass it again in Python: train(resume={str(run)!r}, reward=...)"
        raise ConfigError(
            f"--resume {run}: {key} was a function of the program that started the run, and could not be pickled. "
            f"{again if key == 'reward.function' else 'Start another run'}"
        )
    try:
        before = parse_config(body, search_path=search_path, command=command)
    except ConfigError as error:
        raise ConfigError(f"--resume {run}: {error}") from error
    for key, value in {**overrides, "run.output_dir": str(directory.path)}.items():
        set_key(body, key, value, label="--set")
    config = parse_config(body, search_path=search_path, command=command)
    _check_changes(before, config, allowed)
    if changed := origin.find_changed():
        raise ConfigError(f"--resume {run}: {'; '.join(changed)}. Restore these files, or start another run")
    found = _find_start(config, directory, search_path)
    if config.run.iterations < found.iteration:
        raise ConfigError(
            f"run.iterations = {config.run.iterations}: the run has made {found.iteration} iterations. Set it to "
            f"{found.iteration} or more"
        )
    return found


def reopen(config: Config, run: Path, search_path: Sequence[str]) -> Resumption:
    """Reads how a run of this program goes on after a failure; nothing is changed.

    Args:
        config: of the run.
        run: its directory, which no run holds.
        search_path: folders of users' modules.

    Raises:
        ConfigError: for a directory that is in use, and changed input files.
        CheckpointError: if there are commits and none can be used.
    """
    directory = RunDirectory(run, resume=True)
    if changed := read_origin(directory.path).find_changed():
        raise ConfigError("; ".join(changed))
    return _find_start(config, directory, search_path)


def _find_start(config: Config, directory: RunDirectory, search_path: Sequence[str]) -> Resumption:
    def check_files(commit: Commit) -> None:
        for name, size in read_program(commit.folder).sizes.items():
            path = directory.path / name
            if path.is_dir():
                raise CheckpointError(
                    f"{path}: is a directory, and was a file at the commit of iteration {commit.iteration}"
                )
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                when = f"the commit of iteration {commit.iteration}"
                raise CheckpointError(f"{path}: has {found} bytes, and had {size} at {when}")

    commit, problems = find_last_commit(directory.path, check_files)
    program = None if commit is None else read_program(commit.folder)
    warm, more = find_last_commit(directory.path / WARM_START) if commit is None else (None, [])
    summary = _read_summary(directory.path)
    has_ended = summary.get("status") == "finished"
    restarts = summary.get("restarts", 0)
    return Resumption(
        config=config,
        directory=directory,
        plan=_read_plan(directory.path / "plan.json"),
        search_path=search_path,
        commit=commit,
        program=program,
        warm=None if warm is None else (warm, read_program(warm.folder)),
        notes=[*problems, *more],
        is_finished=has_ended and program is not None and program.iteration >= config.run.iterations,
        restarts=restarts if type(restarts) is int else 0,
        rollbacks=_list_rollbacks(summary.get("rollbacks")),
    )


def _list_rollbacks(found: Any) -> list[dict[str, int]]:
    """The rollbacks of a summary; of one that was edited, those that are some."""
    return [
        {"iteration": each["iteration"], "after": each["after"]}
        for each in (found if isinstance(found, list) else ())
        if isinstance(each, Mapping)
        and type(each.get("iteration")) is type(each.get("after")) is int
        and 0 <= each["after"] < each["iteration"]
    ]


def _check_changes(before: Config, after: Config, allowed: Sequence[str]) -> None:
    values = [dict(_flatten(config.model_dump())) for config in (before, after)]
    for key in allowed:
        if key not in values[0] and key not in values[1]:
            raise ConfigError(f"--allow-changed {key}: unknown key. `hybridflow config` lists all keys")
    changed = [key for key in {**values[0], **values[1]} if values[0].get(key) != values[1].get(key)]
    refused = [key for key in changed if key not in FREE_KEYS and key not in allowed]
    if refused:
        shown = [f"{key}: {show(values[0].get(key))} -> {show(values[1].get(key))}" for key in refused]
        words = " ".join(f"--allow-changed {key}" for key in refused)
        raise ConfigError("\n".join([*shown, f"the run would be another one. If that is meant, add {words}"]))


def _flatten(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_summary(run: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return found if isinstance(found, Mapping) else {}
    return {}


def _read_plan(path: Path) -> MappingPlan:
    try:
        return MappingPlan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}. {_RESTORE}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: is not text in UTF-8. {_RESTORE}") from None
    except (PlanError, ValueError) as error:
        reason = str(error).removesuffix(". Regenerate the plan")
        raise CheckpointError(f"{path}: {reason}. {_RESTORE}") from None
