"""A model's tensors as files hold them, by the conversions with which transformers loads and saves them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from hf_engine.models.stacked_experts import FileNames, FilePart, tensors_in_files

__all__ = ["buffers_in_files", "find_buffer_owners", "persistent_buffers", "read_file_names"]


def find_buffer_owners(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of a model that have buffers, by name."""
    return {name: module for name, module in model.named_modules() if module._buffers}


def persistent_buffers(owners: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """State in the files that no optimizer step changes, by name: live tensors.

    Args:
        owners: of `find_buffer_owners`; a model has many more modules.
    """
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in owners.items()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def read_file_names(model: Any) -> FileNames:
    """The tensors in files that make up each parameter and buffer of a model of transformers.

    transformers reverts its own conversions on tensors without memory: a tensor in files that is a view of a parameter
    says where in it it lies. A parameter that files hold merged with others, transposed or otherwise rearranged keeps
    the name of its module, and so does one without a conversion.

    Args:
        model: any module; one that is not of transformers has the names of its modules.
    """
    if not hasattr(model, "base_model_prefix"):
        return {}
    conversions = [
        each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
    ]
    if not conversions:
        return {}
    held = {**dict(model.named_parameters()), **persistent_buffers(find_buffer_owners(model))}
    whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in held.items()}
    owners = {_storage_key(tensor): name for name, tensor in whole.items()}
    with _AsViews():
        reverted = revert_weight_conversion(cast("Any", _Converted(model, conversions)), whole)
    parts: dict[str, list[FilePart | None]] = defaultdict(list)
    covered: dict[str, int] = defaultdict(int)
    for name, tensor in reverted.items():
        if (owner := owners.get(_storage_key(tensor))) is not None:
            parts[owner].append(_locate(name, tensor, whole[owner]))
            covered[owner] += tensor.numel()
    return {
        name: tuple(part for part in found if part is not None)
        for name, found in parts.items()
        if None not in found and covered[name] == whole[name].numel() and found != [FilePart(name)]
    }


def buffers_in_files(model: Any) -> dict[str, torch.Tensor]:
    """`persistent_buffers` by the names in files."""
    return tensors_in_files(read_file_names(model), persistent_buffers(find_buffer_owners(model)))


class _Converted:
    """A model with its family's conversions, in the place of those that were used when its files were read."""

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        self._model = model
        self._weight_conversions = conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _AsViews(TorchFunctionMode):
    """Leaves out copies into contiguous memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _locate(name: str, tensor: torch.Tensor, whole: torch.Tensor) -> FilePart | None:
    """The part that a view is; None for one that is neither all of a parameter nor rows of one expert."""
    if tensor.shape == whole.shape and tensor.stride() == whole.stride():
        return FilePart(name)
    if whole.dim() < 2 or tensor.shape[1:] != whole.shape[2:] or tensor.stride() != whole.stride()[1:]:
        return None
    expert, rest = divmod(int(tensor.storage_offset()), whole.stride(0))
    first, inside = divmod(rest, whole.stride(1))
    return None if inside else FilePart(name, expert, (first, first + tensor.shape[0]))


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
