"""Real servers of SGLang and vLLM on this machine, such as a user would have somewhere."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from hf_engine.cpu_support.sglang_plugins import PLATFORM
from hf_engine.rollout.sglang._session import end_session, find_segments

__all__ = ["LocalServer"]

_COMMANDS: Mapping[str, Sequence[str]] = {
    "sglang": [
        *("-m", "sglang.launch_server", "--skip-server-warmup", "--grammar-backend", "none", "--sampling-backend"),
        *("pytorch", "--enable-deterministic-inference", "--max-total-tokens", "4096", "--max-running-requests", "64"),
        "--sleep-on-idle",
    ],
    "vllm": [
        *("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-num-seqs", "64", "--enable-scale-out"),
        *("--kv-cache-memory-bytes", str(16 << 20)),
    ],
}
_ON_CPU: Mapping[str, Sequence[str]] = {
    "sglang": ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"],
    "vllm": [],
}
_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "sglang": {"SGLANG_PLATFORM": PLATFORM, "SGLANG_CPU_OMP_THREADS_BIND": "0", "TORCHDYNAMO_DISABLE": "1"},
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}


class LocalServer:
    """A server on a free port of this machine, in a session of its own that ends with the block.

    Example:
        with LocalServer("sglang", model) as server:
            backend = load_rollout_backend("server").build(model, topology=topology, urls=[server.url])

    Args:
        engine: whose server, of the running interpreter's environment.
        model: directory.
        arguments: more of the server's own.
        start_timeout_s: deadline of the start.
    """

    def __init__(
        self, engine: Literal["sglang", "vllm"], model: Path, *arguments: str, start_timeout_s: float = 400.0
    ) -> None:
        self._port = _free_port()
        self._command = [sys.executable, *_COMMANDS[engine], *_ON_CPU[engine], "--dtype", "float32"]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port), "--skip-tokenizer-init", *arguments]
        self._command += ["--model-path" if engine == "sglang" else "--model", str(model)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **_ENVIRONMENT[engine]}
        self._start_timeout_s = start_timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="local-server-")
        self._log = Path(self._directory.name) / "log"
        self._segments: set[str] = set()

    @property
    def url(self) -> str:
        """URL at which the server listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of its first process, whose number is its session's."""
        return self._process.pid

    def __enter__(self) -> LocalServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        stop = time.monotonic() + self._start_timeout_s
        while not self._is_up():
            self._segments |= find_segments(self.pid)
            if self._process.poll() is not None or time.monotonic() > stop:
                self.close()
                raise RuntimeError(f"{' '.join(self._command)} did not start: {self._log.read_text()[-4000:]}")
            time.sleep(0.5)
        self._segments |= find_segments(self.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._directory.cleanup()

    def wait(self) -> None:
        """Waits until its first process ends."""
        self._process.wait()

    def close(self) -> None:
        """Ends it with all of its children, and removes the shared memory of those that were killed before."""
        end_session(self._process.pid, self._segments)
        self._process.wait()

    def _is_up(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
