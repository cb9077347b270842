"""A function from its name in a configuration, ``module:function``."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_protocols.errors import ConfigError

__all__ = ["load_function"]


def load_function(name: str, *, search_path: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Import ``module`` and return its ``function``.

    Args:
        name: ``module:function``; dots lead into packages.
        search_path: folders to look for the module in before Python's own path, such as the configuration's. They are
            on ``sys.path`` only while the module is imported.

    Raises:
        ConfigError: for another form, a module that is not found or that raises while it is imported, and a function
            that is not in it, with the nearest names that are.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and all(part.isidentifier() for part in [*module_name.split("."), function_name])):
        raise ConfigError(
            f"{name!r} names no function: write module:function, such as hf_algorithms.rewards:exact_match"
        )
    folders = [str(Path(folder).resolve()) for folder in search_path]
    module = _import(module_name, folders, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "is no function" if hasattr(module, function_name) else "does not exist"
        hint = _nearest(function_name, _public_functions(module))
        raise ConfigError(f"{name!r}: {function_name} {found} in {module.__file__ or module_name}. {hint}")
    return function  # type: ignore[no-any-return]


def _import(module_name: str, folders: list[str], name: str) -> ModuleType:
    with _first_on_path(folders):
        _drop_namesake(module_name.partition(".")[0], folders, name)
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise ConfigError(_describe_failure(name, module_name, error)) from error
            places = ", ".join(folders) or "Python's path"
            raise ConfigError(
                f"{name!r}: no module {error.name!r} in {places}. {_nearest(module_name, _module_names(folders))}"
            ) from error
        except Exception as error:  # whatever a user's module may raise is the user's to see
            raise ConfigError(_describe_failure(name, module_name, error)) from error


@contextmanager
def _first_on_path(folders: list[str]) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _drop_namesake(root: str, folders: list[str], name: str) -> None:
    """Forget a module of the same name that came from another folder, unless it is on Python's own path."""
    loaded = sys.modules.get(root)
    wanted = PathFinder.find_spec(root, folders)
    if loaded is None or wanted is None or _origin(loaded.__spec__) == _origin(wanted):
        return
    own_path = [entry for entry in sys.path if entry not in folders]
    if root in sys.builtin_module_names or _origin(PathFinder.find_spec(root, own_path)) == _origin(loaded.__spec__):
        raise ConfigError(
            f"{name!r}: {_origin(wanted)} has the name of a module that is already loaded, "
            f"{_origin(loaded.__spec__)}: rename the file"
        )
    for module in [key for key in sys.modules if key == root or key.startswith(root + ".")]:
        del sys.modules[module]


def _origin(spec: ModuleSpec | None) -> str | None:
    if spec is None:
        return None
    # A package without __init__.py has folders and no file.
    return spec.origin or str(list(spec.submodule_search_locations or ()))


def _describe_failure(name: str, module_name: str, error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    text = "".join(traceback.format_exception_only(error)).strip()
    last = frames[-1]
    return f"{name!r}: importing {module_name} raised {text}\n  at {last.filename}:{last.lineno}: {last.line}"


def _module_names(folders: list[str]) -> list[str]:
    return ["hf_algorithms.rewards", *(module.name for module in pkgutil.iter_modules(folders))]


def _public_functions(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    return [key for key in names if callable(getattr(module, key, None)) and not isinstance(getattr(module, key), type)]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return f"There are {', '.join(names)}" if names else "There are none"
