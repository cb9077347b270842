"""The model that a command is given: a model directory, a hub name, or the directory of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hf_algorithms.run_directory import ORIGIN, is_run
from hf_engine import merge_adapter
from hf_engine.model_directory import is_adapter
from hf_protocols import ConfigError
from hf_protocols.paths import read_path
from hf_protocols.toml import read_toml
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.checkpoints.origin import RunOrigin
    from hf_algorithms.config import Config

__all__ = ["ModelSource", "find_model_source", "holding_model", "holding_whole_model"]

_MODEL = "model"
"""Folder of a run that holds the model of its last evaluation."""
_ADAPTER, _BASE = "adapter_config.json", "base_model_name_or_path"
_BASES = ("warm_model", "initial_model", "merged_models")
"""Folders of a run with models that its adapters may belong to."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as the user named it.

    Attributes:
        name: as it was given.
        path: directory or hub name of the model.
        run: directory of the run that it is from; None for a model alone.
        sections: configuration that was given in place of the run's.
        folder: of the file that it was read from.
    """

    name: str
    path: str
    run: Path | None
    sections: Mapping[str, Any] | None = None
    folder: str | None = None

    @property
    def label(self) -> str:
        """Beginning of messages, such as `model = 'runs/mine'`."""
        return f"model = {show(self.name)}"

    def load_config(self) -> Config | None:
        """Returns the given configuration, else the run's, whose paths hold in any folder; None without either.

        Raises:
            ConfigError: for a configuration that cannot be read, or a recipe of one's own that is not found.
        """
        from hf_algorithms.config import parse_config

        sections = self.read_own_sections() if self.sections is None else self.sections
        return None if sections is None else parse_config(sections, search_path=self.search_path, command=None)

    def read_own_sections(self) -> dict[str, Any] | None:
        """Returns those of the run's configuration, None without a run.

        Raises:
            ConfigError: for a file that cannot be read.
        """
        if self.run is None:
            return None
        return read_toml(self.run / "config.toml") if self._origin is None else deepcopy(dict(self._origin.sections))

    @property
    def search_path(self) -> tuple[str, ...]:
        """Folders of users' modules: the current one, that of a given file, and the run's own."""
        given = () if self.folder is None else (self.folder,)
        if self.run is None:
            return () if self.sections is None else (os.getcwd(), *given)
        own = () if self._origin is None else self._origin.search_path
        return (os.getcwd(), *given, *own, str(self.run.resolve()))

    @cached_property
    def _origin(self) -> RunOrigin | None:
        """Record of the run's start; None for a copy without that file, and for a run that has only begun."""
        from hf_algorithms.checkpoints.origin import read_origin

        file = None if self.run is None else self.run / ORIGIN
        return read_origin(file.parent) if file is not None and file.is_file() and file.stat().st_size else None


def find_model_source(
    model: object, *, config: object = None, changes: Mapping[str, Any] = MappingProxyType({})
) -> ModelSource:
    """Returns where a model is, and the configuration that it is used with.

    Args:
        model: directory, hub name or run; None: the run that `config` describes, or the model that it begins with.
        config: a TOML file or its sections, in place of the run's.
        changes: of the configuration, by `section.key`.

    Raises:
        ConfigError: for a run that has committed no model, and a configuration that cannot be read.
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(f"set = {show(changes)}: is not a mapping of section.key to values")
    from hf_algorithms.config import read_sections, set_key

    sections = None if config is None else read_sections(config)
    found = None if model is None else _find_model(model)
    if changes and sections is None:
        sections = None if found is None else found.read_own_sections()
        if found is not None and sections is None:
            raise ConfigError(
                f"set: changes the configuration of a run, and {found.label} is not a run. Pass config, or arguments "
                "such as max_new_tokens"
            )
    if sections is not None:
        for key, value in changes.items():
            set_key(sections, str(key), value, label="set")
    found = found or _find_model(_name_model(sections))
    folder = str(Path(config).resolve().parent) if isinstance(config, str | os.PathLike) else None
    return replace(found, sections=sections, folder=folder)


def _name_model(sections: Mapping[str, Any] | None) -> object:
    """The run that a configuration describes, if it has begun, or else the model that it begins with."""
    if sections is None:
        raise ConfigError("model is missing. Pass a directory, a hub name or a run")
    tables = {name: keys for name, keys in sections.items() if isinstance(keys, Mapping)}
    run, path = tables.get("run", {}).get("output_dir"), tables.get("model", {}).get("path")
    if isinstance(run, str) and is_run(Path(run).expanduser()):
        return run
    if path is None:
        raise ConfigError("model is missing: config has no model.path, and its run.output_dir is not a run. Pass it")
    return path


def _find_model(model: object) -> ModelSource:
    if not isinstance(model, str | os.PathLike):
        shown = " ".join(show(model).split())  # a model is shown in many lines
        raise ConfigError(f"model = {shown}: is not a path or a hub name. Save it with save_pretrained first")
    path = read_path("model", os.fspath(model))
    folder, alone = Path(path), ModelSource(name=os.fspath(model), path=path, run=None)
    if not (folder.is_dir() and is_run(folder)):
        return alone
    if not (folder / _MODEL).is_dir():
        raise ConfigError(f"{alone.label}: is a run without {_MODEL}/. A run writes it before its first iteration")
    return replace(alone, path=str(folder / _MODEL), run=folder)


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
