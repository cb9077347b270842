"""A vLLM server for `soak.py`, with a supervisor: started again when it is gone, continued when it is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import psutil
from soak_faults import SERVER

from hf_algorithms.config import load_config
from hf_algorithms.preflight.inputs import load_inputs

sys.path.append(str(Path(__file__).parents[1] / "integration-tests"))

from engine_testing.local_server import LocalServer

__all__ = ["TendedServer"]

SIZES = ("model.hidden_size=64", "model.num_heads=2")
"""Sizes of a model whose heads are as wide as vLLM's kernels need."""
RESTART_S = 400.0
STOPPED_S = 3.0


class TendedServer(AbstractContextManager["TendedServer"]):
    """A server on this machine, of the interpreter's environment, until the end of a `with` block.

    Args:
        folder: with `config.toml`, whose model it has; gets the model and a file with the server's process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = folder / "initial"
        load_inputs(load_config(folder / "config.toml", list(SIZES)), self._model)
        self._server = LocalServer("vllm", self._model)

    def __enter__(self) -> TendedServer:
        self._server.__enter__()
        self._note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a run that samples from it."""
        return (
            *SIZES, f"model.path={self._model}", "warm_start.max_steps=0", "rollout.backend=server",
            f"rollout.options.urls=['{self._server.url}']", f"rollout.options.restart_timeout_s={RESTART_S}",
            f"cluster.call_timeout_s={2 * RESTART_S}",
        )  # fmt: skip

    def tend(self) -> None:
        """Starts the server again if its first process is gone, which takes a while; continues one that is stopped."""
        process = psutil.Process(self._server.pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE:
            self._server.close()
            self._server.__enter__()
            self._note()
        elif status == psutil.STATUS_STOPPED:
            time.sleep(STOPPED_S)
            os.kill(process.pid, signal.SIGCONT)

    def _note(self) -> None:
        (self._folder / SERVER).write_text(str(self._server.pid))
