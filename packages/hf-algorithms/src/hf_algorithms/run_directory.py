"""A run's directory: every file is written whole or not at all, metrics line by line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_algorithms.atomic_files import write_text
from hf_protocols import ConfigError

__all__ = ["RunDirectory"]

_MARK = "metrics.jsonl"


class RunDirectory:
    """Where one run leaves its files.

    Args:
        path: the directory; made with its parents.
        overwrite: replace the files of an earlier run that lies there.

    Raises:
        ConfigError: if it cannot be written, or is not empty; it is never emptied unless an earlier run made it.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path.resolve()
        try:
            self._prepare(overwrite)
        except OSError as error:
            raise ConfigError(
                f"run.output_dir={str(path)!r} cannot be written: {error.strerror}; choose another directory"
            ) from None

    def _prepare(self, overwrite: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            if not (overwrite and (self.path / _MARK).is_file()):
                raise ConfigError(
                    f"run.output_dir={str(self.path)!r} is not empty: choose another directory, or --overwrite to "
                    "replace an earlier run"
                )
            shutil.rmtree(self.path)
            self.path.mkdir()
        (self.path / _MARK).touch()

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_text(self.path / name, text)

    def write_json(self, name: str, body: Any) -> None:
        """Write JSON atomically, indented."""
        self.write_text(name, json.dumps(body, indent=2) + "\n")

    def append_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Add one object to ``metrics.jsonl`` and hand it to the operating system at once."""
        with (self.path / _MARK).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
