"""Where calls run: on a Ray cluster, in this process, or nowhere, where they are only written down."""

from __future__ import annotations

__all__: list[str] = []
