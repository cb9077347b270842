"""How much memory an engine's KV cache takes when nobody says."""

from __future__ import annotations

import os

import torch

__all__ = ["share_of_memory"]


def share_of_memory(fraction: float | None) -> int:
    """Bytes of this share of a device's memory, or of the host's without one.

    None takes 0.3 of a device, and 256 MiB of a host, whose memory is not the engine's alone.
    """
    if torch.cuda.is_available():
        return int((fraction or 0.3) * torch.cuda.mem_get_info()[1])
    if fraction is None:
        return 256 << 20
    return int(fraction * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
