"""megatron-core on a machine without CUDA.

Its sources name the device "cuda" in so many words. Where CUDA is absent an import hook replaces those words while
its modules are loaded, and a few functions, in memory only; torch and the installed files stay as they are.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import cast

import torch

from hf_engine.cpu_support.megatron_functions import REPLACEMENTS
from hf_protocols.errors import BackendError

__all__ = ["allow_cpu"]

_PACKAGE = "megatron.core"
_REPLACED = (
    (re.compile(r"torch\.cuda\.current_device\(\)"), 'torch.device("cpu")'),
    (re.compile(r"device=(['\"])cuda\1"), 'device="cpu"'),
    (re.compile(r"torch\.cuda\.(Float|Half|BFloat16)Tensor"), r"torch.\1Tensor"),
    (re.compile(r"torch\.cuda\.synchronize\(\)"), "None"),
    (re.compile(r"torch\.cuda\.Stream\(\)"), "None"),
    (re.compile(r"torch\.cuda\.(get_rng_state|manual_seed)\("), r"torch.\1("),
    (re.compile(r"(?<!torch)\.cuda\((non_blocking=True)?\)"), ".cpu()"),
)


def allow_cpu() -> None:
    """Installs the hook where CUDA is absent; call it before the first import of megatron.core.

    Raises:
        BackendError: if megatron.core was imported before, as it is.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise BackendError(
            "megatron.core was imported in this process before the megatron backend, so that it cannot run without "
            "CUDA: import hf_engine.training.megatron first"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Megatron's own FSDP is not used here, and formats device names at run time.
        if not f"{name}.".startswith(f"{_PACKAGE}.") or ".fsdp." in name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Returns the cached byte code, or that of a rewritten source, which is not cached next to the original's."""
        path = self.get_filename(fullname)
        original = self.get_data(path).decode()
        source = original
        for pattern, replacement in _REPLACED:
            source = pattern.sub(replacement, source)
        if source == original:
            return cast("CodeType", super().get_code(fullname))
        return self.source_to_code(source.encode(), path)

    def exec_module(self, module: ModuleType) -> None:
        """Replaces what needs more than other words."""
        super().exec_module(module)
        for name, replace in REPLACEMENTS.get(module.__name__, {}).items():
            scope, _, function = name.rpartition(".")
            owner = getattr(module, scope) if scope else module
            setattr(owner, function, replace(getattr(owner, function)))
