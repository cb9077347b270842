"""Writing a configuration as TOML that reads back as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes import SupervisedRecipe
from hf_algorithms.recipes.conventions import expand_conventions
from hf_protocols.toml import format_toml_value

if TYPE_CHECKING:
    from hf_algorithms.config._sections import Config

__all__ = ["find_switched_off", "format_toml", "without_none"]


def format_toml(config: Config) -> str:
    """The resolved configuration as TOML text, every key present that has a value.

    A key of `[algorithm]` that is None reads `"none"` where to leave it out would give it a value.
    """
    lines: list[str] = []
    sections = without_none(config.model_dump())
    if isinstance(config.recipe, SupervisedRecipe):
        sections = {name: body for name, body in sections.items() if name not in config.recipe.unused}
    sections["algorithm"] |= dict.fromkeys(find_switched_off(config), "none")
    roles, evaluations = sections.pop("roles"), sections.pop("evaluation", ())
    sections |= {f"roles.{name}": body for name, body in roles.items() if body}
    for section, body in sections.items():
        lines += [f"[{section}]", *(f"{key} = {format_toml_value(value)}" for key, value in body.items()), ""]
    for each in map(without_none, evaluations):
        lines += ["[[evaluation]]", *(f"{key} = {format_toml_value(value)}" for key, value in each.items()), ""]
    return "\n".join(lines)


def find_switched_off(config: Config) -> Iterator[str]:
    """Yields the keys of `[algorithm]` that are None where to leave them out would give them a value."""
    algorithm = config.algorithm
    usual = expand_conventions(algorithm.conventions, config.recipe.name)
    for key, field in type(algorithm).model_fields.items():
        if getattr(algorithm, key) is None and usual.get(key, field.get_default(call_default_factory=True)) is not None:
            yield key


def without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value; to leave one out is the same as None. Options of a backend stay as they are."""
    return {
        key: without_none(value) if isinstance(value, Mapping) and key != "options" else value
        for key, value in body.items()
        if value is not None
    }
