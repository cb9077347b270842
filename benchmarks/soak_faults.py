"""A fault at a moment of a run, for `soak.py`: `arm` watches the calls and commits of a run in this process."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hf_algorithms.checkpoints import saver
from hf_controller.executors.base import Executor
from hf_controller.executors.tracing import TracingExecutor

__all__ = ["PHASES", "SERVER", "Fault", "arm"]

PHASES = {
    "weight sync": "generate_sequences",
    "generation": "generate_sequences",
    "scoring": "compute_reward",
    "update": "update_actor",
    "commit, before its data": "save_state",
    "commit, before COMMIT": "write_commit",
    "commit, after COMMIT": "write_commit, done",
}
"""The moment after which a fault comes, by the phase's name. Weights move at the beginning of a generation."""
DELAYS_S = {"weight sync": 0.0, "commit, before COMMIT": 0.0}
"""Longest time between the moment and the fault, where that is not `LONGEST_DELAY_S`."""
LONGEST_DELAY_S = 0.05
SERVER = "server.pid"
"""File of a program's folder with the process of the server that it asks for samples."""
_FILE_BYTES = 4096
_CALLS = {"trainer": "update_actor", "reward": "compute_reward"}
_PROCESSES = {"raylet": "raylet", "gcs": "gcs_server"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and when it comes.

    Attributes:
        kind: `"SIGKILL"`, `"SIGSTOP"` or `"disk full"`: files of the victim cannot grow beyond 4 KiB.
        victim: `"controller"`, `"trainer"`, `"server"`, `"reward"`, `"raylet"` or `"gcs"`.
        phase: key of `PHASES`.
        count: the fault comes when the program reaches the phase for this time, from 1.
        delay_s: after that.
    """

    kind: str
    victim: str
    phase: str
    count: int
    delay_s: float


class _Trigger:
    """Counts how often the program reaches the phase, and strikes once."""

    def __init__(self, fault: Fault, note: Path) -> None:
        self._fault = fault
        self._note = note
        self._lock = threading.Lock()
        self._times = 0
        self._ranks: dict[str, int] = {}
        """Processes of ranks, by victim."""

    def note_group(self, executor: Executor, group: Any) -> None:
        """Remembers the process of a group's first rank, if the fault is meant for it."""
        victim = self._fault.victim
        if victim not in self._ranks and _CALLS.get(victim) in group.methods:
            found = re.search(r"process (\d+)", executor.describe(group).get(0, ""))
            if found:
                self._ranks[victim] = int(found[1])

    def reach(self, moment: str) -> None:
        """Strikes if this is the moment, at once or after the delay in a thread."""
        with self._lock:
            if PHASES[self._fault.phase] != moment:
                return
            self._times += 1
            if self._times != self._fault.count:
                return
        if self._fault.delay_s:
            threading.Thread(target=self._strike, daemon=True).start()
        else:
            self._strike()

    def _strike(self) -> None:
        time.sleep(self._fault.delay_s)
        pid = self._find_victim()
        facts = {**asdict(self._fault), "pid": pid, "at_s": time.time()}
        self._note.write_text(json.dumps(facts))
        if self._fault.kind == "disk full":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))
        else:
            os.kill(pid, signal.Signals[self._fault.kind])

    def _find_victim(self) -> int:
        """The process of the victim: this one, that of its rank on Ray, the server's, or else a child of this one."""
        victim = self._fault.victim
        if victim == "controller":
            return os.getpid()
        if victim == "server":
            return int((self._note.parent / SERVER).read_text())
        if victim in self._ranks:
            return self._ranks[victim]
        children = psutil.Process().children(recursive=True)
        if victim in _PROCESSES:
            return next(each.pid for each in children if each.name().startswith(_PROCESSES[victim]))
        return random.choice(
            children
        ).pid  # in process: the host of the reward's functions, or a process that calls them


def arm(fault: Fault, note: Path) -> None:
    """Lets a fault strike a run of this process.

    Args:
        fault: that comes once.
        note: file that gets the fault, its process and its time.
    """
    trigger = _Trigger(fault, note)
    submit: Callable[..., Any] = Executor.submit
    write_commit: Callable[..., Any] = saver.write_commit

    def submit_and_count(self: Executor, group: Any, method: str, *arguments: Any) -> Any:
        if not isinstance(self, TracingExecutor):  # whose calls say what a run will do
            trigger.note_group(self, group)
            trigger.reach(method)
        return submit(self, group, method, *arguments)

    def write_and_count(*arguments: Any, **named: Any) -> Any:
        trigger.reach("write_commit")
        commit = write_commit(*arguments, **named)
        trigger.reach("write_commit, done")
        return commit

    Executor.submit = submit_and_count  # type: ignore[method-assign]
    saver.write_commit = write_and_count
