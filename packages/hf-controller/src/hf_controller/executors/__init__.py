"""Where calls run: on a Ray cluster, or in this process."""

from __future__ import annotations

__all__: list[str] = []
