"""Pages of docs/reference that scripts/reference_pages.py writes are what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import click
import pytest

from hf_algorithms.cli import cli
from hf_algorithms.config import config_keys
from hf_algorithms.recipes import COMMAND_RECIPES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "reference_pages.py"))
    written: dict[str, str] = script["write_pages"]()
    return written


def test_the_pages_are_what_the_script_writes(pages: dict[str, str]) -> None:
    differing = [name for name, text in pages.items() if (FOLDER / name).read_text() != text]
    assert differing == [], "run scripts/reference_pages.py"


def test_every_key_is_a_row_of_its_section(pages: dict[str, str]) -> None:
    parts = (part.split("`\n", 1) for part in pages["configuration.md"].split("\n## `")[1:])
    sections = {title.strip("[]"): text for title, text in parts}
    recipes = [recipe for found in COMMAND_RECIPES.values() for recipe in found.values()]
    for key in {key for recipe in recipes for key in config_keys(recipe)}:
        section, _, name = key.rpartition(".")
        title = "roles.NAME" if section.startswith("roles.") else section or name
        assert title in sections and (not section or f"\n| `{name}` | " in sections[title]), key


def test_every_command_and_option_is_there(pages: dict[str, str]) -> None:
    sections = dict(part.split("`\n", 1) for part in pages["commands.md"].split("# `hybridflow ")[1:])
    commands = {f"{group}{name}": command for group, name, command in _list_commands(cli, "")}
    assert commands.keys() == sections.keys()
    for name, command in commands.items():
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert [option.opts[0] for option in options if f"\n| `{option.opts[0]}" not in sections[name]] == []


def _list_commands(group: click.Group, prefix: str) -> list[tuple[str, str, click.Command]]:
    found = [(prefix, name, command) for name, command in group.commands.items()]
    inner = [(name, command) for _, name, command in found if isinstance(command, click.Group)]
    return [*found, *(each for name, command in inner for each in _list_commands(command, f"{prefix}{name} "))]


@pytest.mark.parametrize("name", ["configuration.md", "commands.md", "metrics.md", "keys-of-other-projects.md"])
def test_the_menu_has_the_page(name: str) -> None:
    assert f": reference/{name}\n" in (ROOT / "mkdocs.yml").read_text()
