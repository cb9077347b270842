"""Pages about runs while they go on: files in, HTML out, over HTTP on this machine.

This folder polls the files and serves the requests; `report/` draws the pages. Nothing here writes into a run, and
nothing is fetched from a network.
"""

from __future__ import annotations

from hf_algorithms.report.live._app import build_app
from hf_algorithms.report.live._run import LiveRun, open_runs
from hf_algorithms.report.live._server import serve

__all__ = ["LiveRun", "build_app", "open_runs", "serve"]
