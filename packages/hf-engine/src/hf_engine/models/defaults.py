"""Torch's defaults while a library builds a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["torch_defaults"]


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Runs the block with float32 on the host as torch's defaults, as in a new process.

    Libraries draw adapters, and compute tables of positions, with the defaults of the program.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        # The block slows down every call of torch.
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
