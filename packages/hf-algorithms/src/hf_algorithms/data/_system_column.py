"""The column `system` of preference pairs: the system message of the pair's conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_algorithms.data._rows import Message, check_characters
from hf_protocols.errors import DataError
from hf_protocols.validation import show

__all__ = ["begin_with", "check_field", "read_system"]


def read_system(record: Mapping[str, Any], where: str) -> str:
    """The column `system`; empty where it is absent or says nothing."""
    system = record.get("system")
    if system is None:
        return ""
    if not isinstance(system, str):
        raise DataError(f"{where}: system = {show(system)} is not text. Correct it")
    check_field(system, "system", where)
    return system if system.strip() else ""


def begin_with(system: str, prompt: str | tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """The prompt as a chat with this system message."""
    chat = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if chat[0]["role"] not in ("system", "developer"):
        return ({"role": "system", "content": system}, *chat)
    if chat[0]["content"] != system:
        raise DataError(
            f"{where}: its column 'system' is {show(system)}, and its chat begins with {show(dict(chat[0]))}. "
            "Remove one of the two"
        )
    return chat


def check_field(text: str, name: str, where: str) -> None:
    """Refuses a field whose text contains an unpaired surrogate."""
    try:
        check_characters(text, name)
    except DataError as error:
        raise DataError(f"{where}{error}") from None
