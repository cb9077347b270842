"""A run's directory: every file is written whole or not at all, metrics line by line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_algorithms.atomic_files import write_text
from hf_protocols import ConfigError, HybridFlowError

__all__ = ["RunDirectory", "RunDirectoryError"]

_MARK = ".hybridflow-run"
_FILES = (
    "config.toml", "plan.json", "metrics.jsonl", "samples.json", "summary.json", "trace.json", "report.html",
)  # fmt: skip
_FOLDERS = ("initial_model", "warm_model", "model")


class RunDirectoryError(HybridFlowError):
    """A file of the run that could not be written; what was written before is complete."""


class RunDirectory:
    """Where one run leaves its files. Nothing is written or removed before :meth:`begin`.

    Args:
        path: the directory.
        overwrite: replace the files of an earlier run that lies there; other files stay.

    Raises:
        ConfigError: if it cannot be written, or is not empty and no earlier run may be replaced.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path.resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            is_free = not any(self.path.iterdir()) or (overwrite and (self.path / _MARK).is_file())
            if is_free:
                (self.path / _MARK).touch()
        except OSError as error:
            raise ConfigError(
                f"run.output_dir={str(path)!r} cannot be written: {error.strerror}; choose another directory"
            ) from None
        if not is_free:
            raise ConfigError(
                f"run.output_dir={str(self.path)!r} is not empty: choose another directory, or --overwrite to "
                "replace an earlier run"
            )

    def check_inputs(self, paths: Mapping[str, str | None]) -> None:
        """Refuse inputs that :meth:`begin` would remove.

        Args:
            paths: key of the configuration and path, or None.

        Raises:
            ConfigError: naming the key.
        """
        own = [self.path / name for name in (*_FILES, *_FOLDERS)]
        for key, value in paths.items():
            resolved = Path(value).resolve() if value else None
            if resolved and any(resolved == each or each in resolved.parents for each in own if each.exists()):
                raise ConfigError(f"{key}={value!r} belongs to the run that would be replaced: change run.output_dir")

    def begin(self) -> None:
        """Remove what an earlier run left; call it once the new run's inputs were found good."""
        with self._reporting("the earlier run"):
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            for name in _FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / "metrics.jsonl").touch()

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically.

        Raises:
            RunDirectoryError: if it cannot be written, as all other methods do.
        """
        with self._reporting(name):
            write_text(self.path / name, text)

    def write_json(self, name: str, body: Any) -> None:
        """Write JSON atomically, indented."""
        self.write_text(name, json.dumps(body, indent=2) + "\n")

    def append_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Add one object to ``metrics.jsonl`` and hand it to the operating system at once."""
        with self._reporting("metrics.jsonl"), (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A folder to fill; it takes the place of folder ``name`` when the block ends without an error."""
        fresh = self.path / f".{name}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        yield fresh
        with self._reporting(name):
            shutil.rmtree(self.path / name, ignore_errors=True)
            os.replace(fresh, self.path / name)

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"{name} in run.output_dir={str(self.path)!r} cannot be written: {error.strerror}; "
                "free some space or choose another directory"
            ) from error
