"""SGLang on a machine without a GPU: its platform plugin, and what is computed there in another way."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "PLATFORM",
    "activate_platform",
    "forked_children",
    "hash_positions",
    "is_platform_chosen",
    "register_for_engines",
    "register_for_servers",
    "register_seeds",
    "unpinned",
]

PLATFORM = "hybridflow_cpu"
"""Name of the CPU platform, chosen with SGLANG_PLATFORM."""

_PINNING = (
    "backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    "lora_manager.LoRAManager.init_state",
    "lora_manager.LoRAManager.update_lora_info",
)
"""Functions of SGLang's adapters that pin memory."""


def is_platform_chosen() -> bool:
    """Returns True in a process that was started for the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM


def activate_platform() -> str | None:
    """Returns the path of the CPU platform; None unless it was asked for by name."""
    if not is_platform_chosen():
        return None
    from hf_engine.cpu_support.torchvision import install_stand_in

    install_stand_in()
    return "hf_engine.cpu_support.sglang_platform:CpuPlatform"


@contextmanager
def forked_children() -> Iterator[None]:
    """Has SGLang fork its processes in place of importing itself in each; with a device it must not fork."""
    set_start_method: Any = multiprocessing.set_start_method
    before = multiprocessing.get_start_method(allow_none=True)
    set_start_method("fork", force=True)
    kept: Any = lambda *_, **__: None  # noqa: E731
    multiprocessing.set_start_method = kept
    try:
        yield
    finally:
        multiprocessing.set_start_method = set_start_method
        set_start_method(before, force=True)


def register_for_engines() -> None:
    """Keeps heads as they are on a GPU, and computes adapters without pinned memory."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # On a CPU SGLang would pad heads that do not divide evenly, where loaders for other devices replicate them.
    HookRegistry.register(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        lambda config, *_: config,
        HookType.REPLACE,
    )
    # It computes adapters there, on memory that it would pin for a device.
    for function in _PINNING:
        HookRegistry.register(f"sglang.srt.lora.{function}", unpinned, HookType.AROUND)


def register_for_servers() -> None:
    """Gives servers that are not ours the seeds of requests."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_seeds(HookRegistry, HookType.REPLACE)


def unpinned(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of SGLang's that pins memory for a device, where there is none."""
    with _Unpinned():
        return original(*arguments, **options)


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


_WORD_MASK = 0xFFFFFFFF


def register_seeds(registry: Any, replace: Any) -> None:
    """Puts ours in place of the kernels: in SGLang's registry of hooks, with the kind that replaces.

    A server with `--enable-deterministic-inference` draws each sample from its own seed. The hash that it draws with
    is a kernel, and so are the products that do not depend on the batch; float32 on a CPU does without such products.
    """
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    registry.register("sglang.srt.layers.sampler.murmur_hash32", hash_positions, replace)
    registry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda: None, replace)


def hash_positions(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of every row's seed and position with every column's number.

    Args:
        seeds: [b], of 64 bits.
        positions: [b].
        columns: [V].

    Returns:
        uint32 [b, V].
    """
    seed = seeds.to(torch.int64)[:, None]
    state = torch.zeros((), dtype=torch.int64)
    for block in (seed, seed >> 32, positions.to(torch.int64)[:, None], columns.to(torch.int64)[None]):
        mixed = _rotate(_multiply(block & _WORD_MASK, 0xCC9E2D51), 15)
        state = state ^ _multiply(mixed, 0x1B873593)
        state = (_rotate(state, 13) * 5 + 0xE6546B64) & _WORD_MASK
    state = state ^ 16  # bytes hashed
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _multiply(values: torch.Tensor, factor: int) -> torch.Tensor:
    """Of 32-bit numbers, modulo 2^32; in halves, so that nothing leaves 64 bits."""
    low, high = values & 0xFFFF, values >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & _WORD_MASK


def _rotate(values: torch.Tensor, bits: int) -> torch.Tensor:
    return ((values << bits) | (values >> (32 - bits))) & _WORD_MASK
