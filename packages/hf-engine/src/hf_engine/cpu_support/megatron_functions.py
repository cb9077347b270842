"""Functions of megatron-core that other words for the device do not mend on a CPU, each made from the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["REPLACEMENTS"]


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
