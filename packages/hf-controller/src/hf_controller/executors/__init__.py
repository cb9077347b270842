"""Executors of calls: on a Ray cluster, in this process, or tracing, which only records the calls."""

from __future__ import annotations

__all__: list[str] = []
