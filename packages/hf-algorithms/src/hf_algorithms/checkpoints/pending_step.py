"""A step whose states are being written: a thread commits it as soon as all of them are on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hf_algorithms.checkpoints.commit import CommittedFile
from hf_protocols import HybridFlowError

if TYPE_CHECKING:
    from hf_engine import StateFile

__all__ = ["PendingStep"]

_LOOK_S = 0.05
"""Between two looks at the lists of the ranks."""


class PendingStep:
    """Commits a step once every rank has listed the files that it wrote. Asks no rank: their queues hold later calls.

    Args:
        folder: of the step.
        iteration: after which it was made.
        ranks: number of ranks that write, by role.
        commit: makes the step durable, with the files of all ranks.
    """

    def __init__(
        self,
        folder: Path,
        iteration: int,
        ranks: Mapping[str, int],
        commit: Callable[[Sequence[CommittedFile]], None],
    ) -> None:
        from hf_engine import list_written  # here: two threads that import torch at once fail

        self._list_written = list_written
        self.folder = folder
        self.iteration = iteration
        self._ranks = ranks
        self._commit = commit
        self._stops = threading.Event()
        self._error: HybridFlowError | OSError | None = None
        self._is_committed = False
        self._thread = threading.Thread(target=self._watch, name=f"commit-{iteration}", daemon=True)
        self._thread.start()

    @property
    def is_committed(self) -> bool:
        """True once the step is durable."""
        return self._is_committed

    @property
    def has_failed(self) -> bool:
        """True once it is known that the step cannot be committed; `finish` and the ranks say why."""
        return self._error is not None

    def finish(self, files: Mapping[str, Sequence[StateFile]]) -> None:
        """Commits the step, unless that is done; all files are on disk.

        Args:
            files: of all ranks, by role.

        Raises:
            HybridFlowError, OSError: if it cannot be committed.
        """
        self.stop()
        if self._error is not None:
            raise self._error
        if not self._is_committed:
            self._commit(_name_files(files))
            self._is_committed = True

    def stop(self) -> None:
        """Ends the thread, after a last look; a commit that it has begun is completed."""
        self._stops.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            is_last_look = False
            while (files := self._list_files()) is None:
                if is_last_look:
                    return
                is_last_look = self._stops.wait(_LOOK_S)
            self._commit(_name_files(files))
            self._is_committed = True
        except (HybridFlowError, OSError) as error:  # finish() raises it in the main thread
            self._error = error

    def _list_files(self) -> dict[str, Sequence[StateFile]] | None:
        found: dict[str, Sequence[StateFile]] = {}
        for role, ranks in self._ranks.items():
            files = self._list_written(self.folder / role, ranks)
            if files is None:
                return None
            found[role] = files
        return found


def _name_files(files: Mapping[str, Sequence[StateFile]]) -> list[CommittedFile]:
    """The files by their paths in the step's folder."""
    return [
        CommittedFile(**{**asdict(file), "path": f"{role}/{file.path}"})
        for role, written in files.items()
        for file in written
    ]
