"""The server of the page: a socket that is checked first, and uvicorn."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_algorithms.report.live._app import build_app
from hf_protocols.errors import ConfigError

__all__ = ["serve"]

_LARGEST_PORT = 65535


def serve(runs: Sequence[Path], *, host: str, port: int, note: Callable[[str], None]) -> None:
    """Shows runs on a page until the process is interrupted.

    Args:
        runs: their directories.
        host: name or address to listen on.
        port: 0 for any free one.
        note: gets a line with the page's address once it can be opened.

    Raises:
        ConfigError: for a directory without a run, a port that is in use, or a host that is not this machine's.
    """
    is_open = not _is_loopback(host)
    app = build_app(runs, hosts=["*"] if is_open else [host])
    import uvicorn

    with _listen(host, port) as listener:
        shown = listener.getsockname()[1]
        address = f"[{host}]" if ":" in host else host
        note(f"http://{address}:{shown}  (Ctrl-C ends it)")
        if is_open:
            note(f"--host {host}: everybody who reaches this machine can read the prompts and responses of these runs")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"--port {port}: it is not between 0 and {_LARGEST_PORT}. Choose another one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host}: it is not a name or an address. Use one of this machine's") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(_describe(error, host, port)) from None
    return listener


def _describe(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: another program listens on it. Choose another one, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return f"--port {port}: this user may not listen on it. Choose one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: it is not an address of this machine. Leave it out to listen on this machine alone"
    return f"--host {host} --port {port}: cannot listen there: {error.strerror}. Choose others"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
