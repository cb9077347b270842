"""Executors of calls: on a Ray cluster, in this process, or tracing, which only records the calls.

Here live processes, messages, waiting, and the rank's side of a call, which all executors share. No rows and columns
are chosen here: `data` and `groups` do that.
"""

from __future__ import annotations

__all__: list[str] = []
