"""megatron-core on a machine without CUDA.

Its sources name the device "cuda" in so many words. Where CUDA is absent an import hook replaces those words while
its modules are loaded, and a few functions, in memory only; torch and the installed files stay as they are.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

from hf_protocols.errors import BackendError

__all__ = ["REPLACEMENTS", "allow_cpu"]

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


def _get_rng_state(_: Any) -> Any:
    """The state that `_set_rng_state` sets."""

    def get(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    return get


def _set_rng_state(_: Any) -> Any:
    """The default generator of the host in the place of the device's."""

    def set_(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_


def _splits_as_arrays(_: Any) -> Any:
    """Nothing has to be copied to the host, but all-to-all wants its split sizes as arrays."""

    def convert(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == dispatcher.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(dispatcher, name, None)
                if torch.is_tensor(splits):
                    setattr(dispatcher, name, splits.numpy())
        return tokens_per_expert

    return convert


def _uneven_gather(even: Any) -> Any:
    """Pads shorter parts, because gloo gathers equal ones only."""

    def gather(part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even(part, group, output_split_sizes, use_global_buffer)
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(even: Any) -> Any:
    """Reduces everything and keeps this rank's part, because gloo scatters equal parts only."""

    def reduce_scatter(
        whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()  # type: ignore[no-untyped-call]

    return reduce_scatter


REPLACEMENTS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "megatron.core.tensor_parallel.mappings": {
        "_gather_along_first_dim": _uneven_gather,
        "_reduce_scatter_along_first_dim": _uneven_reduce_scatter,
    },
    "megatron.core.tensor_parallel.random": {
        "_get_cuda_rng_state": _get_rng_state,
        "_set_cuda_rng_state": _set_rng_state,
    },
    "megatron.core.transformer.moe.token_dispatcher": {
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize": _splits_as_arrays,
    },
}
"""By module and qualified name: takes the original function, returns the one to have in its place."""
