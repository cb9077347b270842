"""Worker specs as bytes for other processes."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from ray import cloudpickle

from hf_controller.groups.worker import WorkerSpec
from hf_protocols import ProtocolError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.validation import show

__all__ = ["PackedRoles", "find_unpicklable", "is_importable_elsewhere", "list_import_path", "pack_roles"]


class PackedRoles(NamedTuple):
    """Roles that share processes, ready to be built there: pickled, and the variables that all of them want."""

    roles: Mapping[str, WorkerSpec]
    specs: bytes
    environment: dict[str, str]


def pack_roles(roles: Mapping[str, WorkerSpec]) -> PackedRoles:
    """Packs before any process starts, so that what cannot travel costs nothing.

    Raises:
        ProtocolError: for an argument or a class that cannot be pickled, or variables on which the roles disagree.
    """
    environment = _merge_environments(roles)
    with raised_as(partial(_describe_unpicklable, roles)):
        return PackedRoles(roles, _pickle_specs(roles), environment)


def _describe_unpicklable(roles: Mapping[str, WorkerSpec], error: BaseException) -> ProtocolError:
    for role, spec in roles.items():
        found = find_unpicklable(spec.kwargs)
        if found is not None:
            return ProtocolError(
                f"{role}: the argument {found} of {spec.worker.__name__} cannot travel to another process "
                f"({error}). Use what the worker can build it from"
            )
    classes = ", ".join(f"{role}: {spec.worker.__qualname__}" for role, spec in roles.items())
    return ProtocolError(
        f"{classes} cannot travel to another process ({type(error).__name__}: {error}): what a worker's class "
        "reads from its module or from around it travels with it, unless other processes can import the module. "
        "Make it in the worker's constructor"
    )


def find_unpicklable(named: Mapping[str, Any], dump: Callable[[Any], object] = cloudpickle.dumps) -> str | None:
    """Name and type of the first value that `dump` cannot pickle."""
    for name, value in named.items():
        with Caught() as caught:  # a value's own pickling may raise anything
            dump(value)
        if caught.error is not None:
            return f"{name}, a {type(value).__name__},"
    return None


def _pickle_specs(roles: Mapping[str, WorkerSpec]) -> bytes:
    """Pickles `roles`; classes of modules that another process cannot import (scripts, notebooks, tests) by value."""
    modules = {sys.modules[base.__module__] for spec in roles.values() for base in spec.worker.__mro__}
    with ExitStack() as stack:
        for module in modules:
            if module.__name__ != "__main__" and not is_importable_elsewhere(module):
                stack.enter_context(_by_value(module))
        return bytes(cloudpickle.dumps(dict(roles)))  # type: ignore[no-untyped-call]


def is_importable_elsewhere(module: ModuleType) -> bool:
    """True if the import path of another process leads to the same module."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    path: Sequence[str] | None = list_import_path()
    spec = None
    parts = module.__name__.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == file


def list_import_path() -> list[str]:
    """This program's import path in the order that workers have.

    What Python puts before its own library, such as the folder of a script, comes last: in a worker a user's file
    hides no installed module of its name. So does the current folder, which Ray gives its workers too. The variable
    PYTHONPATH keeps its place, as workers read it themselves.
    """
    path = [os.path.abspath(folder) for folder in sys.path]
    library = os.path.abspath(sysconfig.get_path("stdlib"))
    border = next((number for number, folder in enumerate(path) if folder == library), 0)
    everywhere = {os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    own = [folder for folder in path[:border] if folder not in everywhere and not folder.endswith(".zip")]
    return list(dict.fromkeys([*(folder for folder in path if folder not in own), *own, os.getcwd()]))


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _merge_environments(roles: Mapping[str, WorkerSpec]) -> dict[str, str]:
    """The variables of roles that share processes.

    Raises:
        ProtocolError: if two roles want different values.
    """
    merged: dict[str, str] = {}
    for role, spec in roles.items():
        for name, value in spec.environment.items():
            if merged.setdefault(name, value) != value:
                raise ProtocolError(
                    f"{role} wants {name}={show(value)} in its environment, another role in its processes wants "
                    f"{show(merged[name])}. Give them one value, or build them without fused=True"
                )
    return merged
