"""Modules of users in Python's own tables, which are those of the whole process: its path, and modules by name.

Two projects may have modules of the same names. A project is a list of folders in which modules are looked for last.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from hf_protocols.process_lock import ProcessLock

__all__ = ["find_in", "found_at", "get_origin", "last_on_path"]

_DIGESTS: dict[str, str] = {}
"""SHA-256 of each file whose module a user named, by its path, before it was loaded: it may be edited after that."""


class _Loaded(NamedTuple):
    """A module or a package of a project."""

    module: ModuleType
    folder: str


_LOADED: dict[str, _Loaded] = {}
"""By name; those that were set aside are not among them."""
_SET_ASIDE: dict[str, dict[str, ModuleType]] = {}
"""By folder: modules, by their names, that gave way to those of another project."""
_TABLES = ProcessLock(RuntimeError, "a thread kept the tables of modules for {timeout_s} s")
"""Is held while these tables change, and Python's."""
_ADDED: Counter[str] = Counter()
"""Folders on Python's path for blocks that have not ended: how many blocks each."""


@contextmanager
def last_on_path(folders: Sequence[str]) -> Iterator[None]:
    """Has modules looked for in these folders, too, after all others, while the block runs.

    A module of another project gives way to one of the same name in these folders, and comes back with its project.
    """
    with _TABLES.held():
        _set_namesakes_aside(folders)
        before = dict(sys.modules)
        added = [each for each in dict.fromkeys(folders) if _ADDED[each] or each not in sys.path]
        sys.path += [each for each in added if not _ADDED[each]]
        _ADDED.update(added)
    try:
        yield
    finally:
        with _TABLES.held():
            fresh = {name: module for name, module in list(sys.modules.items()) if before.get(name) is not module}
            for name, module in fresh.items():
                if (folder := _find_folder(name, module)) is not None and folder in folders:
                    _LOADED[name] = _Loaded(module, folder)
            _ADDED.subtract(added)
            for each in added:
                if not _ADDED[each]:
                    with suppress(ValueError):  # the block may have changed the path itself
                        sys.path.remove(each)


def find_in(folders: Sequence[str], module_name: str) -> tuple[ModuleSpec, ModuleSpec] | None:
    """The first part of a dotted name and the module itself, if one of the folders has both."""
    path: Sequence[str] | None = list(folders)
    specs = []
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, path) if path is not None else None
        if spec is None:
            return None
        specs.append(spec)
        path = spec.submodule_search_locations
    return (specs[0], specs[-1]) if specs[-1].origin else None  # a folder without __init__.py has no function


@contextmanager
def found_at(name: str, root: ModuleSpec, module: ModuleSpec) -> Iterator[None]:
    """Imports the first part of a dotted name in the block from the place of `root`.

    Forgets what is loaded under this name from elsewhere, and a module whose file was edited since it was loaded here.

    Args:
        name: under which the first part is imported.
        root: of the first part.
        module: what the dotted name stands for.
    """
    found, digest = sys.modules.get(name), _digest(module)
    is_other = found is not None and get_origin(getattr(found, "__spec__", None)) != get_origin(root)
    if is_other or _DIGESTS.get(str(module.origin), digest) != digest:
        _forget(name)
    _DIGESTS[str(module.origin)] = digest
    finder = _OneModule(name, root)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def get_origin(spec: ModuleSpec | None) -> str | None:
    """The file of a module; the folders of a package without one."""
    if spec is None:
        return None
    return spec.origin or str(list(spec.submodule_search_locations or ()))


def _set_namesakes_aside(folders: Sequence[str]) -> None:
    for name, (module, folder) in list(_LOADED.items()):
        if sys.modules.get(name) is not module:
            del _LOADED[name]
        elif folder not in folders:
            found = PathFinder.find_spec(name, list(folders))
            if found is not None and found.origin is not None:  # not a folder of data
                del _LOADED[name]
                _SET_ASIDE.setdefault(folder, {}).update(_forget(name))
    for folder in folders:
        for name, module in _SET_ASIDE.pop(folder, {}).items():
            sys.modules.setdefault(name, module)
            if "." not in name:
                _LOADED[name] = _Loaded(module, folder)


def _forget(name: str) -> dict[str, ModuleType]:
    """Removes a module, and all that is inside of a package; returns them by name."""
    inside = [key for key in sys.modules if key == name or key.startswith(f"{name}.")]
    return {each: sys.modules.pop(each) for each in inside}


def _find_folder(name: str, module: ModuleType) -> str | None:
    """The folder in which a module or a package lies; None for one that is inside of a package."""
    spec = getattr(module, "__spec__", None)
    if spec is None or "." in name:
        return None
    places = list(spec.submodule_search_locations or ([spec.origin] if spec.has_location else []))
    return str(Path(places[0]).parent.resolve()) if places else None


def _digest(spec: ModuleSpec) -> str:
    file = Path(spec.origin) if spec.origin else None
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
