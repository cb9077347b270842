"""Modules of users in Python's own tables, which are those of the whole process: its path, and modules by name."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import NamedTuple

__all__ = ["found_at", "get_origin", "last_on_path", "note_loaded", "reading_again"]


class _Loaded(NamedTuple):
    """A module from a user's folder."""

    module: ModuleType
    digest: str
    """SHA-256 of its file when it was loaded: it may be edited after that."""


_LOADED: dict[str, _Loaded] = {}
"""By the names of modules. Under a name the program may have loaded another one since."""
_PATH = Lock()
_ADDED: Counter[str] = Counter()
"""Folders on Python's path by the blocks, of any thread, that want them there. `_PATH` is held while both change."""


@contextmanager
def last_on_path(folders: Sequence[str]) -> Iterator[None]:
    """Has modules looked for in these folders, too, after all others, while the block runs. Notes what it loads."""
    with _PATH:
        added = [folder for folder in folders if _ADDED[folder] or folder not in sys.path]
        sys.path += [folder for folder in added if not _ADDED[folder]]
        _ADDED.update(added)
    num_loaded = len(sys.modules)
    try:
        yield
    finally:
        for name in list(sys.modules)[num_loaded:]:
            if _lies_in(name, folders):
                note_loaded(name)
        with _PATH:
            _ADDED.subtract(added)
            for folder in added:
                if not _ADDED[folder]:
                    sys.path.remove(folder)


@contextmanager
def reading_again(folders: Sequence[str]) -> Iterator[None]:
    """Imports modules of these folders in the block as their files are now.

    Drops those that were loaded before if one of them was edited since, and those of other folders with names that
    these folders have, too. Functions that were taken from a module before keep it.
    """
    known = {name: loaded for name, loaded in dict(_LOADED).items() if sys.modules.get(name) is loaded.module}
    own = {name: loaded for name, loaded in known.items() if _lies_in(name, folders)}
    if any(_digest(loaded.module) != loaded.digest for loaded in own.values()):
        _drop(own)
    _drop({name for name in known.keys() - own if PathFinder.find_spec(_root_of(name), folders) is not None})
    with last_on_path(folders):
        yield


@contextmanager
def found_at(name: str, spec: ModuleSpec) -> Iterator[None]:
    """Imports `name` in the block from the place of `spec`, and drops a module of that name from elsewhere."""
    found = sys.modules.get(name)
    if found is not None and get_origin(getattr(found, "__spec__", None)) != get_origin(spec):
        _drop({each for each in list(sys.modules) if each == name or each.startswith(f"{name}.")})
    finder = _OneModule(name, spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def note_loaded(name: str) -> None:
    """Notes a module, which an import need not have loaded, for `reading_again`."""
    module = sys.modules.get(name)
    if module is not None and (name not in _LOADED or _LOADED[name].module is not module):
        _LOADED[name] = _Loaded(module, _digest(module))


def get_origin(spec: ModuleSpec | None) -> str | None:
    """The file of a module; the folders of a package without one."""
    if spec is None:
        return None
    return spec.origin or str(list(spec.submodule_search_locations or ()))


def _drop(names: Iterable[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)
        _LOADED.pop(name, None)


def _lies_in(name: str, folders: Sequence[str]) -> bool:
    """True if the first part of a dotted name is a module, or a package, of one of these folders itself."""
    spec = getattr(sys.modules.get(_root_of(name)), "__spec__", None)
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else []))
    return any(str(Path(place).resolve().parent) in folders for place in places)


def _root_of(name: str) -> str:
    return name.partition(".")[0]


def _digest(module: ModuleType) -> str:
    spec = getattr(module, "__spec__", None)
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return hashlib.sha256(file.read_bytes() if file is not None and file.is_file() else b"").hexdigest()


class _OneModule(MetaPathFinder):
    """Finds a single module."""

    def __init__(self, name: str, spec: ModuleSpec) -> None:
        self._name = name
        self._origin = spec.origin
        self._folders = spec.submodule_search_locations

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if it is asked for."""
        if fullname != self._name:
            return None
        folders = None if self._folders is None else list(self._folders)
        if self._origin is not None:
            return spec_from_file_location(fullname, self._origin, submodule_search_locations=folders)
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec
