"""Names of values in messages: what a user wrote, be it an argument of a function or a flag of a command.

Code that reads data and models is shared with runs, and names keys of their configuration. Where a value is given in
another way, the errors of a block say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import click

from hf_protocols.errors import ConfigError, HybridFlowError
from hf_protocols.validation import show

__all__ = ["naming_arguments", "naming_flags", "naming_parameters", "refuse_doubled", "rewording"]

_KEYS = {
    "data.prompt_field": "prompt_field",
    "data.answer_field": "answer_field",
    "data.chat_template": "chat_template",
    "data.system_prompt": "system_prompt",
    "data.template_options": "template_option",
    "data.too_long": "too_long",
    "data.max_prompt_tokens": "max_prompt_tokens",
    "data.block_tokens": "block_tokens",
    "rollout.max_new_tokens": "max_new_tokens",
}
"""Keys of a configuration, and the arguments that stand for them."""
_OF_PYTHON = ("prompt_field", "answer_field", "chat_template", "system_prompt", "max_new_tokens")
"""Arguments that `generate` and `evaluate` have in Python."""
_PARAMETERS = {
    "--overwrite": "overwrite=True",
    "--allow-changed": "allow_changed",
    "--resume": "resume",
    "run.output_dir": "output_dir",
}
"""Flags and keys, and the parameters that stand for them in Python."""
_LABEL = re.compile(r"([a-z_]+)(?:\.(\w+))?( = |=|: | is missing)")
"""The value that a message begins with, such as `output = 'x': exists` or `backend_options.dtype: ...`."""


def refuse_doubled(changes: Mapping[str, object], name: str, value: object, keys: Iterable[str]) -> None:
    """Refuses an argument that is given, by its name, next to one of the keys of `set` that it stands for.

    Raises:
        ConfigError: naming both.
    """
    doubled = [key for key in keys if key in changes]
    if value is not None and doubled:
        raise ConfigError(f"{name}, and set {show(doubled[0])}: both are given. Leave out one of them")


@contextmanager
def rewording(reword: Callable[[str], str]) -> Iterator[None]:
    """Changes the message of an error of this block; its type, notes and cause stay."""
    try:
        yield
    except HybridFlowError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (reword(error.args[0]),)
        raise


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Has errors of this block name arguments of `generate` and `evaluate` in place of keys of a configuration."""
    names = {key: name for key, name in _KEYS.items() if name in _OF_PYTHON}
    with rewording(lambda text: _replace(text, names)):
        yield


@contextmanager
def naming_parameters() -> Iterator[None]:
    """Has errors of this block name parameters of `train` and its siblings in place of flags of their commands."""
    with rewording(lambda text: _replace(text, _PARAMETERS)):
        yield


@contextmanager
def naming_flags() -> Iterator[None]:
    """Has errors of this block name the flags of the running command in place of keys and arguments."""
    options = [each for each in click.get_current_context().command.params if isinstance(each, click.Option)]
    flags = {str(each.name): each.opts[0] for each in options}
    long = {name: flag for name, flag in flags.items() if "_" in name}  # "data" and "rows" are words of a sentence too
    names = {key: flags[name] for key, name in _KEYS.items() if name in flags} | long

    def reword(text: str) -> str:
        return _replace(_replace_label(text, flags), names)

    with rewording(reword):
        yield


def _replace_label(text: str, flags: Mapping[str, str]) -> str:
    found = _LABEL.match(text)
    if found is None or found[1] not in flags:
        return text
    flag, inner, sign = flags[found[1]], found[2], found[3].strip()
    rest = text[found.end() :]
    if sign in (":", "is missing"):
        return f"{flag}{f' {inner}' if inner else ''}{found[3]}{rest}"
    return f"{flag} {inner}={rest}" if inner else f"{flag} {rest}"


def _replace(text: str, names: Mapping[str, str]) -> str:
    """The text with each name replaced where it stands as a word, not in a path or a quoted text."""
    if not names:
        return text
    longest = "|".join(re.escape(each) for each in sorted(names, key=len, reverse=True))
    pattern = rf"(?<![\w.'\"/-])({longest})(?![\w'\"/-]|\.\w)(?: = (?=['\"\d]))?"
    return re.sub(pattern, lambda found: names[found[1]] + _separator(found[0], names[found[1]]), text)


def _separator(found: str, name: str) -> str:
    if not found.endswith(" = "):
        return ""
    return " " if name.startswith("--") else " = "
