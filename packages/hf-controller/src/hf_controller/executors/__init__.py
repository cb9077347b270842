"""Executors of calls: on a Ray cluster, in this process, or tracing, which only records the calls.

What lives here: processes, messages, waiting, and the rank's side of a call, which all executors share. What must not:
the choice of rows and columns, which `data` and `groups` make.
"""

from __future__ import annotations

__all__: list[str] = []
