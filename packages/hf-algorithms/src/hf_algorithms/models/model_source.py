"""The model that a command is given: a model directory, a hub name, or the directory of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hf_algorithms.run.directory import ORIGIN, is_run
from hf_engine import merge_adapter
from hf_engine.model_directory import is_adapter
from hf_protocols import ConfigError
from hf_protocols.paths import read_path
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.checkpoints.origin import RunOrigin
    from hf_algorithms.config import Config

__all__ = ["ModelSource", "find_model_source", "holding_model", "holding_whole_model"]

_MODEL = "model"
"""Folder of a run that holds its last committed model."""
_ADAPTER, _BASE = "adapter_config.json", "base_model_name_or_path"
_BASES = ("warm_model", "initial_model", "merged_models")
"""Folders of a run with models that its adapters may belong to."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as the user named it.

    Attributes:
        label: beginning of messages, such as `model = 'runs/mine'`.
        path: directory or hub name of the model.
        run: directory of the run that it is from; None for a model alone.
    """

    label: str
    path: str
    run: Path | None

    def load_config(self) -> Config | None:
        """Returns the run's configuration, whose paths hold in any folder; None without a run.

        Raises:
            ConfigError: for a configuration that cannot be read, or a recipe of one's own that is not found.
        """
        if self.run is None:
            return None
        from hf_algorithms.config import load_config, parse_config

        if self._origin is None:
            return load_config(self.run / "config.toml", search_path=self.search_path, command=None)
        return parse_config(dict(self._origin.sections), search_path=self.search_path, command=None)

    @property
    def search_path(self) -> tuple[str, ...]:
        """Folders of the run's own modules, after the current one; none without a run."""
        if self.run is None:
            return ()
        own = () if self._origin is None else self._origin.search_path
        return (os.getcwd(), *own, str(self.run.resolve()))

    @cached_property
    def _origin(self) -> RunOrigin | None:
        """Record of the run's start; None for a copy without that file, and for a run that has only begun."""
        from hf_algorithms.checkpoints.origin import read_origin

        file = None if self.run is None else self.run / ORIGIN
        return read_origin(file.parent) if file is not None and file.is_file() and file.stat().st_size else None


def find_model_source(model: str | Path) -> ModelSource:
    """Returns where the model of a directory, a hub name or a run is.

    Raises:
        ConfigError: for a run that has committed no model.
    """
    if not isinstance(model, str | os.PathLike):
        shown = " ".join(show(model).split())  # a model is shown in many lines
        raise ConfigError(f"model = {shown}: is not a path or a hub name. Save it with save_pretrained first")
    path = read_path("model", os.fspath(model))
    label = f"model = {show(os.fspath(model))}"
    folder = Path(path)
    if not (folder.is_dir() and is_run(folder)):
        return ModelSource(label=label, path=path, run=None)
    if not (folder / _MODEL).is_dir():
        raise ConfigError(f"{label}: is a run without {_MODEL}/. A run commits it before its first iteration")
    return ModelSource(label=label, path=str(folder / _MODEL), run=folder)


@contextmanager
def holding_whole_model(source: ModelSource) -> Iterator[str]:
    """Yields a directory or hub name with whole weights; those of an adapter are merged into a temporary one.

    Raises:
        ConfigError: for an adapter whose base model is absent.
    """
    if not is_adapter(source.path):
        yield source.path
        return
    with TemporaryDirectory() as folder, holding_model(source) as adapter:
        merged = Path(folder) / "merged"
        merge_adapter(adapter, merged, label=source.label)
        yield str(merged)


@contextmanager
def holding_model(source: ModelSource, path: str | None = None) -> Iterator[str]:
    """Yields the model as it is; for an adapter of a moved run, a temporary copy that names the present base.

    Args:
        source: of the model.
        path: another model of the same run.
    """
    path = path or source.path
    base = None if source.run is None or not is_adapter(path) else _find_moved_base(Path(path), source.run)
    if base is None:
        yield path
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder) / _MODEL
        shutil.copytree(path, copy)
        config = json.loads((copy / _ADAPTER).read_text(encoding="utf-8"))
        (copy / _ADAPTER).write_text(json.dumps(config | {_BASE: str(base)}, indent=2) + "\n", encoding="utf-8")
        yield str(copy)


def _find_moved_base(adapter: Path, run: Path) -> Path | None:
    """Returns the base of an adapter in a run that was moved; None if it was not, or if the run has no such folder."""
    # `read_adapter` says what is wrong with a file.
    with suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        named = Path(json.loads((adapter / _ADAPTER).read_text(encoding="utf-8")).get(_BASE))
        for tail in (named.parts[-1:], named.parts[-2:]):
            found = run.resolve().joinpath(*tail)
            if not named.exists() and tail and tail[0] in _BASES and found.is_dir():
                return found
    return None
