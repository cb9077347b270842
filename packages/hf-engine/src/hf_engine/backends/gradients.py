"""Autograd inside a program's `inference_mode()` or `no_grad()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["with_gradients"]


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within the block torch computes gradients, although the program may be in one of these modes.

    Tensors made there can be trained, and written later. Those made in inference mode can be neither outside of it.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield
