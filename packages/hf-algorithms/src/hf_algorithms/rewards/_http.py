"""Scores from a server, over HTTP."""

from __future__ import annotations

import base64
import ipaddress
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from hf_algorithms.json_text import format_json
from hf_algorithms.rewards._conventions import CONVENTIONS, Style
from hf_algorithms.rewards._pool.messages import CallExpired
from hf_algorithms.rewards._trainer import TRAINER_VALUES
from hf_algorithms.url_secrets import fill_variables, hide_secrets
from hf_protocols.errors import ConfigError, RewardError
from hf_protocols.validation import shorten, show

__all__ = ["HTTPScorer", "check_address", "check_connection", "is_url"]

_SCHEMES = ("http://", "https://")
_CONNECT_S = 5.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_LEAST_ANSWER_BYTES = 1 << 20
_ROW_BYTES = 1 << 12


def is_url(name: str) -> bool:
    """True for the address of a server."""
    return name.lower().startswith(_SCHEMES)


def check_address(url: str, allowed_hosts: Sequence[str], *, key: str) -> None:
    """Refuses what is not the address of a server that may be asked.

    Args:
        url: whose `${NAME}` are environment variables.
        allowed_hosts: in addition to this machine's.
        key: that names other hosts, for messages.

    Raises:
        ConfigError: for an address that is not one, or of another host; for a variable that is not set.
    """
    shown = show(hide_secrets(url))
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{shown} is not the address of a server: it has characters to be written as %XX")
    filled = fill_variables(url)
    try:
        parts = urlsplit(filled)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        scheme = url.partition("://")[0]
        raise ConfigError(
            f"'{scheme}://***' is not the address of a server: its host or port is malformed. Correct it; / ? # @ and "
            ": in a password are written as %XX"
        ) from None
    if not host:
        raise ConfigError(f"{shown} is not the address of a server: it has no host")
    if not _is_this_machine(host) and host not in allowed_hosts:
        raise ConfigError(
            f"{shown}: the host {show(host)} is not this machine, and prompts and responses would leave it. "
            f"Add it to {key}"
        )


def check_connection(url: str) -> None:
    """Refuses a server to which no connection can be made within some seconds.

    Args:
        url: that `check_address` accepted.

    Raises:
        ConfigError: with the system's reason.
    """
    parts = urlsplit(fill_variables(url))
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme.lower() == "https" else 80)
    end_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            socket.create_connection((host, port), timeout=max(end_s - time.monotonic(), _FIRST_WAIT_S)).close()
            return
        except OSError as error:
            if time.monotonic() >= end_s:
                reason = (error.strerror or str(error)).lower()
                raise ConfigError(
                    f"{show(hide_secrets(url))}: cannot connect to {shorten(host)} at port {port}: {reason}. Start the "
                    "server first, or correct the address"
                ) from error
        time.sleep(_FIRST_WAIT_S)


@dataclass(frozen=True, repr=False)
class HTTPScorer:
    """A server as a function: posts lists as JSON, and reads what a function might return.

    A request whose connection fails, or whose response reports trouble of the server (status 429 and 500 to 599), is
    retried at growing intervals until the deadline. After the deadline the call's responses have no score.

    Args:
        url: address; a host other than this machine must be among `allowed_hosts`. User and password in it are sent
            as basic authentication and not shown. `${NAME}` is the value of an environment variable.
        deadline_s: of one response.
        style: convention of the request's names; OpenRLHF's servers read `query`.
        allowed_hosts: names that are allowed in addition to this machine's.

    Raises:
        ConfigError: for an address that is not one, or of another host; for a variable that is not set.
    """

    url: str
    deadline_s: float = 30.0
    style: Style = "auto"
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_address(self.url, self.allowed_hosts, key="allowed_hosts")

    def __repr__(self) -> str:
        return f"HTTPScorer({self._shown()!r})"

    def __call__(self, **values: Any) -> Any:
        """Returns the answer to one request.

        Raises:
            CallExpired: at the deadline.
            RewardError: for an answer that says that the request is wrong, or that is not JSON or too long.
        """
        for name in TRAINER_VALUES:  # of this process alone
            values.pop(name, None)
        if self.style == "openrlhf":
            values["query"] = values.pop("queries")
        num_rows = self._count_rows(values)
        request = self._build_request(format_json(values).encode())
        end_s = time.monotonic() + self.deadline_s * num_rows
        wait_s = _FIRST_WAIT_S
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise CallExpired
            try:
                return self._ask(request, left_s, _LEAST_ANSWER_BYTES + num_rows * _ROW_BYTES)
            except (OSError, HTTPException) as error:
                if isinstance(error, HTTPError) and error.code != 429 and error.code < 500:
                    raise RewardError(f"{self._shown()} returned status {error.code} {shorten(error.reason)}") from None
            time.sleep(min(wait_s, max(end_s - time.monotonic(), 0.0)))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _count_rows(self, values: Mapping[str, Any]) -> int:
        """Responses of a call: for a single one, a list has its tokens or messages."""
        if self.style != "auto" and CONVENTIONS[self.style].per_sample:
            return 1
        return max((len(value) for value in values.values() if isinstance(value, list)), default=1) or 1

    def _ask(self, request: Request, timeout_s: float, most_bytes: int) -> Any:
        # No proxy and no redirect: texts go to the host that was allowed, and to no other.
        opener = build_opener(ProxyHandler({}), _NoRedirects())
        with opener.open(request, timeout=timeout_s) as answer:
            body = answer.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise RewardError(
                f"{self._shown()} returned more than {most_bytes} bytes. Let it return one number for each response"
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            text = body.decode("utf-8", errors="replace")
            raise RewardError(
                f"{self._shown()} returned {show(text)}, which is not JSON. Let it return a list of numbers"
            ) from None

    def _build_request(self, body: bytes) -> Request:
        parts = urlsplit(fill_variables(self.url))
        headers = {"Content-Type": "application/json"}
        if parts.username is not None:
            headers["Authorization"] = f"Basic {_encode_user(parts)}"
        address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return Request(address, data=body, headers=headers, method="POST")

    def _shown(self) -> str:
        return hide_secrets(self.url)


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leaves the answer as it is, which is an error."""


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _encode_user(parts: SplitResult) -> str:
    text = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return base64.b64encode(text.encode()).decode()
