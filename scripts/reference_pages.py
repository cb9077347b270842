"""Write four pages of docs/reference from the code; --check compares.

Keys, defaults and meanings in configuration.md are those of `hf_algorithms.config` and of the recipes, commands and
options in commands.md those that `hybridflow` has, metrics those of `hf_algorithms.report`. keys-of-other-projects.md
has the keys by which messages name those of TRL and verl.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hf_algorithms.cli import cli
from hf_algorithms.config import FOREIGN_KEYS, Config, describe_keys
from hf_algorithms.recipes import COMMAND_RECIPES, AlgorithmConfig
from hf_algorithms.report import METRIC_MEANINGS
from hf_protocols.paths import expand_path
from hf_protocols.toml import format_toml_value

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference_pages.py; edit the docstrings of the code. -->\n\n"
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
TYPES = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", dict: "table", Any: "any"}
SANE = 1e5
"""Bounds above it keep numbers in range and are of no interest to a reader."""

CONFIGURATION = """# Configuration

After this page you know every key of a run's TOML file. `hybridflow config` prints a file to start from, with these
meanings as comments; `--set SECTION.KEY=VALUE` overrides a key of a file. An unknown key is refused with the nearest
one that exists. A key without a default may be left out unless it is *required*. Relative paths start where the command
runs, and `~` is the home directory.

"""
ALGORITHM = """## `[algorithm]`

`name` or `recipe` chooses the algorithm, which has those of these keys that mean something for it.
[Algorithms](../algorithms/index.md) has a page for each, with its own defaults. A default that is not the same in all
of them reads *differs*.

| key | type | default | meaning | of |
|---|---|---|---|---|
"""
COMMANDS = """# Commands

After this page you know the commands of `hybridflow` and their options. `hybridflow COMMAND --help` prints the same.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | refused before anything was made |
| 129, 130, 143 | ended by SIGHUP, by Ctrl-C, by SIGTERM |

"""
METRICS = """# Metrics

After this page you know what each number of `metrics.jsonl` means. The file has one line for each iteration;
trackers, `watch` and `serve` show the same names. [If a number leaves its
band](../how-to/watch-a-run.md#if-a-number-leaves-its-band) says what to do.

- A mean over tokens is the sum over all micro-batches, ranks and updates of an iteration, divided by the number of all
  their tokens; other means likewise. A name that ends in `_max` has the largest value.
- What nothing was counted for is left out.
- A trained token is one that the loss counts.
- `ROLE` is a role that learns, such as `actor` or `critic`; `NAME` a function of the reward; `SET`, `METRIC` and `K`
  those of an evaluation.
- Losses, recipes and rewards of your own add names of their own.
"""
FOREIGN = """# Keys of TRL and verl

After this page you can write a configuration that you know from TRL or verl. An unknown key with one of these names is
refused with the key that stands for it here.

- `algorithm.conventions = "trl"` or `"verl"` sets how losses and advantages are computed; see
  [Conventions of other projects](conformance.md).
- Reward functions of both projects [work unchanged](reward-conventions.md), and so do their [columns](data-formats.md).
- `temperature`, `top_p`, `top_k`, `seed`, `weight_decay`, `max_grad_norm`, `gamma` and `attn_implementation` have the
  same names.
- Tensor parallelism, offloading and the GPUs of each model are not keys. [A
  plan](../how-to/plan-and-train-by-a-plan.md) has them, which is found for you, or which you write.
- `hybridflow train --resume RUN` goes on with a run; no key does.

The names are those of TRL 1.16.0 and verl 0.9.1, and of peft for adapters.
"""


def write_pages() -> dict[str, str]:
    """The text of each page, by the file's name."""
    return {
        "configuration.md": write_configuration(),
        "commands.md": write_commands(),
        "metrics.md": write_metrics(),
        "keys-of-other-projects.md": write_foreign_keys(),
    }


def write_foreign_keys() -> str:
    """A table for each project."""
    parts = [NOTE + FOREIGN]
    for project, keys in FOREIGN_KEYS.items():
        rows = "".join(f"| `{each.name}` | `{each.ours}` | {escape(each.note)} |\n" for each in keys)
        parts.append(f"## {project}\n\n| there | here | difference |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def write_metrics() -> str:
    """A table for each part of a run."""
    parts = [NOTE + METRICS]
    for title, meanings in METRIC_MEANINGS.items():
        rows = "".join(f"| `{name}` | {escape(meaning)} |\n" for name, meaning in meanings.items())
        parts.append(f"## {title}\n\n| metric | meaning |\n|---|---|\n{rows}")
    return "\n".join(parts)


def write_configuration() -> str:
    """Every section in the order of a file."""
    parts = [NOTE + CONFIGURATION]
    for name, field in Config.model_fields.items():
        if name == "algorithm":
            parts.append(ALGORITHM + "".join(write_algorithm_keys()) + "\n")
        else:
            parts += write_sections(name, field.annotation)
    return "".join(parts).rstrip() + "\n"


def write_sections(name: str, annotation: Any) -> Iterator[str]:
    """The section of a key whose value is a table, or several, and then those inside it."""
    for title, model in find_models(name, annotation):
        rows = "".join(f"| {' | '.join(row)} |\n" for row in write_keys(model))
        yield f"## `{title}`\n\n{describe_section(model)}\n\n{HEAD}{rows}\n"
        inner = title.strip("[]")
        for key, field in model.model_fields.items():
            yield from write_sections(f"{inner}.{key}", field.annotation)


def find_models(name: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The tables that a type holds, with their headings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield f"[{name}]", annotation
        return
    origin, parts = get_origin(annotation), get_args(annotation)
    for part in parts:
        for title, model in find_models(name, part):
            inner = title.strip("[]")
            if origin in (tuple, list):
                yield f"[[{inner}]]", model
            elif origin is dict:
                yield f"[{inner}.NAME]", model
            else:
                yield title, model


def describe_section(model: type[BaseModel]) -> str:
    """The docstring of a class, less the names of its tables."""
    text = " ".join((model.__doc__ or "").split())
    text = re.sub(r"^`\[.*?\]`(?:(?:, | and )`\[.*?\]`)*: ", "", text)
    return text[:1].upper() + text[1:]


def write_keys(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """The cells of every key."""
    for key, meaning in describe_keys(model).items():
        field = model.model_fields[key]
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        known = f" One of {', '.join(map(str, values))}."  # the type says that here
        yield f"`{key}`", describe_type(field), describe_default(field), escape(meaning.replace(known, ""))


def write_algorithm_keys() -> Iterator[str]:
    """A row for each key that any recipe has, or several where it does not mean the same in all."""
    configs = {name: recipe.config for recipes in COMMAND_RECIPES.values() for name, recipe in recipes.items()}
    keys: dict[str, dict[str, dict[str, tuple[str, str, str, str]]]] = {}
    for name, config in configs.items():
        for row in write_keys(config):
            keys.setdefault(row[0], {}).setdefault(row[3], {})[name] = row
    for key, meanings in keys.items():
        for meaning, found in meanings.items():
            cells = key, *describe_algorithm_key(key, meaning, found), list_owners(found, configs)
            yield f"| {' | '.join(cells)} |\n"


def describe_algorithm_key(key: str, meaning: str, found: dict[str, tuple[str, str, str, str]]) -> tuple[str, str, str]:
    """Type, default and meaning of a key that these recipes have; `found` has the cells of each."""
    if key == "`name`":
        return "text", '`"ppo"`', describe_keys(AlgorithmConfig)["name"] or "Name of a shipped algorithm."
    defaults = {row[2] for row in found.values()}
    kind = max((row[1] for row in found.values()), key=len)  # some allow fewer values
    return kind, defaults.pop() if len(defaults) == 1 else "*differs*", meaning


def list_owners(found: Collection[str], every: Collection[str]) -> str:
    """Names of the recipes that have a key, or of those that do not where these are fewer."""
    if len(found) == len(every):
        return "all"
    if 2 * len(found) > len(every):
        return "all but " + ", ".join(f"`{name}`" for name in every if name not in found)
    return ", ".join(f"`{name}`" for name in found)


def describe_type(field: FieldInfo) -> str:
    """Describes the values that a key takes, in a few words."""
    return escape(_describe(field.annotation, field.metadata))


def _describe(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        first, *rest = get_args(annotation)
        inner = [each for part in rest for each in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _describe(first, [*inner, *metadata])
    origin, parts = get_origin(annotation), [part for part in get_args(annotation) if part is not type(None)]
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe(part, metadata) for part in parts))
    if origin is Literal:
        return ", ".join(f"`{format_toml_value(value)}`" for value in parts)
    if origin in (tuple, list):
        kinds = list(dict.fromkeys(_describe(part, []) for part in parts if part is not ...))
        return f"list of {' or '.join(kind if ',' in kind else f'{kind}s' for kind in kinds)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if any(isinstance(each, AfterValidator) and each.func is expand_path for each in metadata):
        return "path"
    kind = TYPES.get(origin or annotation, "text")
    return ", ".join([kind, *describe_bounds(metadata)])


def describe_bounds(metadata: list[Any]) -> Iterator[str]:
    """Limits of a number."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for each in metadata:
        for name, word in words.items():
            bound = getattr(each, name, None)
            if bound is not None and abs(bound) <= SANE:
                yield f"{word} {bound:g}"


def describe_default(field: FieldInfo) -> str:
    """The default as TOML; empty where a key is left out."""
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return escape(f"`{format_toml_value(list(value) if isinstance(value, tuple) else value)}`")


def escape(text: str) -> str:
    """A text inside a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def write_commands() -> str:
    """Every command of `hybridflow`, with those inside it after it."""
    return (NOTE + COMMANDS + "\n".join(describe_command(cli, "hybridflow"))).rstrip() + "\n"


def describe_command(command: click.Command, name: str) -> Iterator[str]:
    """Heading, help, usage and options of a command, and of the commands of a group."""
    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        if name != "hybridflow":
            yield f"## `{name}`\n\n{describe_help(command)}\n"
        for each in sorted(command.commands):
            yield from describe_command(command.commands[each], f"{name} {each}")
        return
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{'##' if name.count(' ') < 2 else '###'} `{name}`\n\n{describe_help(command)}\n"
    yield f"```text\n{name} {usage}\n```\n"
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        rows = "".join(describe_option(each, context) for each in options)
        yield f"| option | default | meaning |\n|---|---|---|\n{rows}"


def describe_help(command: click.Command) -> str:
    """The docstring of a command, a paragraph a line."""
    paragraphs = (command.help or "").replace("\b", "").strip().split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def describe_option(option: click.Option, context: click.Context) -> str:
    """A row of the table of options."""
    value = "" if option.is_flag else f" {option.make_metavar(context).removesuffix(' RANGE')}"
    if isinstance(option.type, click.Choice):
        value = f" {{{','.join(map(str, option.type.choices))}}}"
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    default = option.get_default(context, call=False)
    is_shown = not option.is_flag and not option.multiple and isinstance(default, str | int | float | Path)
    shown = f"`{default}`" if is_shown else "*required*" if option.required else ""
    words = [option.help or "", "Repeatable." if option.multiple and "repeatable" not in (option.help or "") else ""]
    return f"| {escape(names)} | {shown} | {escape(' '.join(filter(None, words)))} |\n"


def main() -> None:
    """Write the pages, or compare them."""
    pages = write_pages()
    if sys.argv[1:] == ["--check"]:
        there = {name: (FOLDER / name).read_text() for name in pages if (FOLDER / name).exists()}
        sys.exit(0 if there == pages else "docs/reference differs: run scripts/reference_pages.py")
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
