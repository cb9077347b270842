"""Environments of systems that are compared with this one, each with pins of its own, in `.cache`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ROOT", "make_environment"]

ROOT = Path(__file__).resolve().parents[1]


def make_environment(name: str, installs: Sequence[Sequence[str]]) -> Path:
    """Makes `.cache/conformance-<name>` where it is missing or has other pins; returns its interpreter.

    Args:
        name: of the environment.
        installs: arguments of `uv pip install`, call by call.
    """
    folder = ROOT / ".cache" / f"conformance-{name}"
    python, finished = folder / "bin" / "python", folder / "installed.json"
    if not finished.exists() or json.loads(finished.read_text()) != [list(each) for each in installs]:
        _run_uv("venv", "--clear", "--python", sys.executable, str(folder))
        for arguments in installs:
            _run_uv("pip", "install", "--python", str(python), *arguments)
        finished.write_text(json.dumps(installs))
    return python


def _run_uv(*arguments: str) -> None:
    # `--no-config`: the repository's own constraints are not the peer's.
    script = 'source scripts/registry.sh; exec .venv/bin/uv --no-config "$@"'
    subprocess.run(["bash", "-c", script, "uv", *arguments], cwd=ROOT, check=True)
