"""Says once that the object store of a local cluster is too small: before a batch is stored, or afterwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hf_protocols.validation import show

__all__ = ["SpillCheck"]

_LOG = logging.getLogger(__name__)
_FOLDERS = "ray_spilled_objects_*"
"""In the session's folder. Ray makes one when it first spills, and keeps it when the files in it are gone."""


class SpillCheck:
    """Looks whether a local cluster has moved objects from shared memory to files.

    Args:
        sessions: session folders of the cluster.
        store_bytes: size of its object store.
    """

    def __init__(self, sessions: Sequence[str], store_bytes: int) -> None:
        self._sessions = [Path(session) for session in sessions]
        self._store_bytes = store_bytes

    def announce(self, num_bytes: int) -> bool:
        """Returns True if a batch of so many bytes is larger than the whole store, with a warning in the log.

        Ray puts such a batch in a file of its own, which `look` does not find.
        """
        if num_bytes <= self._store_bytes:
            return False
        _LOG.warning(
            "cluster.object_store_bytes=%d (RayExecutor(object_store_bytes=...)): a batch of %d bytes is larger than "
            "the object store, and Ray puts it in a file, which is slow. Raise it, or split the batch",
            self._store_bytes,
            num_bytes,
        )
        return True

    def look(self) -> bool:
        """Returns True if objects were spilled, with a warning in the log. Takes some microseconds."""
        folders = [folder for session in self._sessions for folder in session.glob(_FOLDERS)]
        if not folders:
            return False
        _LOG.warning(
            "cluster.object_store_bytes=%d (RayExecutor(object_store_bytes=...)): the object store is full, and Ray "
            "moves batches to files in %s, which is slow. Raise it",
            self._store_bytes,
            show(str(folders[0].parent)),
        )
        return True
