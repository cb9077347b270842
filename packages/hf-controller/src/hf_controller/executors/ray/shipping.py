"""Worker specs as bytes for other processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from types import ModuleType

from ray import cloudpickle

from hf_controller.worker import WorkerSpec

__all__ = ["is_importable_elsewhere", "pickle_specs"]


def pickle_specs(roles: Mapping[str, WorkerSpec]) -> bytes:
    """Pickle ``roles``; classes of modules that another process cannot import (scripts, notebooks, tests) by value."""
    modules = {sys.modules[base.__module__] for spec in roles.values() for base in spec.worker.__mro__}
    with ExitStack() as stack:
        for module in modules:
            if module.__name__ != "__main__" and not is_importable_elsewhere(module):
                stack.enter_context(_by_value(module))
        return bytes(cloudpickle.dumps(dict(roles)))  # type: ignore[no-untyped-call]


def is_importable_elsewhere(module: ModuleType) -> bool:
    """Whether the import path leads to this very module, as it would in another process."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    path, spec = None, None
    parts = module.__name__.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == file


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]
