"""Gradients in a program's block without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["with_gradients"]


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within the block torch computes gradients, also if the program is inside `inference_mode()` or `no_grad()`.

    Tensors that are made there can be trained and written later; those of inference mode can be neither.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield
