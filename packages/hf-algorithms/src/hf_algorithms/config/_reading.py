"""Reading a configuration from TOML, and checking it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, create_model

from hf_algorithms.config._evaluation import find_wrong_sets, refuse_evaluation
from hf_algorithms.config._keys import config_keys, hint, hint_nested, list_unknown
from hf_algorithms.config._messages import describe_problem
from hf_algorithms.config._secrets import check_secrets
from hf_algorithms.config._sections import Config
from hf_algorithms.config._writing import with_plain_scalars, without_none
from hf_algorithms.recipes import COMMAND_RECIPES, RECIPES, AlgorithmConfig, Recipe, SupervisedRecipe, load_recipe
from hf_algorithms.recipes.conventions import expand_conventions
from hf_algorithms.url_secrets import hide_secrets
from hf_algorithms.users_code import describe_raised
from hf_protocols import ConfigError
from hf_protocols.foreign_code import raised_as
from hf_protocols.similar_names import find_similar
from hf_protocols.toml import find_unwritable, parse_toml, read_toml
from hf_protocols.validation import shorten, shorten_list, show

__all__ = ["load_config", "parse_config", "read_sections", "set_key"]


def load_config(
    path: Path, overrides: Sequence[str] = (), *, search_path: Sequence[str] = (), command: str | None = "train"
) -> Config:
    """Reads a TOML file, then applies `section.key=value` overrides (values as in TOML; bare words are strings).

    Relative paths inside the file are relative to where the command runs.

    Args:
        path: of the file.
        overrides: applied in order.
        search_path: folders in which a recipe's module is looked for last.
        command: of `hybridflow`, whose recipes the file may name; None: those of every command.

    Raises:
        ConfigError: for a missing or malformed file, an unknown key (with the nearest known one), or a bad value.
    """
    body = read_toml(path)
    for override in overrides:
        apply_override(body, override)
    return parse_config(body, search_path=search_path, command=command)


def read_sections(config: object) -> dict[str, Any]:
    """Returns the sections of a TOML file, or a copy of those of a mapping.

    Raises:
        ConfigError: for something else, a file that cannot be read, and values that are not data.
    """
    if isinstance(config, str | os.PathLike):
        return read_toml(Path(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config = {show(config)}: is not a path or a mapping of sections")
    for section, keys in config.items():
        if not isinstance(keys, Mapping | list):
            raise ConfigError(f"config: {section} = {show(keys)}: is not a section. Pass its keys and values")
    try:
        return {section: with_plain_scalars(keys) for section, keys in deepcopy(dict(config)).items()}
    except TypeError as error:  # of a lock, or another thing that is not data
        raise ConfigError(f"config: {error}. Give texts, numbers, and lists or mappings of them") from None


def parse_config(body: Mapping[str, Any], *, search_path: Sequence[str] = (), command: str | None = "train") -> Config:
    """Checks a mapping of sections and builds the configuration.

    Raises:
        ConfigError: one line for every problem, among them values that `format_toml` could not write so that they
            read back as they are.
    """
    check_secrets(body)
    recipe = find_recipe(body.get("algorithm"), search_path, command)
    body = _expand_conventions(recipe.fill(body) if isinstance(recipe, SupervisedRecipe) else body, recipe)
    with_scorers = recipe.with_scorers(dict.fromkeys(_find_scored_roles(body, recipe), ""))
    _check_role_names(body.get("roles"), with_scorers)
    known = config_keys(with_scorers)
    unknown = list_unknown(body, known)
    if unknown:
        refuse_evaluation(recipe, [place + name for place, name in unknown])
        lines = shorten_list(unknown, lambda key: f"unknown key {show(key[0] + key[1])}{hint(*key, known)}")
        raise ConfigError("\n".join(lines))
    unwritable = find_unwritable(without_none(body))
    if unwritable is not None:
        key, value, reason = unwritable
        raise ConfigError(f"{shorten(key)} = {show(value)}: {reason}")
    label = f"{recipe.config.__name__} of recipe {show(recipe.name)}"
    try:
        with raised_as(lambda error: ConfigError(f"{label} raised {describe_raised(error)}"), but=(ValidationError,)):
            config = _model_of(recipe.config).model_validate({"algorithm": {}, **body})
    except ValidationError as error:
        problems = error.errors()
        hints = [hint_nested(each["loc"]) if each["type"] == "extra_forbidden" else "" for each in problems]
        lines = [describe_problem(each) + further for each, further in zip(problems, hints, strict=True)]
        raise ConfigError("\n".join(lines)) from None
    if config.algorithm.name not in RECIPES or config.algorithm.recipe is not None:
        config._own_recipe = recipe
    _check_meaning(config)
    unwritable = find_unwritable({"algorithm": without_none(config.algorithm.model_dump())})
    if unwritable is not None:
        key, value, reason = unwritable
        raise ConfigError(f"{shorten(key)} = {show(value)}: {reason}")
    return config


def _expand_conventions(body: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """The body with the keys that `algorithm.conventions` stands for, and `"none"` as None; what is written wins."""
    section = body.get("algorithm")
    if not isinstance(section, Mapping):
        return body
    given = {key: None if value == "none" and _may_be_none(recipe, key) else value for key, value in section.items()}
    return {**body, "algorithm": {**expand_conventions(given.get("conventions", "ours"), recipe.name), **given}}


def _may_be_none(recipe: Recipe, key: str) -> bool:
    field = recipe.config.model_fields.get(key)
    return field is not None and type(None) in get_args(field.annotation)


@lru_cache
def _model_of(algorithm: type[AlgorithmConfig]) -> type[Config]:
    """`Config` with the section of this algorithm."""
    return create_model("Config", __base__=Config, algorithm=(algorithm, ...))


def find_recipe(section: object, search_path: Sequence[str], command: str | None = "train") -> Recipe:
    """The recipe that an `[algorithm]` section names; the command's usual one by default, PPO of `train`."""
    commands = COMMAND_RECIPES if command is None else {command: COMMAND_RECIPES[command]}
    recipes = {name: recipe for known in commands.values() for name, recipe in known.items()}
    named = section if isinstance(section, Mapping) else {}
    name, reference = named.get("name"), named.get("recipe")
    if reference is not None:
        if not isinstance(reference, str):
            raise ConfigError(f"algorithm.recipe = {show(reference)}: must be a text such as 'module:RECIPE'")
        recipe = load_recipe(reference, search_path=search_path)
        if name is not None and name != recipe.name:
            raise ConfigError(
                f"algorithm.name = {show(name)}: algorithm.recipe = {show(reference)} is named {show(recipe.name)}. "
                "Leave algorithm.name out"
            )
        return recipe
    if name is None:
        return next(iter(recipes.values()))
    if not isinstance(name, str) or name not in recipes:
        for other, others in COMMAND_RECIPES.items():
            if isinstance(name, str) and name in others:
                raise ConfigError(
                    f"algorithm.name = {show(name)}: hybridflow {command} does not run it. Use hybridflow {other}"
                )
        near = find_similar(name, recipes) if isinstance(name, str) else []
        hint = (
            f"Did you mean {show(near[0])}?" if near else f"Choose one of {', '.join(recipes)}, or set algorithm.recipe"
        )
        raise ConfigError(f"algorithm.name = {show(name)}: is not an algorithm. {hint}")
    return recipes[name]


def _check_role_names(section: object, recipe: Recipe) -> None:
    for name in section if isinstance(section, Mapping) else ():
        try:
            recipe.role(name)
        except ConfigError as error:
            raise ConfigError(f"[roles.{shorten(str(name))}]: {error}") from None


def _check_meaning(config: Config) -> None:
    """Refuses keys that contradict one another, overrides that their role cannot have, and keys that are missing."""
    name = show(config.algorithm.name)
    problems = [
        *_ask_for_contradictions(config.algorithm),
        *_find_overrides_without_model(config),
        *_find_problems_of_rewards(config),
        *(
            f"{_describe_missing(key)} is missing: algorithm.name = {name} needs it"
            for key in config.algorithm.needs_keys
            if _is_missing(config, key)
        ),
        *_find_wrong_scorers(config),
        *_find_idle_rollback(config),
        *_find_idle_rollout(config),
        *_find_idle_store(config),
        *find_wrong_sets(config.evaluation, has_metric=not config.reward.evaluates_model),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _find_idle_rollout(config: Config) -> Iterator[str]:
    """Yields a line for a key of `[rollout]` in a supervised run that generates nothing."""
    given = sorted(config.rollout.model_fields_set)
    if given and not config.evaluation and isinstance(config.recipe, SupervisedRecipe):
        yield (
            f"rollout.{given[0]}: {config.algorithm.name} generates for [[evaluation]] alone, which is absent. Add a "
            "table [[evaluation]], or remove the key"
        )


def _find_idle_rollback(config: Config) -> list[str]:
    if config.training.on_nonfinite != "rollback":
        return []
    reasons = {"checkpoint_every": "no commit is made to go back to", "max_restarts": "no rollback is allowed"}
    return [
        f'training.on_nonfinite = "rollback" with run.{key} = 0: {reason}. Raise run.{key}'
        for key, reason in reasons.items()
        if getattr(config.run, key) == 0
    ]


def _ask_for_contradictions(algorithm: AlgorithmConfig) -> list[str]:
    label = f"{type(algorithm).__name__}.find_contradictions"
    with raised_as(lambda error: ConfigError(f"{label} raised {describe_raised(error)}")):  # it may be a user's
        found = list(algorithm.find_contradictions())
    if not all(isinstance(line, str) for line in found):
        raise ConfigError(f"{label} gave {show(found)}. Let it yield texts")
    usual = expand_conventions(algorithm.conventions, algorithm.name)
    return [_name_origin(line, algorithm, usual) for line in found]


def _name_origin(line: str, algorithm: AlgorithmConfig, usual: Mapping[str, Any]) -> str:
    """Says of a value that begins a message where it is from, if nobody wrote it."""
    begin = re.match(r"algorithm\.(\w+) = [^:]*", line)
    if begin is None:
        return line
    key = begin[1]
    if key in usual and getattr(algorithm, key) == usual[key]:
        origin = f"by conventions = {show(algorithm.conventions)}"
    elif key in algorithm.model_fields_set:
        return line
    else:
        origin = "the default"
    return f"{begin[0]} ({origin}){line[begin.end() :]}"


def _find_overrides_without_model(config: Config) -> Iterator[str]:
    for name, overrides in config.roles.items():
        role = config.recipe.role(name)
        if (
            role.has_model
            and overrides.learning_rate is not None
            and not getattr(role.load_worker(), "trainable", True)
        ):
            yield f"roles.{name}.learning_rate: the role {name} of {config.recipe.name} is not trained. Remove the key"
        if not role.has_model:
            yield from (
                f"roles.{name}.{key}: the role {name} of {config.recipe.name} holds no model. Remove the key"
                for key in overrides.model_fields_set
            )


def _find_scored_roles(body: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """Yields the roles that a model scores for, because the section of their name has `model`."""
    for role in recipe.roles:
        section = body.get(role.name)
        if role.scored_by is not None and isinstance(section, Mapping) and section.get("model") is not None:
            yield role.name


def _is_missing(config: Config, key: str) -> bool:
    section, _, name = key.rpartition(".")
    if name == "function" and section in ("reward", "cost"):
        part = getattr(config, section)
        return not part.list_functions() and part.model is None
    return _value_of(config, key) is None


def _describe_missing(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{key} or [{section}.model]" if name == "function" else key


def _find_problems_of_rewards(config: Config) -> Iterator[str]:
    for section in ("reward", "cost"):
        part = getattr(config, section)
        if part.functions and "function" in part.model_fields_set:
            yield (
                f"{section}.function = {show(part.function)}: [[{section}.functions]] are given as well. "
                "Make it one of them"
            )
        if part.model is not None and any(each.name == "model" for each in part.list_functions()):
            yield f"{section}.functions: the name 'model' is that of [{section}.model] in metrics. Rename the function"
        yield from _find_idle_scores(config, section)
    yield from _find_wrong_filters(config)


def _find_idle_scores(config: Config, section: str) -> Iterator[str]:
    """Scores that nothing reads, and those of which none counts; a recipe of one's own may read what it likes."""
    part, recipe = getattr(config, section), config.recipe
    weights = {f"{section}.functions": [each.weight for each in part.list_functions()]}
    weights[f"{section}.model"] = [] if part.model is None else [part.model.weight]
    given = [key for key, values in weights.items() if values]
    if not given or config.algorithm.recipe is not None:
        return
    if section == "cost" and all(role.name != "cost" for role in recipe.roles):
        yield f"[cost] is set, and {recipe.name} keeps no cost below a limit. Remove it, or choose safe_rlhf"
    elif any(role.name == section for role in recipe.roles) and not any(chain.from_iterable(weights.values())):
        yield f"{' and '.join(given)}: every weight is 0, so no response has a score. Set one to another number"


def _find_wrong_filters(config: Config) -> Iterator[str]:
    """A reward that `filter_metric` names and that is absent; names of a worker of one's own are known when traced."""
    metric, names = getattr(config.algorithm, "filter_metric", ""), _list_rewards(config)
    if not metric.startswith("reward/") or metric in names:
        return
    workers = [role.load_worker() for role in config.recipe.roles if role.scored_by is not None]
    if any(hasattr(worker, "compute_named_reward") for worker in workers):
        known = ", ".join(names) or "none"
        yield f"algorithm.filter_metric = {show(metric)}: no reward has this name. Use one of {known}"


def _list_rewards(config: Config) -> list[str]:
    names = [each.name for each in config.reward.list_functions()]
    return [f"reward/{name}" for name in (*names, *(["model"] if config.reward.model is not None else []))]


def _find_wrong_scorers(config: Config) -> Iterator[str]:
    if config.reward.metric == "model" and config.reward.model is None:
        yield "reward.metric = 'model': [reward.model] is absent. Set reward.model.path, or name a function"
    for section, scorer in config.recipe.scorers.items():
        if config.role(scorer).path is not None:
            yield f"roles.{scorer}.path: the model of {section}.model.path plays this role. Remove the key"


def _find_idle_store(config: Config) -> Iterator[str]:
    given, address = config.cluster.object_store_bytes, config.cluster.address
    if given is not None and address != "local":
        yield (
            f"cluster.object_store_bytes = {given}: cluster.address = {show(address)} is a cluster that has its own. "
            "Remove the key, and set it with ray start --object-store-memory"
        )


def _value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    if key not in config_keys(config.recipe):
        owner = type(config.algorithm).__name__
        raise ConfigError(f"{owner}.needs_keys: {show(key)} is not a key of this configuration. Remove it")
    if section == "roles":
        role, _, name = name.partition(".")
        return getattr(config.role(role), name)
    return getattr(getattr(config, section), name)


def apply_override(body: dict[str, Any], override: str) -> None:
    """Sets the key of a `--set` in the sections of a file.

    Raises:
        ConfigError: for one that is not `section.key=value`.
    """
    for key, value in read_overrides([override]).items():
        set_key(body, key, value, label=f"--set {show(hide_secrets(override))}")


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Values of `--set` by their keys; values as in TOML, bare words are strings.

    Raises:
        ConfigError: for one that is not `section.key=value`.
    """
    found: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        shown = show(hide_secrets(override))
        if equals and key.strip() == "evaluation":
            raise ConfigError(f"--set {shown}: is a list of tables. Write them as [[evaluation]] in the file")
        if not (equals and "." in key.strip(". ")):
            raise ConfigError(f"--set {shown}. Write it as section.key=value, such as run.seed=1")
        try:
            parsed = parse_toml(f"value = {text}", f"--set {shown}")
        except tomllib.TOMLDecodeError:
            parsed = {"value": text}
        if len(parsed) > 1:
            raise ConfigError(f"--set {shown}: it holds more than one value. Write one --set for each key")
        found[key.strip()] = parsed["value"]
    return found


def set_key(body: dict[str, Any], key: str, value: Any, *, label: str) -> None:
    """Sets `section.key` in the sections of a file.

    Args:
        body: the sections, which are changed.
        key: with dots between sections.
        value: as TOML has it, or a path or a scalar of NumPy.
        label: of messages.

    Raises:
        ConfigError: for a key without a section, or inside a value.
    """
    *tables, last = key.split(".")
    if not (tables and all(tables) and last):
        raise ConfigError(f"{label}: {show(key)} is not section.key, such as run.seed. Correct it")
    table = body
    for each in tables:
        table = table.setdefault(each, {})
        if isinstance(table, list):
            raise ConfigError(f"{label}: {shorten(each)} is a list. Set all of it, or change it in the file")
        if not isinstance(table, dict):
            raise ConfigError(f"{label}: {shorten(each)} is a value, not a section. Set it without .{last}")
    table[last] = with_plain_scalars(value)
