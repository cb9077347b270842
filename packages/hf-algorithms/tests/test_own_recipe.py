"""Recipes and roles: what is declared is checked, and a user's own are found."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.config import format_toml, load_config, parse_config
from hf_algorithms.recipes import ACTOR, CRITIC, RECIPES, PPOConfig, Recipe, Role
from hf_algorithms.workers import ActorWorker, CriticWorker
from hf_protocols import ConfigError

DATA = {"data": {"train": "rows.jsonl"}}

MODULE = """
from typing import Literal

from hf_algorithms import AlgorithmConfig, Recipe
from hf_algorithms.recipes import ACTOR, REWARD


class Config(AlgorithmConfig):
    name: Literal["mine"] = "mine"
    sharpness: float = 2.0


def step(roles, prompts, config, context):
    return []


MINE = Recipe(name="mine", config=Config, roles=(ACTOR, REWARD), step=step)
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """A file with a recipe, whose name no other test's module has."""
    before = set(sys.modules)
    path = tmp_path / f"mine_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(MODULE)
    yield path
    for name in sys.modules.keys() - before:
        del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


def make(*roles: Role, **changes: Any) -> Recipe:
    return Recipe(**{"name": "own", "config": PPOConfig, "roles": roles, "step": lambda *given: []} | changes)


def test_a_worker_is_a_class_or_its_name() -> None:
    assert ACTOR.load_worker() is ActorWorker
    assert Role(name="critic", worker=CriticWorker).load_worker() is CriticWorker
    for worker, message in {
        "no_such_module:Worker": "cannot be imported: No module named 'no_such_module'",
        "hf_algorithms.workers:Nobody": "cannot be imported: module",
        "hf_algorithms.workers": "cannot be imported",
        "math:pi": "is not a class. Name a Worker",
    }.items():
        with pytest.raises(ConfigError, match=f"^worker of role 'judge': '{worker}' {message}"):
            Role(name="judge", worker=worker).load_worker()


def test_roles_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^recipe 'own': it has two roles named 'actor'\. Rename one$"):
        make(ACTOR, ACTOR)
    with pytest.raises(ConfigError, match=r"^recipe 'own': the role 'a b' is not a name of Python"):
        make(Role(name="a b", worker="x:Y"))
    circle = [Role(name=name, worker="x:Y", starts_from=source) for name, source in ("ab", "bc", "ca")]
    with pytest.raises(ConfigError, match=r"^recipe 'own': the roles a, b, c start from one another"):
        make(*circle)
    with pytest.raises(ConfigError, match=r"^recipe 'own' has no role 'judge': its roles are actor, critic$"):
        make(ACTOR, CRITIC).role("judge")


@pytest.mark.parametrize("form", ["module", "file"])
def test_a_recipe_of_ones_own_has_its_own_keys(module: Path, form: str) -> None:
    reference = f"{module.stem}:MINE" if form == "module" else f"{module}:MINE"
    body = {**DATA, "algorithm": {"recipe": reference, "sharpness": 3.0}, "roles": {"actor": {"learning_rate": 1e-4}}}
    config = parse_config(body, search_path=[str(module.parent)])
    assert (config.recipe.name, config.recipe.model_roles) == ("mine", ("actor",))
    assert config.algorithm.model_dump() == {
        "name": "mine",
        "recipe": reference,
        "conventions": "ours",
        "epochs": 1,
        "mini_batches": 1,
        "sharpness": 3.0,
    }
    assert (config.role("actor").learning_rate, config.role("reward").learning_rate) == (1e-4, None)
    assert parse_config(tomllib.loads(format_toml(config))) == config


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"recipe": "{stem}:MINE", "name": "ppo"}, r"algorithm\.name = 'ppo': algorithm\.recipe = .* is named 'mine'"),
        ({"recipe": "{stem}:MINE", "gamma": 1.0}, r"unknown key 'algorithm\.gamma'\. \[algorithm\] has name, recipe"),
        ({"recipe": "{stem}:MINE", "sharpness": "a"}, r"algorithm\.sharpness = 'a': must be a number"),
        ({"recipe": "{stem}:YOURS"}, r"YOURS does not exist in .*\.py\. Define one|did you mean MINE"),
        ({"recipe": "{stem}:step"}, r"step is not a Recipe in .*\.py\. did you mean MINE"),
        ({"recipe": "{stem}"}, r"it does not name a recipe\. Write module:RECIPE or file\.py:RECIPE"),
        ({"recipe": "a-b:MINE"}, r"'a-b' is not a module's name"),
        ({"recipe": "no_such_module_here:MINE"}, r"there is no module 'no_such_module_here' on Python's path"),
        ({"recipe": "{folder}/absent.py:MINE"}, r"there is no file .*absent\.py\. Give the path of a Python file"),
        ({"recipe": "{folder}/math.py:MINE"}, r"another module is named 'math'"),
        ({"recipe": 3}, r"algorithm\.recipe = 3: must be a text"),
        ({"name": 3}, r"algorithm\.name = 3: there is no such algorithm"),
        ({"name": "pppo"}, r"algorithm\.name = 'pppo': there is no such algorithm\. did you mean 'ppo'\?"),
    ],
)
def test_a_recipe_that_cannot_be_had_is_one_line(module: Path, algorithm: dict[str, Any], message: str) -> None:
    (module.parent / "math.py").write_text(MODULE)
    if isinstance(reference := algorithm.get("recipe"), str):
        algorithm = {**algorithm, "recipe": reference.format(stem=module.stem, folder=module.parent)}
    with pytest.raises(ConfigError, match=message) as refused:
        parse_config({**DATA, "algorithm": algorithm}, search_path=[str(module.parent)])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('broken')", "import sys; sys.exit(3)", "def", "import nothing_here"]
)
def test_a_module_that_raises_is_one_line(module: Path, source: str) -> None:
    module.write_text(source)
    with pytest.raises(ConfigError, match=rf"^algorithm\.recipe = .*: its module raised .*{module.name}|No module"):
        parse_config({**DATA, "algorithm": {"recipe": f"{module}:MINE"}})


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"judge": {"path": "a"}}, r"^\[roles\.judge\]: recipe 'ppo' has no role 'judge': its roles are actor, critic"),
        ({"actor": {"lr": 1.0}}, r"^unknown key 'roles\.actor\.lr'\. \[roles\.actor\] has path, learning_rate, dtype$"),
        ({"actor": {"learning_rte": 1.0}}, r"did you mean 'roles\.actor\.learning_rate'\?"),
        ({"actor": {"learning_rate": -1.0}}, r"^roles\.actor\.learning_rate = -1\.0: must be above 0"),
        ({"reward": {"dtype": "bfloat16"}}, r"^roles\.reward\.dtype: the role reward of ppo holds no model"),
        ({"actor": 3}, r"^roles\.actor = 3: must be a table$"),
        (3, r"^roles = 3: must be a table$"),
    ],
)
def test_overrides_that_no_role_has_are_refused(roles: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**DATA, "roles": roles})


def test_overrides_are_read_from_a_file_and_by_command(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "a.jsonl"\n\n[roles.critic]\nlearning_rate = 0.5\n')
    config = load_config(path, ["roles.critic.dtype=bfloat16"])
    assert (config.role("critic").learning_rate, config.role("critic").dtype) == (0.5, "bfloat16")
    assert "[roles.critic]\nlearning_rate = 0.5\ndtype = " in format_toml(config)
    assert RECIPES["ppo"] is config.recipe
