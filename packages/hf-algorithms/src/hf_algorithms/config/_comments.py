"""A configuration as a file with a comment per key, and what a new one needs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from hf_algorithms.config._evaluation import EvaluationConfig
from hf_algorithms.config._reading import apply_override, find_recipe, parse_config
from hf_algorithms.config._sections import Config, RoleConfig
from hf_algorithms.config._writing import find_switched_off, find_used, is_read, without_none
from hf_algorithms.recipes import SupervisedRecipe
from hf_protocols.toml import format_toml_value, read_toml

__all__ = ["build_new", "describe_keys", "format_commented", "resolve_config"]

_WIDTH = 110
_SAMPLES = 8
"""Responses to a prompt in a starting file of an algorithm that compares them."""
_CONTEXT = 512
"""Of a fresh model: the default of `rollout.max_new_tokens`, and as many tokens for the prompt."""
_NAMING = ("name", "recipe")
_PLACEHOLDERS = {"cost.function": "my_costs:cost", "roles.teacher.path": "path/to/teacher"}
"""Values in a starting file for keys that an algorithm needs and that have no default."""


def resolve_config(
    path: Path | None,
    *,
    algorithm: str | None = None,
    model: str | None = None,
    data: str | None = None,
    overrides: Sequence[str] = (),
    search_path: Sequence[str] = (),
) -> Config:
    """Returns the configuration of a file, or a new one.

    Args:
        path: of the TOML file; None: a new configuration of the keys that the algorithm needs. One that has no default
            and was not given gets a name to replace: `train.jsonl`, `my_costs:cost`.
        algorithm: a shipped one, or `module:RECIPE`; in place of the file's.
        model: directory or hub name, in place of the file's. A new configuration without one has a fresh model.
        data: path of the training rows, in place of the file's.
        overrides: `section.key=value`, applied last, in order.
        search_path: folders in which a recipe's module is looked for last.

    Raises:
        ConfigError: as `load_config` does.
    """
    named = {} if algorithm is None else {"recipe" if ":" in algorithm else "name": algorithm}
    if path is None:
        body = build_new(named, model, data, search_path)
    else:
        body = read_toml(path)
        if named and isinstance(body.get("algorithm"), dict):
            body["algorithm"] = {key: value for key, value in body["algorithm"].items() if key not in _NAMING}
        given = {f"algorithm.{key}": value for key, value in named.items()}
        given |= {key: value for key, value in (("model.path", model), ("data.train", data)) if value is not None}
        for key, value in given.items():
            apply_override(body, f"{key}={format_toml_value(value)}")
    for override in overrides:
        apply_override(body, override)
    return parse_config(body, search_path=search_path, command=None)


def build_new(named: dict[str, str], model: str | None, data: str | None, search_path: Sequence[str]) -> dict[str, Any]:
    """Returns the sections of a new configuration; see `resolve_config`."""
    algorithm = find_recipe(named, search_path, None).config
    body: dict[str, Any] = {
        "data": {"train": "train.jsonl" if data is None else data},
        "model": {"tokenizer": "bpe", "max_positions": _CONTEXT} if model is None else {"path": model},
        "algorithm": named,
    }
    if algorithm.least_samples > 1:
        samples = max(algorithm.least_samples, _SAMPLES)
        body["rollout"] = {"samples_per_prompt": min(samples, algorithm.most_samples or samples)}
    for key in algorithm.needs_keys:
        *tables, name = key.split(".")
        table: dict[str, Any] = body
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = _PLACEHOLDERS.get(key, f"path/to/{tables[-1]}")
    return body


def describe_keys(model: type[BaseModel]) -> dict[str, str]:
    """Returns what each key of a section means: the docstring below it, and the values that it may have.

    A class that changes a default alone inherits the docstring.

    Args:
        model: class of the section; a user's own `AlgorithmConfig` as well.

    Returns:
        A text by name of the key, in order; empty for a key without a docstring.
    """
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        classes = [each for each in model.__mro__ if issubclass(each, BaseModel)]
        texts = [each.model_fields[name].description for each in classes if name in each.model_fields]
        meaning = " ".join(next(filter(None, texts), "").split())
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        if meaning and len(choices) > 1:
            meaning += f" One of {', '.join(map(str, choices))}."
        if meaning and type(None) in get_args(field.annotation) and field.default is not None:
            meaning += ' "none" switches it off.'
        found[name] = meaning
    return found


def format_commented(config: Config) -> str:
    """Returns the resolved configuration as TOML with a comment above each key; it reads back as it is.

    A key without a value, and a role that nothing overrides, stand there as comments.
    """
    given = config.model_dump()
    written = without_none(given)
    written["algorithm"] |= dict.fromkeys(find_switched_off(config), "none")
    lines: list[str] = []
    for section in Config.model_fields:
        if isinstance(config.recipe, SupervisedRecipe) and section in config.recipe.unused:
            continue
        if section == "roles":
            for name in config.recipe.model_roles:
                overrides = written["roles"].get(name, {})
                lines.append(f"[roles.{name}]" if overrides else f"# [roles.{name}]")
                lines += _format_keys(RoleConfig, RoleConfig.model_fields, overrides)
        elif section == "evaluation":
            for body in written.get("evaluation", ()) or (None,):
                lines.append("# [[evaluation]]" if body is None else "[[evaluation]]")
                lines += _format_keys(EvaluationConfig, EvaluationConfig.model_fields, without_none(body or {}))
        else:
            reads = is_read(config, section)  # or it may be filled in with a set of [[evaluation]]
            lines.append(f"[{section}]" if reads else f"# [{section}]")
            keys = find_used(config, section, given[section])
            lines += _format_keys(type(getattr(config, section)), keys, written[section] if reads else {})
    return "\n".join(lines)


def _format_keys(model: type[BaseModel], keys: Iterable[str], written: Mapping[str, Any]) -> Iterator[str]:
    meanings = describe_keys(model)
    for key in keys:
        yield from textwrap.wrap(
            meanings[key], _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        yield f"{key} = {format_toml_value(written[key])}" if key in written else f"# {key} ="
    yield ""
