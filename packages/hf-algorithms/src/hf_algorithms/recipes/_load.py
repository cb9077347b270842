"""A recipe by its name, or a user's own by its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_algorithms.recipes._recipe import Recipe
from hf_algorithms.users_code import describe_raised, find_specs
from hf_protocols import ConfigError
from hf_protocols.foreign_code import raised_as
from hf_protocols.paths import explain_variables
from hf_protocols.process_lock import ProcessLock
from hf_protocols.similar_names import describe_choices
from hf_protocols.validation import show

__all__ = ["load_recipe"]

_CONTENTS: dict[str, bytes] = {}
"""Of the files of recipes' modules, by name, when they were loaded: they may be edited after that."""
_IMPORTING = ProcessLock(
    ConfigError, "another thread of this process has imported a recipe for {timeout_s} s. Wait for its end"
)


def load_recipe(reference: str, *, search_path: Sequence[str] = ()) -> Recipe:
    """Imports a user's recipe.

    Args:
        reference: `module:RECIPE`, or `file.py:RECIPE`.
        search_path: folders in which modules are looked for last, so that they hide no installed module, and files
            after the folder where the command runs.

    Raises:
        ConfigError: for another form, a module that is absent or raises, and an object that is not a `Recipe`.
    """
    label = f"algorithm.recipe = {show(reference)}"
    place, colon, name = reference.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise ConfigError(f"{label}: it does not name a recipe. Write module:RECIPE or file.py:RECIPE")
    folders = [str(Path(folder).resolve()) for folder in search_path]
    file = None
    if place.endswith(".py"):
        given = Path(place).expanduser()
        candidates = [given.resolve(), *(Path(folder, given).resolve() for folder in folders)]
        file = next((each for each in candidates if each.is_file()), candidates[0])
        if not file.is_file():
            raise ConfigError(
                f"{label}: {file} does not exist. Give the path of a Python file{explain_variables(place)}"
            )
        folders, place = [str(file.parent)], file.stem
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{label}: {show(place)} is not a module's name. Write module:RECIPE or file.py:RECIPE")
    # Ranks import the module by its name as well: they look in the folders of this path.
    sys.path += [folder for folder in folders if folder not in sys.path]
    module = _import(place, label)
    origin = getattr(module, "__file__", None)  # built-in modules have no file
    if file is None and (specs := find_specs(folders, place)) and specs[-1].origin:
        file = Path(specs[-1].origin).resolve()
    if file is not None and Path(origin or "").resolve() != file:
        raise ConfigError(f"{label}: another module is named {show(place)}, {origin or 'built in'}. Rename the file")
    found = getattr(module, name, None)
    if not isinstance(found, Recipe):
        recipes = [key for key, value in vars(module).items() if isinstance(value, Recipe)]
        what = "is not a Recipe" if hasattr(module, name) else "does not exist"
        where = origin or f"the folder {place}, which is not a module"
        hint = describe_choices(name, recipes) if recipes else "Define one with Recipe(...)"
        raise ConfigError(f"{label}: {name} {what} in {where}. {hint}")
    usual = found.config.model_fields["name"].default
    if usual != found.name:
        has = f"has the name {show(usual)}" if isinstance(usual, str) else "has no name"
        raise ConfigError(
            f"{label}: it is named {show(found.name)}, and its {found.config.__name__} {has}. "
            f"Write name: Literal[{found.name!r}] = {found.name!r} there"
        )
    return found


def _import(name: str, label: str) -> Any:
    from hf_controller import Terminated

    def describe(error: BaseException) -> ConfigError:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (name == missing or name.startswith(f"{missing}.")):
            return ConfigError(f"{label}: no module {show(missing)} is on Python's path. Correct the name")
        return ConfigError(f"{label}: its module raised {describe_raised(error)}")

    importlib.invalidate_caches()
    with _IMPORTING.held(), raised_as(describe, also=(SystemExit,), but=(Terminated,)):
        is_loaded = name in sys.modules
        module = importlib.import_module(name)
        content = _read(module)
        if is_loaded and _CONTENTS.get(name, content) != content:
            module = importlib.reload(module)
        _CONTENTS[name] = content
        return module


def _read(module: ModuleType) -> bytes:
    """The file of a module as it is now; nothing for one without a file."""
    file = getattr(module, "__file__", None)
    return Path(file).read_bytes() if file is not None and Path(file).is_file() else b""
