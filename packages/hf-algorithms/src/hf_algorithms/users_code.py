"""Code of a user's own, in rewards, recipes, estimators and losses: where it is found, and errors that it raised."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

__all__ = ["describe_raised", "find_specs", "is_installed", "pickle_with_module", "place_of"]

_OURS = ("hf_protocols", "hf_engine", "hf_mapper", "hf_controller", "hf_algorithms")
_LIBRARY = sysconfig.get_paths()["stdlib"]


def find_specs(folders: Sequence[str], module_name: str) -> list[ModuleSpec]:
    """Returns where the parts of a dotted name are, if one of the folders has all of them; else, an empty list."""
    path: Sequence[str] | None = folders
    specs: list[ModuleSpec] = []
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, path) if path is not None else None
        if spec is None:
            return []
        specs.append(spec)
        path = spec.submodule_search_locations
    return specs


def describe_raised(error: BaseException) -> str:
    """Returns `ValueError: text`, and on a second line the place in the user's code, if it is known."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # its text says where
        return text
    place = place_of(error)
    return f"{text}\n  at {place}" if place else text


def place_of(error: BaseException) -> str | None:
    """Returns `file:line, in function: code` of the innermost frame that is neither ours, Python's nor a library's.

    Where every frame is, the innermost one is taken; None without frames.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename)]
    if not frames:
        return None
    frame = (own or frames)[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {line}"


def is_installed(filename: str) -> bool:
    """True for a file that is ours, Python's or a library's."""
    parts = Path(filename).parts
    return filename.startswith(("<", _LIBRARY)) or "site-packages" in parts or any(name in parts for name in _OURS)


def pickle_with_module(content: Any, function: object) -> bytes:
    """Pickles what holds a user's function, so that a process that cannot import the function's module loads it.

    Raises:
        Exception: anything; pickling calls a user's code.
    """
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    own = module if module is not None and not is_installed(getattr(module, "__file__", None) or "<none>") else None
    try:
        if own is not None:  # another process may not find it, such as a test's
            cloudpickle.register_pickle_by_value(own)
        pickled: bytes = cloudpickle.dumps(content)
    finally:
        if own is not None:
            cloudpickle.unregister_pickle_by_value(own)
    return pickled
