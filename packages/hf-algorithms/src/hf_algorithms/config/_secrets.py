"""Passwords and keys that a configuration must not hold, because a run's files and messages show it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hf_algorithms.url_secrets import has_secret, hide_secrets
from hf_protocols.errors import ConfigError
from hf_protocols.validation import shorten, show

__all__ = ["check_secrets"]

_TEXTS = frozenset({"data.system_prompt", "data.chat_template", "rollout.stop"})
"""Keys whose values are texts for a model."""
_ADVICE = {
    "reward": "Write ${NAME} in its place, and set the environment variable NAME",
    "cost": "Write ${NAME} in its place, and set the environment variable NAME",
    "evaluation": "Write ${NAME} in its place, and set the environment variable NAME",
    "rollout": "Remove it, and set rollout.options.api_key_variable where the server has a key",
}


def check_secrets(body: Mapping[str, Any]) -> None:
    """Refuses a URL with a password or a key before any message shows it.

    Raises:
        ConfigError: one line for each, with the secret left out.
    """
    problems = [
        f"{shorten(key)} = {show(hide_secrets(text))}: a password or a key in a URL would be written into the run's "
        f"config.toml. {_ADVICE.get(re.split(r'[.[]', key)[0], 'Remove it')}"
        for key, text in _list_texts(body, "")
        if key not in _TEXTS and has_secret(text)
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _list_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _list_texts(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _list_texts(each, key if key in _TEXTS else f"{key}[{number}]")
