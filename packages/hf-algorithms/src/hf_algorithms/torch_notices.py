"""Notices of torch for its own developers, which a user can do nothing about."""

from __future__ import annotations

import logging

__all__ = ["hush_torch"]


def hush_torch() -> None:
    """Hides a deprecation notice of torch about its own use of itself, at the first jagged tensor."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
