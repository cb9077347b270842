"""The keys of a configuration by their names, and those that a file has and no run reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel

from hf_algorithms.config._evaluation import EvaluationConfig
from hf_algorithms.config._other_projects import find_foreign
from hf_algorithms.config._sections import Config, RoleConfig
from hf_algorithms.recipes import RECIPES, Recipe, SupervisedRecipe
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

__all__ = ["config_keys", "hint", "hint_nested", "list_unknown"]

_MOST_HINTS = 3
_EPOCHS = re.compile(r"(?:\w+_)?epochs?")
"""Names under which users look for the length of training, which is counted in iterations."""


def config_keys(recipe: Recipe = RECIPES["ppo"]) -> tuple[str, ...]:
    """Every key that a run of this recipe has, as `section.key` or `roles.NAME.key`, in order.

    Those of each table `[[evaluation]]` are `evaluation.KEY`.
    """
    keys: list[str] = []
    unused = recipe.unused if isinstance(recipe, SupervisedRecipe) else ()
    for section, field in Config.model_fields.items():
        if section in unused:
            continue
        if section == "roles":
            keys += (f"roles.{role.name}.{key}" for role in recipe.roles for key in RoleConfig.model_fields)
        elif section == "evaluation":
            keys += (f"evaluation.{key}" for key in EvaluationConfig.model_fields)
        else:
            model = recipe.config if section == "algorithm" else cast("type[BaseModel]", field.annotation)
            keys += (f"{section}.{key}" for key in model.model_fields)
    return tuple(key for key in keys if key not in unused)


def list_unknown(body: Mapping[str, Any], known_keys: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the table of each unknown key, such as `evaluation[0].`, and its name."""
    return [(place, name) for place, name in _flatten(body) if f"{_section_of(place)}{name}" not in known_keys]


def hint_nested(place: Sequence[str | int]) -> str:
    """Suggests a similar key of a table inside a section, such as `[model.lora]`, or lists its keys.

    Args:
        place: of the unknown key, as pydantic has it: names, and numbers of items.
    """
    *tables, name = place
    model = _find_model(Config)
    for each in tables:
        field = model.model_fields.get(each) if model is not None and isinstance(each, str) else None
        model = model if isinstance(each, int) else _find_model(field.annotation) if field is not None else None
    if model is None:
        return ""
    foreign = find_foreign(f"{tables[-1]}.{name}") or find_foreign(str(name))
    if foreign is not None:
        return _hint_foreign(*foreign)
    near = find_similar(str(name), model.model_fields)
    return f": did you mean {show(near[0])}?" if near else f". Its table has {', '.join(model.model_fields)}"


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """The section in the type of a field, such as that of `tuple[FunctionConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_find_model, get_args(annotation))), None)


def _flatten(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields where every key is, such as `evaluation[0].`, and its name."""
    for section, table in body.items():
        if section == "roles" and isinstance(table, Mapping):
            for role, overrides in table.items():
                keys = overrides if isinstance(overrides, Mapping) else ()
                yield from ((f"roles.{role}.", key) for key in keys)
        elif section == "evaluation" and isinstance(table, list | tuple):
            for number, each in enumerate(table):
                keys = each if isinstance(each, Mapping) else ()
                yield from ((f"evaluation[{number}].", key) for key in keys)
        elif isinstance(table, Mapping) and section in Config.model_fields:
            for key, value in table.items():
                yield from list(_flatten_foreign(f"{section}.{key}.", value)) or [(f"{section}.", key)]
        elif section not in Config.model_fields:
            yield from list(_flatten_foreign(f"{section}.", table)) or [("", section)]


def _flatten_foreign(place: str, table: Any) -> Iterator[tuple[str, str]]:
    """Yields the keys of another project's table, such as `[trainer]`, that have one here."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if find_foreign(f"{place}{name}") is not None:
            yield place, name
        yield from _flatten_foreign(f"{place}{name}.", value)


def _section_of(place: str) -> str:
    """The place without the number of a table, with which `config_keys` begin."""
    return re.sub(r"\[\d+\]", "", place)


def hint(place: str, name: str, known_keys: Sequence[str]) -> str:
    """Suggests a similar key of the section, or the same key of another one; lists the known names without either.

    A name that no section has is first looked for in other projects.
    """
    key, dot = f"{_section_of(place)}{name}", bool(place)
    section = key.rpartition(".")[0]
    if owners := _find_owners().get(key):
        shown = ", ".join(owners[:_MOST_HINTS]) + (" and others" if len(owners) > _MOST_HINTS else "")
        foreign = find_foreign(name, known_keys)
        further = "" if foreign is None else f". The key of {foreign[0]} is {foreign[1]} here"
        return f": a key of {shown}, not of this algorithm. Remove it or change algorithm.name{further}"
    known = (*Config.model_fields, *known_keys)
    is_ours = place.startswith("roles.") or any(each.rpartition(".")[2] == name for each in known)
    foreign = find_foreign(key, known_keys) or (None if is_ours else find_foreign(name, known_keys))
    if foreign is not None:
        return _hint_foreign(*foreign)
    if (elsewhere := find_foreign(key)) is not None:
        projects, ours = elsewhere
        return f": a key of {projects}. This algorithm lacks {ours}. Remove it or change algorithm.name"
    if section != "algorithm" and _EPOCHS.fullmatch(name.lower()):
        size = "algorithm.batch_size" if "algorithm.batch_size" in known_keys else "rollout.batch_size"
        return f": training is counted in iterations of {show(size)} rows. Set 'run.iterations'"
    near = [each for each in known if each.startswith(f"{section}.") or not (dot or "." in each)]
    names = [each.rpartition(".")[2] for each in near]
    wanted = similar[0] if (similar := find_similar(name, names)) else name.lower()
    if found := [each for each in (near if similar else known) if each.rpartition(".")[2] == wanted]:
        found = [f"{place}{wanted}" if each == f"{section}.{wanted}" else each for each in found]
        return f": did you mean {' or '.join(map(show, found[:_MOST_HINTS]))}?"
    if not names:
        return ". Remove it"
    return f". {f'[{section}] has' if dot else 'The sections are'} {', '.join(names)}"


def _hint_foreign(projects: str, ours: str) -> str:
    return f": a key of {projects}. Set {ours}"


@cache
def _find_owners() -> dict[str, list[str]]:
    """The shipped algorithms that have each key."""
    owners: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        for key in config_keys(recipe):
            owners.setdefault(key, []).append(name)
    return owners
