"""Writing a configuration as TOML that reads back as it is."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes import SupervisedRecipe
from hf_algorithms.recipes.conventions import expand_conventions
from hf_protocols.toml import format_toml_value

if TYPE_CHECKING:
    from hf_algorithms.config._sections import Config

__all__ = [
    "build_sections",
    "find_switched_off",
    "find_used",
    "format_toml",
    "is_read",
    "with_plain_scalars",
    "without_none",
]

_MOST_LEVELS = 64
"""TOML's own bound is lower."""


def format_toml(config: Config) -> str:
    """The resolved configuration as TOML text, every key present that has a value.

    A key of `[algorithm]` that is None reads `"none"` where to leave it out would give it a value.
    """
    lines: list[str] = []
    sections = without_none(config.model_dump())
    sections = {name: find_used(config, name, body) for name, body in sections.items() if is_read(config, name)}
    sections["algorithm"] |= dict.fromkeys(find_switched_off(config), "none")
    roles, evaluations = sections.pop("roles"), sections.pop("evaluation", ())
    sections |= {f"roles.{name}": body for name, body in roles.items() if body}
    for section, body in sections.items():
        lines += [f"[{section}]", *(f"{key} = {format_toml_value(value)}" for key, value in body.items()), ""]
    for each in map(without_none, evaluations):
        lines += ["[[evaluation]]", *(f"{key} = {format_toml_value(value)}" for key, value in each.items()), ""]
    return "\n".join(lines)


def build_sections(config: Config) -> dict[str, Any]:
    """Returns the sections of the resolved configuration as they read back from TOML, see `format_toml`."""
    return tomllib.loads(format_toml(config))


def is_read(config: Config, section: str) -> bool:
    """True for a section that a run of this configuration reads."""
    recipe = config.recipe
    if not isinstance(recipe, SupervisedRecipe):
        return True
    return section not in recipe.unused and (section != "rollout" or bool(config.evaluation))


def find_used(config: Config, section: str, body: Any) -> Any:
    """Returns the keys of a section that mean something for the recipe."""
    recipe = config.recipe
    if not isinstance(recipe, SupervisedRecipe) or not isinstance(body, Mapping):
        return body
    return {key: value for key, value in body.items() if f"{section}.{key}" not in recipe.unused}


def find_switched_off(config: Config) -> Iterator[str]:
    """Yields the keys of `[algorithm]` that are None where to leave them out would give them a value."""
    algorithm = config.algorithm
    usual = expand_conventions(algorithm.conventions, config.recipe.name)
    for key, field in type(algorithm).model_fields.items():
        if getattr(algorithm, key) is None and usual.get(key, field.get_default(call_default_factory=True)) is not None:
            yield key


def with_plain_scalars(value: Any, level: int = 0) -> Any:
    """Returns the value with paths as strings, and scalars of NumPy as Python's booleans and numbers.

    Deeper than TOML nests, and inside objects of other classes, everything stays as it is.
    """
    if level > _MOST_LEVELS:
        return value
    if type(value) is dict:
        return {key: with_plain_scalars(each, level + 1) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_plain_scalars(each, level + 1) for each in value)
    if isinstance(value, PurePath):
        return str(value)
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    is_number = isinstance(kind, str) and kind in "biuf" and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


def without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value; to leave one out is the same as None. Options of a backend stay as they are."""
    return {
        key: without_none(value) if isinstance(value, Mapping) and key != "options" else value
        for key, value in body.items()
        if value is not None
    }
