"""Records of saved and loaded state for callers: files with digests, and the result of a load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from hf_protocols.errors import StateError
from hf_protocols.validation import Checks, show

__all__ = ["LoadedState", "StateFile"]

_check = Checks(StateError)

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """One file of a state.

    Raises:
        StateError: for a path that leaves the state's directory, or a size or digest that is not one.
    """

    path: str
    """Relative to the state's directory, with `/` between its parts."""
    bytes: int
    sha256: str
    """Of the bytes on disk, in hexadecimal."""

    def __post_init__(self) -> None:
        _check.kind("path", self.path, str, "the path of a file")
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or "\0" in self.path or "\\" in self.path:
            raise StateError(f"path={show(self.path)} is not a path inside the state's directory")
        _check.count(f"bytes of {show(self.path)}", self.bytes, least=0)
        _check.kind(f"sha256 of {show(self.path)}", self.sha256, str, "64 hexadecimal digits")
        if len(self.sha256) != 64 or not _HEX.issuperset(self.sha256):
            raise StateError(f"sha256={show(self.sha256)} of {show(self.path)} is not 64 hexadecimal digits")


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """Result of `load_state`."""

    optimizer_steps: int
    weight_version: int
    """As it was given to `save_state`."""
    notice: str | None
    """Differences from the saved state, for the log; None if every bit is the same."""
