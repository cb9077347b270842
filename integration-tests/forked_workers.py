"""Ray's worker processes as forks of one that has imported what they need: a start costs half a second, not four.

Ray starts a worker with a set-up script of its own. In the block of `forked_workers` a local cluster gets this file
instead: it asks the fork server for a worker and stays until that one ends. Linux only; elsewhere the block does
nothing. What a test says about starts and imports of workers is said of a cluster outside of such a block.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ADDRESS = "HYBRIDFLOW_FORK_SERVER"
"""The variable that names the server's socket, which has no place in the file system."""


@contextmanager
def forked_workers(preload: Sequence[str]) -> Iterator[None]:
    """Local clusters that this process starts in the block fork their workers.

    Args:
        preload: modules that the workers need; none may import Ray.
    """
    if sys.platform != "linux":
        yield
        return
    from ray._private.parameter import RayParams

    real = RayParams.__init__

    def prepare(params: Any, *args: Any, **options: Any) -> None:
        real(params, *args, **(options | {"setup_worker_path": __file__}))

    name = f"hybridflow-{os.getpid()}-{secrets.token_hex(8)}"
    # The threads that Ray gives a worker; libraries read it when they are loaded.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        command = [sys.executable, __file__, "serve", str(listener.fileno()), *preload]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[listener.fileno()])
    os.environ[ADDRESS] = name
    RayParams.__init__ = prepare
    try:
        yield
    finally:
        RayParams.__init__ = real
        del os.environ[ADDRESS]
        server.communicate()


def serve(listener: socket.socket, preload: Sequence[str]) -> None:
    """Forks a worker for every connection, until standard input ends.

    The worker is killed when its connection ends, and the connection ends with the worker.
    """
    for name in preload:
        __import__(name)
    assert "ray" not in sys.modules, "Ray reads the worker's environment when it is imported"
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ended: set[int] = set()
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    _fork_worker(listener, selector)
                elif key.data.pid in ended:  # both ends were seen at once
                    continue
                elif key.fileobj is key.data.connection:
                    selector.unregister(key.fileobj)
                    os.kill(key.data.pid, signal.SIGKILL)
                else:
                    _put_away(key, selector)
                    ended.add(key.data.pid)


class _Worker(NamedTuple):
    pid: int
    connection: socket.socket
    """To its set-up process."""


def _put_away(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """A worker has ended: so does its set-up process."""
    selector.unregister(key.fileobj)
    os.close(key.fd)
    os.waitpid(key.data.pid, 0)
    if key.data.connection in selector.get_map():
        selector.unregister(key.data.connection)
    key.data.connection.close()


def _fork_worker(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    request = json.loads(message)
    pid = os.fork()
    if pid == 0:
        selector.close()
        listener.close()
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        _work(**request)
    for file in files:
        os.close(file)
    worker = _Worker(pid, connection)
    selector.register(connection, selectors.EVENT_READ, worker)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, worker)


def _work(arguments: list[str], environment: dict[str, str], folder: str, group: int) -> None:
    """Never returns."""
    import runpy

    try:
        os.setpgid(0, group)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        own = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [str(Path(arguments[0]).parent), *filter(None, own)]
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else end.code is not None)
    finally:
        os._exit(1)


def ask_for_worker(arguments: list[str]) -> None:
    """As Ray's set-up script, with its arguments."""
    passed_on = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            os.environ.update(json.loads(value)["env_vars"])
        elif name != "--language":
            passed_on.append(argument)
    request = {
        "arguments": passed_on,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgid(0),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{os.environ[ADDRESS]}")
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    else:
        ask_for_worker(sys.argv[1:])
