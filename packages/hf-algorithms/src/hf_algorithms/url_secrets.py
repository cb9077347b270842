"""Passwords and keys in URLs: found and hidden, and read from the environment where `${NAME}` stands for one."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

__all__ = ["fill_variables", "has_secret", "hide_secrets", "is_secret_name"]

_HIDDEN = "***"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)([^\s/?#]*)@")
_PARAMETER = re.compile(r"([?&;])([^\s=&;#?]+)=([^\s&;#]+)")
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_SECRET_WORDS = frozenset(
    {"key", "apikey", "accesskey", "token", "accesstoken", "secret", "password", "passwd", "passphrase", "pwd", "pass"}
    | {"auth", "authorization", "bearer", "jwt", "signature", "sig", "credential", "credentials"}
)
"""Parts of a query parameter's name that show that its value is not for everybody."""


def hide_secrets(text: str) -> str:
    """Returns a text in which no URL has a user or a password, or a key in its query. `${NAME}` stays."""
    return _PARAMETER.sub(_hide_parameter, _USER.sub(_hide_user, text))


def has_secret(text: str) -> bool:
    """True for a text with a URL that holds what should not be written down."""
    return hide_secrets(text) != text


def is_secret_name(name: str) -> bool:
    """True for the name of a parameter or a key whose value is not for everybody, such as `api_key`."""
    return bool({word.lower() for word in _WORDS.findall(name)} & _SECRET_WORDS)


def fill_variables(url: str) -> str:
    """Returns a URL with the values of environment variables for every `${NAME}`, quoted as URLs need it.

    Raises:
        ConfigError: for a variable that is not set; it begins with the URL.
    """

    def fill(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if not value:
            raise ConfigError(
                f"{show(hide_secrets(url))}: the environment variable {match[1]} is not set. Set it where the run "
                "starts, and on every machine of the cluster"
            )
        return quote(value, safe="")

    return _VARIABLE.sub(fill, url)


def _hide_user(match: re.Match[str]) -> str:
    scheme, given = match[1], match[2]
    is_variable = _VARIABLE.fullmatch(given.rpartition(":")[2])
    return match[0] if is_variable else f"{scheme}{_HIDDEN}@"


def _hide_parameter(match: re.Match[str]) -> str:
    separator, name, value = match.groups()
    is_secret = is_secret_name(name) and not _VARIABLE.fullmatch(value)
    return f"{separator}{name}={_HIDDEN}" if is_secret else match[0]
