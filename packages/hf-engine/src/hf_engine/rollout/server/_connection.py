"""JSON over HTTP with deadlines. Every failure is one typed error that names the server."""

from __future__ import annotations

import copy
import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks, show

__all__ = ["LostServerError", "ServerConnection", "expected_form"]

_check = Checks(BackendError)

_PORTS = {"http": 80, "https": 443}
_LEAST_TIMEOUT_S = 1e-3
"""Of a socket: it takes no 0 for one that does not wait."""
_LEAST_BYTES = 16 << 20
"""Of an answer without tokens at most, such as a server's description of itself."""
_TOKEN_BYTES = 1 << 10
"""For each token at most: its id, its log-prob and its text, with the names of their fields."""
_PIECE_BYTES = 1 << 20


class LostServerError(BackendError):
    """A server that does not take a connection, or ended one in the middle of a request."""


class ServerConnection:
    """A server by its URL. Every request opens a connection of its own: servers close those that rest.

    Args:
        url: such as `http://127.0.0.1:30000`; a path in it comes before every request's.
        key: sent as a bearer token; None: nothing is sent.
        connect_timeout_s: deadline for the server to take a connection, and for `ask`.
        timeout_s: deadline of one request, from its first byte to the last one of the answer; see `as_one`.

    Raises:
        BackendError: for something that is not a URL of a server, or no deadline.
    """

    def __init__(self, url: str, *, key: str | None = None, connect_timeout_s: float, timeout_s: float) -> None:
        for name, seconds in (("connect_timeout_s", connect_timeout_s), ("timeout_s", timeout_s)):
            _check.number(f"rollout.options.{name}", seconds)
            _check.seconds(f"rollout.options.{name}", seconds)
        try:
            parts = urlsplit(url)
            default = _PORTS[parts.scheme]
            port = parts.port or default
        except (KeyError, ValueError):
            parts, port = urlsplit(""), 0
        if "@" in url or parts.query:
            raise BackendError(
                "rollout.options.urls: a user, a password or a query in a URL is not sent to the server, and would be "
                "shown. Remove it, and set rollout.options.api_key_variable where the server has a key"
            )
        if not parts.hostname or not url.isprintable() or " " in url:
            raise BackendError(
                f"rollout.options.urls: {show(url)} is not a URL. Set it to one such as 'http://127.0.0.1:30000'"
            )
        self.url = url
        self._address = parts.hostname, port
        self._is_encrypted = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._stop = float("inf")

    @property
    def host(self) -> str:
        """Name or address of the server's machine."""
        return self._address[0]

    def within(self, seconds: float) -> ServerConnection:
        """The same server with deadlines of no more than this, for what is not worth a longer wait."""
        hurried = copy.copy(self)
        hurried._connect_timeout_s = min(self._connect_timeout_s, seconds)
        hurried._timeout_s = min(self._timeout_s, seconds)
        return hurried

    def as_one(self) -> ServerConnection:
        """The same server for requests that have `timeout_s` together, from now on."""
        joined = copy.copy(self)
        joined._stop = time.monotonic() + self._timeout_s
        return joined

    def ask(self, path: str) -> Any:
        """Returns the answer to a GET with a short deadline; None if the server does not know the path."""
        status, answer = self._request("GET", path, None, knob="connect_timeout_s")
        return None if status == http.HTTPStatus.NOT_FOUND else self._accept(path, status, answer)

    def find(self, path: str, body: Any = None) -> Any:
        """Returns the answer to a GET, or to a POST with a body; None if the server does not know the path."""
        status, answer = self._request("GET" if body is None else "POST", path, body)
        return None if status == http.HTTPStatus.NOT_FOUND else self._accept(path, status, answer)

    def get(self, path: str) -> Any:
        """Returns the answer to a GET.

        Raises:
            BackendError: with the server's own words, if it refuses.
        """
        return self._accept(path, *self._request("GET", path, None))

    def try_post(self, path: str, body: Any) -> bool:
        """Returns True if the server accepts a POST with a JSON body; False if it calls it a bad request."""
        status, answer = self._request("POST", path, body)
        return status != http.HTTPStatus.BAD_REQUEST and self._accept(path, status, answer) is not None

    def post(self, path: str, body: Any = None, *, num_tokens: int = 0) -> Any:
        """Returns the answer to a POST with a JSON body.

        Args:
            path: of the request.
            body: of the request.
            num_tokens: that the answer may have; longer answers than these need are refused.

        Raises:
            BackendError: with the server's own words, if it refuses.
        """
        return self._accept(path, *self._request("POST", path, body, num_tokens=num_tokens))

    def _accept(self, path: str, status: int, answer: Any) -> Any:
        if status != http.HTTPStatus.OK:
            raise BackendError(f"the server at {self.url} refused {path} (status {status}): {_reason(answer)}")
        return answer

    def _request(
        self, method: str, path: str, body: Any, knob: str = "timeout_s", *, num_tokens: int = 0
    ) -> tuple[int, Any]:
        seconds = self._timeout_s if knob == "timeout_s" else self._connect_timeout_s
        now = time.monotonic()
        stop = min(now + seconds, self._stop)
        connection = self._connect()
        with closing(connection):
            try:
                sock = connection.sock
                sock.settimeout(max(stop - now, _LEAST_TIMEOUT_S))
                data = None if body is None else json.dumps(body)
                connection.request(method, self._path + path, data, self._headers)
                connection.response_class = partial(_Response, stop)  # type: ignore[assignment]
                response = connection.getresponse()
                received = self._read(response, path, _LEAST_BYTES + num_tokens * _TOKEN_BYTES)
            except TimeoutError as error:
                raise BackendError(
                    f"the server at {self.url} did not finish {path} in {seconds:g} s. Raise "
                    f"rollout.options.{knob} if it only needs more time"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise LostServerError(
                    f"the server at {self.url} hung up in {path} ({type(error).__name__}: {error}): its own log says "
                    "why. Start it again"
                ) from error
        return response.status, _decode(received)

    def _read(self, response: http.client.HTTPResponse, path: str, most_bytes: int) -> bytes:
        """The whole answer, in pieces: its stated length may be anything."""
        received = bytearray()
        while piece := response.read(_PIECE_BYTES):
            received += piece
            if len(received) > most_bytes:
                raise BackendError(
                    f"the server at {self.url} sent more than {most_bytes} bytes in answer to {path}, which no "
                    "supported server does. Correct rollout.options.urls"
                )
        if response.length:
            raise http.client.IncompleteRead(bytes(received), response.length)
        return bytes(received)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = kind(*self._address, timeout=self._connect_timeout_s)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise LostServerError(
                f"nothing answers at {self.url} in {self._connect_timeout_s:g} s ({error}). Start the server there, or "
                "give its address in rollout.options.urls"
            ) from error
        return connection


class _Response(http.client.HTTPResponse):
    """A response that must be complete by a deadline, however slowly its bytes arrive, those of its head included.

    Args:
        stop: that time, by the monotonic clock.
        sock: where it comes from.
    """

    def __init__(self, stop: float, sock: socket.socket, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Received(stop, sock))


class _Received(io.RawIOBase):
    def __init__(self, stop: float, sock: socket.socket) -> None:
        self._stop, self._sock = stop, sock
        self._bytes = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_until(self._stop))
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


@contextmanager
def expected_form(url: str) -> Iterator[None]:
    """Inside the block answers are read as a supported version of a server gives them.

    Raises:
        BackendError: for an answer of another form.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BackendError(
            f"the server at {url} answered in another form than a supported version of SGLang or vLLM does "
            f"({type(error).__name__}: {error}). Correct rollout.options.urls, or start a supported version there"
        ) from error


def _left_until(stop: float) -> float:
    """Seconds; a socket knows only how long it may wait for the next bytes.

    Raises:
        TimeoutError: where none are left.
    """
    left = stop - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _decode(answer: bytes) -> Any:
    """JSON, or the text where it is none: some endpoints answer with a sentence."""
    text = answer.decode(errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _reason(answer: Any) -> str:
    """The message inside what servers wrap it in."""
    while isinstance(answer, dict):
        keys = [key for key in ("error", "message", "detail") if key in answer]
        if not keys:
            break
        answer = answer[keys[0]]
    return str(answer)[:500]
