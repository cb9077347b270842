"""Size of the available memory, and the part of it that an engine's KV cache takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_engine.process_groups import local_device
from hf_protocols.errors import BackendError
from hf_protocols.machine import read_machine_limits
from hf_protocols.validation import Checks

__all__ = [
    "check_sizes",
    "choose_cache_bytes",
    "choose_positions",
    "host_bytes",
    "lack_of_memory_is_an_error",
    "take_again",
]

_check = Checks(BackendError)


def check_sizes(options: Mapping[str, Any]) -> None:
    """Refuses a `cache_bytes`, `cache_fraction` or `max_positions` that no machine and no model has.

    Args:
        options: by name; None is as good as left out.

    Raises:
        BackendError: for a number that is neither a size nor a share, or both sizes of the cache.
    """
    cache_bytes, fraction = options.get("cache_bytes"), options.get("cache_fraction")
    if cache_bytes is not None and fraction is not None:
        raise BackendError(f"cache_bytes={cache_bytes} and cache_fraction={fraction} both size the cache. Use one")
    for name in ("cache_bytes", "max_positions"):
        if options.get(name) is not None:
            _check.count(name, options[name])
    if fraction is not None:
        wanted = "a share of the memory above 0 and below 1, such as 0.3"
        _check.kind("cache_fraction", fraction, float | int, wanted)
        if not 0 < fraction < 1:
            raise BackendError(f"cache_fraction={fraction}. Use {wanted}")


def choose_cache_bytes(cache_bytes: int | None, fraction: float | None) -> int:
    """Returns the user's size, in bytes or as a share of a device's memory, or of the host's without one.

    Without either: 0.3 of a device, and 256 MiB of a host, whose memory is not the engine's alone.

    Raises:
        BackendError: for both, or a number that is neither a size nor a share, or more than there is.
    """
    check_sizes({"cache_bytes": cache_bytes, "cache_fraction": fraction})
    device = local_device()
    if cache_bytes is not None:
        memory = host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
        if cache_bytes >= memory:
            raise BackendError(
                f"cache_bytes={cache_bytes} is not below the memory of {memory} bytes. Lower cache_bytes"
            )
        return cache_bytes
    if device.type != "cpu":
        return int((fraction or 0.3) * torch.cuda.mem_get_info(device)[1])
    if fraction is None:
        return 256 << 20
    return int(fraction * host_bytes())


def choose_positions(wanted: int | None, positions: int) -> int:
    """The longest sequence of an engine, prompt and response together: the model's, unless fewer are wanted.

    Raises:
        BackendError: for more than the model's.
    """
    if wanted is not None and wanted > positions:
        raise BackendError(f"max_positions={wanted} is above the model's {positions} positions. Lower max_positions")
    return wanted or positions


def host_bytes() -> int:
    """Memory of this machine, or what its container may use of it."""
    return read_machine_limits().memory_bytes


@contextmanager
def lack_of_memory_is_an_error(failed: str, knob: str) -> Iterator[None]:
    """Inside the block torch may ask for more memory than there is.

    Args:
        failed: what could not be done.
        knob: what to turn.

    Raises:
        BackendError: with both and torch's own words; any other failure is raised as it is.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in reason:
            raise
        raise BackendError(f"{failed} ({reason}). {knob}") from error


def take_again(caches: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
    """Gives emptied caches their sizes again, in bytes, filled with zeros; all of them or none.

    Raises:
        BackendError: if there is not enough memory.
    """
    failed = f"the KV cache's {sum(sizes)} bytes cannot be taken again"
    with ExitStack() as undo:
        for storage in caches:
            undo.callback(storage.resize_, 0)
        with lack_of_memory_is_an_error(failed, "Lower cache_bytes, or hold less next to it"):
            for storage, num_bytes in zip(caches, sizes, strict=True):
                storage.resize_(num_bytes)
                # What is masked is multiplied by zero, and memory may hold what is not finite.
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        undo.pop_all()
