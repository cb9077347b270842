"""A stand-in for torchvision, which SGLang imports for models with images and text generation never uses.

The registry's torchvision is built for CUDA: with a CPU build of torch it cannot be imported, and transformers, which
imports it where it is installed, cannot either. So it is left out there, and SGLang's processes find this in its place.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install_stand_in"]

_NAME = "torchvision"


def install_stand_in() -> None:
    """Makes `import torchvision` succeed where it is not installed."""
    if importlib.util.find_spec(_NAME) is None:
        sys.meta_path.append(_TorchvisionFinder())


class _TorchvisionFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != _NAME:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class _StandIn(ModuleType):
    """A module whose attributes can be named, but not used."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise ModuleNotFoundError(f"{self.__name__} was called, and torchvision is not installed", name=_NAME)
