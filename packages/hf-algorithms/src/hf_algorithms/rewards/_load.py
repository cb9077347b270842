"""A function from its name in a configuration, `module:function` or `file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import Timer
from types import FunctionType, ModuleType
from typing import Any

from hf_algorithms.url_secrets import hide_secrets
from hf_algorithms.users_code import describe_raised, find_specs
from hf_controller import Terminated
from hf_protocols.errors import ConfigError
from hf_protocols.paths import explain_variables
from hf_protocols.process_lock import ProcessLock
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import shorten, show

__all__ = ["SHIPPED", "get_users_folders", "get_users_function", "imports_from", "load_function"]

_HOME = "hf_algorithms.rewards"
_DIGESTS: dict[str, str] = {}
"""SHA-256 of the file of each user's module, by the module's name, when it was loaded: it may be edited after that."""
_SLOW_IMPORT_S = 10.0
"""After this an import of a user's module is mentioned: nothing else would say why the program waits."""
_LONGEST_WAIT_S = 120.0
"""For imports of other threads: two modules of one name may be in two folders."""
_IMPORTING = ProcessLock(
    ConfigError, "another thread of this process has imported a function for {timeout_s} s. Wait for its end"
)
_PATH = ProcessLock(RuntimeError, "another thread changed Python's path for {timeout_s} s")
_ADDED: Counter[str] = Counter()
"""Folders on Python's path for blocks that have not ended: how many blocks each. `_PATH` is held where it changes."""
SHIPPED = ("exact_match", "gsm8k_accuracy", "gsm8k_reward", "math_verify", "number_match")
"""Functions of `hf_algorithms.rewards` that their names alone stand for."""


def load_function(name: str, *, search_path: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Imports `module` and returns its `function`.

    Args:
        name: `module:function`, where dots lead into packages; `file.py:function`, with a path from any folder; or
            the name of a shipped function alone, such as `exact_match`.
        search_path: folders to look for the module in before Python's own path, such as the configuration's. While
            it is imported, and while its function runs, other modules are looked for in them last: the module may
            import its neighbours, and they hide no installed module.

    Raises:
        ConfigError: for another form, a module that is not found or that raises while it is imported, and a function
            that is not in it, with the nearest names that are.
    """
    if name in SHIPPED:
        name = f"{_HOME}:{name}"
    if "://" in name:
        raise ConfigError(
            f"{show(hide_secrets(name))}: a server is asked by http:// or https:// alone. Correct its address"
        )
    module_name, colon, function_name = name.rpartition(":")
    folders = list(dict.fromkeys(str(Path(folder).resolve()) for folder in search_path))
    is_file = module_name.endswith(".py")
    if not (colon and function_name.isidentifier() and (is_file or _is_dotted(module_name))):
        raise ConfigError(
            f"{show(name)} does not name a function. Write module:function, such as "
            f"hf_algorithms.rewards:exact_match, or file.py:function. {_nearest(name, SHIPPED)}"
        )
    if is_file:
        module_name, folders = _find_file(name, Path(module_name).expanduser(), folders)
    # What a module prints while it is imported is not part of a command's results.
    with _IMPORTING.held(_LONGEST_WAIT_S), _mentioned(name, module_name), redirect_stdout(sys.stderr):
        module = _import(module_name, folders, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "is not a function" if hasattr(module, function_name) else "does not exist"
        hint = _nearest(function_name, _public_functions(module))
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{show(name)}: {shorten(function_name)} {found} in {where}. {hint}")
    return _with_neighbours(function, folders) if _find_in(folders, module_name) else function


def _is_dotted(module_name: str) -> bool:
    return all(part.isidentifier() for part in module_name.split("."))


def _find_file(name: str, file: Path, folders: list[str]) -> tuple[str, list[str]]:
    """The module of a file, and the folders in which it and its neighbours are."""
    places = [Path(folder) for folder in folders] or [Path.cwd()]
    found = next((place / file for place in places if (place / file).is_file()), None)
    if found is None:
        where = "" if file.is_absolute() else f" in {', '.join(map(str, places))}"
        hint = explain_variables(str(file))
        raise ConfigError(f"{show(name)}: no file {show(str(file))}{where}. Give the path of a Python file{hint}")
    if not found.stem.isidentifier():
        raise ConfigError(f"{show(name)}: {show(found.name)} is not the name of a module. Rename the file")
    own = str(found.resolve().parent)
    return found.stem, [own, *(folder for folder in folders if folder != own)]


def _import(module_name: str, folders: list[str], name: str) -> ModuleType:
    importlib.invalidate_caches()
    spec = _find_in(folders, module_name)
    root, dot, rest = module_name.partition(".")
    try:
        if spec is None:
            return importlib.import_module(module_name)
        alias = _choose_alias(root, spec, folders)
        with _found_at(alias, spec), _last_on_path(folders):
            return importlib.import_module(alias + dot + rest)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if spec is not None or not (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"{show(name)}: importing {shorten(module_name)} raised {describe_raised(error)}"
            ) from error
        places = ", ".join(folders) or "Python's path"
        raise ConfigError(
            f"{show(name)}: no module {show(missing)} in {places}. {_nearest(module_name, _module_names(folders))}"
        ) from error
    except Terminated:
        raise
    except (
        Exception,
        SystemExit,
        GeneratorExit,
    ) as error:  # a user's module may raise anything, which the user should see
        raise ConfigError(f"{show(name)}: importing {shorten(module_name)} raised {describe_raised(error)}") from error


@contextmanager
def _mentioned(name: str, module_name: str) -> Iterator[None]:
    """Mentions an import that takes long."""
    slow = Timer(_SLOW_IMPORT_S, _say_slow, (name, module_name))
    slow.daemon = True
    slow.start()
    try:
        yield
    finally:
        slow.cancel()


def _say_slow(name: str, module_name: str) -> None:
    line = f"{show(name)}: importing {shorten(module_name)} has taken {_SLOW_IMPORT_S:g} s and goes on"
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def _last_on_path(folders: list[str]) -> Iterator[None]:
    with _PATH.held():
        added = [each for each in dict.fromkeys(folders) if _ADDED[each] or each not in sys.path]
        sys.path += [each for each in added if not _ADDED[each]]
        _ADDED.update(added)
    try:
        yield
    finally:
        with _PATH.held():
            _ADDED.subtract(added)
            for each in added:
                if not _ADDED[each]:
                    with suppress(ValueError):  # the block may have changed the path itself
                        sys.path.remove(each)


def imports_from(search_path: Sequence[str]) -> AbstractContextManager[None]:
    """Lets the code of a block import a user's modules from these folders, after installed ones."""
    return _last_on_path([str(Path(folder).resolve()) for folder in search_path])


def _with_neighbours(function: Callable[..., Any], folders: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with _last_on_path(folders):
            return function(*arguments, **options)

    # Attributes of a user's object may raise anything: a function has those that are wanted.
    named = function if isinstance(function, FunctionType) else type(function)
    call.__module__, call.__qualname__, call.__name__ = named.__module__, named.__qualname__, named.__name__
    call.users_function, call.folders = function, tuple(folders)  # type: ignore[attr-defined]
    return call


def get_users_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the user's own function behind one that `load_function` returned."""
    own = vars(function) if isinstance(function, FunctionType) else {}
    written: Callable[..., Any] = own.get("users_function", function)
    return written


def get_users_folders(function: Callable[..., Any]) -> tuple[str, ...]:
    """Folders in which the modules of a function are looked for that `load_function` returned."""
    folders: tuple[str, ...] = vars(function).get("folders", ()) if function is not get_users_function(function) else ()
    return folders


def _find_in(folders: list[str], module_name: str) -> ModuleSpec | None:
    """The first part of a dotted name, if one of the folders has the whole of it."""
    specs = find_specs(folders, module_name)
    return specs[0] if specs and specs[-1].origin else None  # a folder without __init__.py has no function


def _choose_alias(root: str, spec: ModuleSpec, folders: list[str]) -> str:
    """The name to load a user's module under: another one if an installed module has its name.

    Others that import this name then still get what is installed.
    """
    own_path = [entry for entry in sys.path if str(Path(entry).resolve()) not in folders]
    # Other finders know modules of their own, such as built-in ones and editable installations.
    found = [each.find_spec(root, own_path if each is PathFinder else None) for each in sys.meta_path]
    return root if {_origin(each) for each in found if each is not None} <= {_origin(spec)} else f"users_{root}"


@contextmanager
def _found_at(name: str, spec: ModuleSpec) -> Iterator[None]:
    """Imports `name` from the place of `spec` in the block; drops a module loaded from elsewhere, or changed since."""
    loaded, digest = sys.modules.get(name), _digest(spec)
    is_other = loaded is not None and _origin(loaded.__spec__) != _origin(spec)
    if is_other or _DIGESTS.get(name, digest) != digest:
        for module in [key for key in list(sys.modules) if key == name or key.startswith(f"{name}.")]:
            del sys.modules[module]
    _DIGESTS[name] = digest
    finder = _OneModule(name, spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


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


def _origin(spec: ModuleSpec | None) -> str | None:
    if spec is None:
        return None
    # A package without __init__.py has folders and no file.
    return spec.origin or str(list(spec.submodule_search_locations or ()))


def _digest(spec: ModuleSpec) -> str:
    file = Path(spec.origin) if spec.origin else None
    return hashlib.sha256(file.read_bytes() if file is not None and file.is_file() else b"").hexdigest()


def _module_names(folders: list[str]) -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(folders)]
    return [_HOME, *(name for name in names if name.isidentifier())]


def _public_functions(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    return [key for key in names if callable(getattr(module, key, None)) and not isinstance(getattr(module, key), type)]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    if close := find_similar(name, names):
        return f"Did you mean {close[0]}?"
    return f"Use one of {', '.join(names)}" if names else "It defines no functions"
