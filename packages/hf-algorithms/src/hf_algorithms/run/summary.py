"""`summary.json` of a run: written at its beginning and, with its trace, at its end, also after a failure."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.commit import WARM_START, find_commits
from hf_algorithms.held_functions import find_held
from hf_algorithms.run_directory import RunDirectoryError

if TYPE_CHECKING:
    from hf_algorithms.checkpoints.program import Program
    from hf_algorithms.run.process_tree import MemoryMeter
    from hf_algorithms.run.restarts import Attempt
    from hf_controller import Executor
    from hf_protocols import MappingPlan, ModelShape

__all__ = ["RunSummary"]

_PACKAGES = ("hf-algorithms", "torch", "ray", "transformers", "tensordict")
_OWN = (
    "status", "error", "versions", "wall_s", "peak_rss_bytes", "last_commit", "best_commits", "checkpoint_share",
    "restarts", "rollbacks",
)  # fmt: skip
"""Numbers of one part of a run, between two starts."""
_ERROR_FACTS = ("role", "rank", "method", "exit_code", "signal")
_FROM_BEGINNING = "starts again: nothing is committed"


class RunSummary:
    """Numbers of a run, by the names of `summary.json`; a context manager around all that follows its beginning.

    Calls stream into `trace.json` meanwhile. Neither file hides an error: where it cannot be written during one, the
    error gets a note.

    Args:
        attempt: to run, whose directory has begun; its restarts decide whether a failure ends the run.
        executor: whose calls are traced.
        command: of `hybridflow`, which resumes the run.
        memory: measures the peak.
        facts: what is known at the beginning.
        plan: that is followed, for the trace.
        shapes: of models, by role, likewise.
        note: shows the user a line.
    """

    def __init__(
        self,
        attempt: Attempt,
        executor: Executor,
        memory: MemoryMeter,
        *,
        command: str,
        facts: Mapping[str, Any],
        plan: MappingPlan,
        shapes: Mapping[str, ModelShape],
        note: Callable[[str], None],
    ) -> None:
        self._directory = attempt.directory
        self._executor = executor
        self._restarts = attempt.restarts
        self._command = command
        self._memory = memory
        self._started_s = attempt.started_s
        self._note = note
        self._traced = _describe_for_planners(facts["workload"], plan, shapes)
        self._is_interrupted = False
        self._has_held = bool(find_held(attempt.config.model_dump()))
        self._body: dict[str, Any] = {"status": "running", **facts, "iterations": 0, "error": None, "resumed_from": []}
        versions = {}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):  # a run in process needs no Ray
                versions[name] = version(name)
        self._body |= {"restarts": self._restarts.total, "rollbacks": self._restarts.rollbacks, "versions": versions}

    def __enter__(self) -> RunSummary:
        self._executor.trace.stream_chrome(self._directory.path / "trace.json", self._traced)
        self.write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._body["status"] = "interrupted" if self._is_interrupted else "finished"
        else:
            self._body["status"] = "failed" if isinstance(error, Exception) else "interrupted"
            self._body["error"] = _describe(error) if isinstance(error, Exception) else None
        if self._body["status"] != "finished" and self._directory.exists:
            where, iteration = self._describe_start(), self._body["iterations"] + 1
            restart = None if error is None else self._restarts.decide(error, iteration, where)
            run = shlex.quote(str(self._directory.path))
            line = f"hybridflow {self._command} --resume {run}"
            if self._has_held:
                line = f"train(resume={str(self._directory.path)!r}, reward=...) with the same function"
            again = f"nothing is committed: {line} would start again"
            self._note(restart or (again if where == _FROM_BEGINNING else f"{line} {where}"))
        self._finish_trace()
        try:
            self.write()
        except RunDirectoryError as failure:
            if error is None:
                raise
            error.add_note(f"summary.json was not written: {failure}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._body[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._body[name]

    def interrupt(self) -> None:
        """Notes that the run stops between two iterations, before its last one."""
        self._is_interrupted = True

    def update(self, facts: Mapping[str, Any]) -> None:
        """Sets several numbers."""
        self._body |= facts

    def note_start(self, phases: Mapping[str, float]) -> None:
        """Notes the seconds of each phase before the first iteration, here and in the trace."""
        self._body["start_s"] = self._traced["start_s"] = {name: round(value, 3) for name, value in phases.items()}

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of what the numbers depend on."""
        found: Mapping[str, str] = self._body["versions"]
        return found

    @property
    def wall_s(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return time.perf_counter() - self._started_s

    def restore(self, program: Program) -> None:
        """Takes over what a commit holds of an earlier part of the run."""
        self._body |= program.summary
        self._body["last_commit"] = program.iteration
        self._body["resumed_from"] = [*self._body["resumed_from"], program.iteration]
        self._started_s -= program.totals["wall_s"]
        self.write()

    def kept(self) -> dict[str, Any]:
        """Returns the numbers that a run takes over when it goes on after a commit."""
        return {name: value for name, value in self._body.items() if name not in _OWN}

    def write(self) -> None:
        """Writes the file with the numbers so far.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        self._body["wall_s"] = self.wall_s
        self._body["peak_rss_bytes"] = self._memory.peak_bytes
        self._directory.write_json("summary.json", self._body)

    @property
    def body(self) -> dict[str, Any]:
        """The contents of the file."""
        return self._body

    def _describe_start(self) -> str:
        """Describes how a run that goes on does so."""
        last = self._body.get("last_commit")
        if last is None and find_commits(self._directory.path / WARM_START):
            return "goes on in its warm start"
        return _FROM_BEGINNING if last is None else f"goes on after iteration {last}"

    def _finish_trace(self) -> None:
        try:
            self._executor.trace.finish_chrome()
        except OSError as failure:
            self._note(f"warning: trace.json was not written: {failure.strerror}")


def _describe_for_planners(
    workload: Mapping[str, Any], plan: MappingPlan, shapes: Mapping[str, ModelShape]
) -> dict[str, Any]:
    """The facts with which `hf-mapper validate --trace` compares the times of a trace."""
    models = {role: asdict(shape) for role, shape in shapes.items()}
    return {"workload": dict(workload), "plan": json.loads(plan.to_json()), "models": models}


def _describe(error: BaseException) -> dict[str, Any]:
    """The failure as a table: its class and message, and the rank and process where that is known."""
    facts = {name: getattr(error, name, None) for name in _ERROR_FACTS}
    known = {name: value if isinstance(value, str | int) else None for name, value in facts.items()}
    return {"type": type(error).__name__, "message": str(error), **known}
