"""Recipes and roles: what is declared is checked, and a user's own are found."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hf_algorithms import TrainingResult, derive_dataflow, train
from hf_algorithms.config import format_toml, load_config, parse_config
from hf_algorithms.recipes import (
    ACTOR,
    CRITIC,
    RECIPES,
    PPOConfig,
    Recipe,
    Role,
    StepContext,
    StepError,
    build_clip,
    generate_scored,
    train_by_scores,
)
from hf_algorithms.recipes._load import load_recipe
from hf_algorithms.roles import Roles
from hf_algorithms.workers import ActorWorker, CriticWorker
from hf_controller import Worker
from hf_engine import SamplingParams
from hf_protocols import DP, ConfigError, register

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
OTHER = Recipe(name="other", config=Config, roles=(ACTOR, REWARD), step=step)
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
    sys.path[:] = [folder for folder in sys.path if not Path(folder).is_relative_to(tmp_path)]


class OwnConfig(PPOConfig):
    """A section of one's own."""

    name: Literal["own"] = "own"  # type: ignore[assignment]


def make(*roles: Role, **changes: Any) -> Recipe:
    return Recipe(**{"name": "own", "config": OwnConfig, "roles": roles, "step": lambda *given: []} | changes)


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


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (3, r"3 is not a class\. Name a Worker"),
        (ActorWorker.__init__, r"is not a class\. Name a Worker"),
        (dict, r"<class 'dict'> is not a Worker\. Derive the class from hf_controller\.Worker"),
        ("{stem}:Other", r"is not a Worker\. Derive"),
        ("{stem}_raises:Other", r"cannot be imported: ZeroDivisionError: .*\n  at .*_raises\.py:1"),
    ],
)
def test_what_is_not_a_worker_is_refused_by_its_role(module: Path, worker: Any, message: str) -> None:
    module.write_text("class Other: ...")
    module.with_name(f"{module.stem}_raises.py").write_text("1 / 0")
    sys.path.append(str(module.parent))
    given = worker.format(stem=module.stem) if isinstance(worker, str) else worker
    own: Any = make(ACTOR, Role(name="judge", worker=given))
    with pytest.raises(ConfigError, match=f"^worker of role 'judge': .*{message}"):
        derive_dataflow(own, OwnConfig(), SamplingParams(max_new_tokens=4), num_prompts=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"starts_from": Path("models/judge")}, r"starts_from is PosixPath.*\. Give a role's name, or a directory"),
        ({"has_model": "yes"}, r"has_model is 'yes'\. Give True or False"),
        ({"kwargs": [("a", 1)]}, r"kwargs is \[\('a', 1\)\]\. Give a mapping"),
    ],
)
def test_a_role_of_wrong_parts_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^role 'judge': {message}"):
        Role(name="judge", worker="x:Y", **fields)


def test_roles_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^recipe 'own': it has two roles named 'actor'\. Rename one$"):
        make(ACTOR, ACTOR)
    with pytest.raises(ConfigError, match=r"^recipe 'own': the role 'a b' is not a name of Python"):
        make(Role(name="a b", worker="x:Y"))
    circle = [Role(name=name, worker="x:Y", has_model=True, starts_from=source) for name, source in ("ab", "bc", "ca")]
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
        ({"recipe": "{stem}:MINE", "gamma": 1.0}, r"'algorithm\.gamma': a key of ppo, .* and others, not of this algo"),
        ({"recipe": "{stem}:MINE", "wobble": 1.0}, r"unknown key 'algorithm\.wobble'\. \[algorithm\] has name, recipe"),
        ({"recipe": "{stem}:MINE", "sharpness": "a"}, r"algorithm\.sharpness = 'a': must be a number"),
        (
            {"recipe": "$DIR/absent.py:MINE"},
            r"does not exist\. Give .*\. Variables such as \$DIR are not replaced",
        ),
        ({"recipe": "{stem}:YOURS"}, r"YOURS does not exist in .*\.py\. Use one of MINE, OTHER$"),
        ({"recipe": "{stem}:step"}, r"step is not a Recipe in .*\.py\. Use one of MINE, OTHER$"),
        ({"recipe": "{stem}"}, r"it does not name a recipe\. Write module:RECIPE or file\.py:RECIPE"),
        ({"recipe": "a-b:MINE"}, r"'a-b' is not a module's name"),
        ({"recipe": "no_such_module_here:MINE"}, r"no module 'no_such_module_here' is on Python's path"),
        ({"recipe": "{folder}/absent.py:MINE"}, r"absent\.py does not exist\. Give the path of a Python file"),
        ({"recipe": "{folder}/math.py:MINE"}, r"another module is named 'math'"),
        ({"recipe": "{stem}:OTHER"}, r"it is named 'other', and its Config has the name 'mine'\. Write name: Literal"),
        ({"recipe": 3}, r"algorithm\.recipe = 3: must be a text"),
        ({"name": 3}, r"algorithm\.name = 3: is not an algorithm"),
        ({"name": "pppo"}, r"algorithm\.name = 'pppo': is not an algorithm\. Did you mean 'ppo'\?"),
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
def test_a_module_that_raises_is_named_with_its_place(module: Path, source: str) -> None:
    module.write_text(source)
    with pytest.raises(ConfigError, match=rf"(?s)^algorithm\.recipe = .*: its module raised .*{module.name}"):
        parse_config({**DATA, "algorithm": {"recipe": f"{module}:MINE"}})


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"judge": {"path": "a"}}, r"^\[roles\.judge\]: recipe 'ppo' has no role 'judge': its roles are actor, critic"),
        (
            {"actor": {"lr": 1.0}},
            r"^unknown key 'roles\.actor\.lr'\. \[roles\.actor\] has path, learning_rate, backend, dtype$",
        ),
        ({"actor": {"learning_rte": 1.0}}, r"did you mean 'roles\.actor\.learning_rate'\?"),
        ({"actor": {"learning_rate": -1.0}}, r"^roles\.actor\.learning_rate = -1\.0: must be above 0"),
        ({"reward": {"dtype": "bfloat16"}}, r"^roles\.reward\.dtype: the role reward of ppo holds no model"),
        (
            {"advantage": {"path": "a"}},
            r"^roles\.advantage\.path: the role advantage of ppo holds no model\. Remove the key",
        ),
        ({"reward": {"learning_rate": 1.0}}, r"^roles\.reward\.learning_rate: the role reward of ppo holds no model"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "its name must be a text that is not empty"),
        ({"config": {}}, r"config is \{\}\. Give a subclass of AlgorithmConfig"),
        ({"config": OwnConfig()}, "Give a subclass of AlgorithmConfig"),
        ({"config": dict}, "Give a subclass of AlgorithmConfig"),
        ({"roles": ACTOR}, r"Give a tuple of Role\(\.\.\.\)"),
        ({"roles": ("actor",)}, r"Give a tuple of Role\(\.\.\.\)"),
        ({"roles": (Role(name="groups", worker="x:Y"),)}, r"roles\.groups is a method\. Rename the role"),
        ({"roles": (Role(name="class", worker="x:Y"),)}, "the role 'class' is not a name of Python"),
        (
            {"roles": (ACTOR, RECIPES["ppo"].role("reward"), replace(CRITIC, starts_from="reward"))},
            "the role 'critic' starts from 'reward', which holds no model",
        ),
        ({"step": lambda roles: []}, r"step is not callable as step\(roles, prompts, config, context\): too many"),
        ({"step": 3}, "step is not callable"),
    ],
)
def test_a_recipe_of_wrong_parts_is_refused_where_it_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^recipe .*{message}"):
        make(**{"roles": (ACTOR,), **changes})


def run_step(step: Any, *, iteration: int = 1) -> list[Any]:
    context = StepContext(
        sampling=SamplingParams(max_new_tokens=4),
        iteration=iteration,
        state={},
        more_prompts=lambda num_prompts: None,  # type: ignore[arg-type, return-value]
        count_prompts_left=lambda: 0,
        pretrain_rows=lambda num_rows: None,  # type: ignore[arg-type, return-value]
    )
    own: Any = make(ACTOR, step=step)
    return own.run_step(Roles({}), None, OwnConfig(), context)


def test_numbers_of_a_step_become_floats() -> None:
    found = run_step(lambda *given: [{"a": np.float32(1.5), "b": True, "c": Fraction(1, 4)}])
    assert found == [{"a": 1.5, "b": 1.0, "c": 0.25}]
    assert {type(value) for value in found[0].values()} == {float}


@pytest.mark.parametrize("iteration", [0, 1])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda *given: [{1: 1.0}], r"returned \{1: 1\.0\}, which is not metrics"),
        (lambda *given: [{"a": "b"}], "which is not metrics"),
        (lambda *given: [{"iteration": 9.0}], "returned a metric named 'iteration', which the run writes"),
        (lambda *given: [{"time/mine": 9.0}], "returned a metric named 'time/mine', which the run writes"),
        (lambda *given: sys.exit(3), f"(?s)raised SystemExit: 3\n  at {__file__}:"),
        (lambda *given: [][1], f"(?s)raised IndexError: .*\n  at {__file__}:"),
        (lambda roles, *given: roles.actr.run(), r"roles\.actr: .* role of that name, its roles are none"),
    ],
)
def test_what_a_step_does_wrong_is_one_error(step: Any, message: str, iteration: int) -> None:
    with pytest.raises(StepError if iteration and "roles" not in message else ConfigError, match=message):
        run_step(step, iteration=iteration)


def test_an_error_below_a_step_names_the_steps_own_line() -> None:
    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Any:
        return [torch.zeros(2).reshape(3)]

    with pytest.raises(StepError, match=rf"\n  at {__file__}:\d+, in step: return \[torch"):
        run_step(step)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("find_contradictions = lambda self: 1 / 0", "find_contradictions raised ZeroDivisionError"),
        ("find_contradictions = lambda self: None", "find_contradictions raised TypeError"),
        ("find_contradictions = lambda self: [3]", r"find_contradictions gave \[3\]\. Let it yield texts"),
        ('needs_keys = ("reward.nope",)', r"needs_keys: 'reward\.nope' is not a key of this configuration"),
        ('sharp: int = "a"', r"algorithm\.sharp = 'a'"),
        (
            "_check = field_validator('epochs', mode='before')(lambda value: {}['absent'])",
            r"(?s)Config of recipe 'mine' raised KeyError: 'absent'\n  at .*\.py:\d+",
        ),
        ("sharp: complex = 1j", r"algorithm\.sharp = 1j: is of type complex, which TOML does not have"),
    ],
)
def test_a_section_that_cannot_be_checked_is_one_line(module: Path, config: str, message: str) -> None:
    module.write_text("from pydantic import field_validator\n" + MODULE.replace("sharpness: float = 2.0", config))
    with pytest.raises(ConfigError, match=message):
        parse_config({**DATA, "algorithm": {"recipe": f"{module}:MINE"}})


def test_a_step_that_trains_nothing_is_refused() -> None:
    own: Any = make(ACTOR, step=lambda *given: [])
    with pytest.raises(ConfigError, match="step of recipe 'own': it calls no role that has a model"):
        derive_dataflow(own, OwnConfig(), SamplingParams(max_new_tokens=4), num_prompts=2)


def test_a_role_that_only_measures_is_placed() -> None:
    usual = RECIPES["grpo"]
    stats = Role(name="stats", worker="hf_algorithms.workers:AdvantageWorker")

    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Any:
        batch = generate_scored(roles, prompts, context)
        return [*usual.step(roles, prompts, config, context), roles.stats.compute_metrics(batch)]

    own = replace(usual, roles=(*usual.roles, stats), step=step)
    flow = derive_dataflow(own, usual.config(), SamplingParams(max_new_tokens=4, n=2), num_prompts=2)
    assert [call.method for call in flow.calls if call.role == "stats"] == ["compute_metrics"]
    assert "compute_metrics" not in [call.method for call in flow.calls if call.role == "advantage"]


class Lead:
    """An estimator; those below lack a part of it."""

    reads = ("scores",)
    writes = ("advantages",)

    def __call__(self, columns: Any) -> dict[str, Any]:
        raise AssertionError("it is traced")


class UnreadLead:
    writes = ("advantages",)
    __call__ = Lead.__call__


class BareLead(Lead):
    def __call__(self) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError("it is never called")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (Lead, r"Lead: it is a class\. Pass an instance, Lead\(\.\.\.\)"),
        (UnreadLead(), r"UnreadLead: it has no attribute reads\. Set it to a tuple of the columns that it reads"),
        (BareLead(), r"BareLead: it cannot be called with columns: .*\. Define __call__\(self, columns\)"),
        (SimpleNamespace(reads=(), writes=("advantages",)), r"SimpleNamespace: .* cannot be called\. Give it a method"),
    ],
)
def test_what_is_not_an_estimator_is_refused_when_traced(estimator: Any, message: str) -> None:
    usual = RECIPES["grpo"]

    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Any:
        batch = generate_scored(roles, prompts, context)
        return train_by_scores(roles, batch, config, context, estimator, build_clip(config))

    own = replace(usual, step=step)
    with pytest.raises(ConfigError, match=f"advantage.compute_advantages: estimator {message}"):
        derive_dataflow(own, usual.config(), SamplingParams(max_new_tokens=4, n=2), num_prompts=2)


class PlainReward(Worker):
    """The least that a reward of one's own may be."""

    @register(protocol=DP, reads=("response_ids",), writes=("scores",))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        raise AssertionError("it is traced")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_a_plain_reward(name: str) -> None:
    """Such a worker does not take `is_counted`, which ReMax passes for its baseline."""
    usual = RECIPES[name]
    roles = tuple(replace(role, worker=PlainReward) if role.name == "reward" else role for role in usual.roles)
    sampling = SamplingParams(max_new_tokens=4, n=max(usual.config.least_samples, 1))
    needed = {"kl_coefficient": 0.0} if "kl_coefficient" in usual.config.model_fields else {}
    flows = [
        derive_dataflow(recipe, usual.config(**needed), sampling, num_prompts=2)
        for recipe in (usual, replace(usual, roles=roles))
    ]
    calls = [[(call.role, call.method, call.writes) for call in flow.calls] for flow in flows]
    assert calls[0] == calls[1]
    assert sum(method == "compute_reward" for _, method, _ in calls[1]) == (2 if name == "remax" else 1)


class JudgeWorker(Worker):
    """A worker of a user's own that builds its model from a directory."""

    def __init__(self, context: Any, *, model: str) -> None:
        super().__init__(context)

    @register(protocol=DP, reads=("response_ids",), writes=("costs",), kind="inference")
    def compute_cost(self, batch: TensorDict) -> TensorDict:
        raise AssertionError("nothing runs")


WORKERS = "hf_algorithms.workers"


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (
            Role(name="frozen", worker=f"{WORKERS}:ReferenceWorker"),
            r"^role 'frozen' of recipe 'own': its worker ReferenceWorker holds a model, .*\. Declare .* has_model=True",
        ),
        (Role(name="frozen", worker=CriticWorker), "its worker CriticWorker holds a model"),
        (
            Role(name="frozen", worker=f"{WORKERS}:AdvantageWorker", has_model=True),
            r"^role 'frozen' of recipe 'own': .* has_model=True, and its worker AdvantageWorker takes no model\. ",
        ),
        (Role(name="frozen", worker=f"{WORKERS}:RewardWorker", has_model=True), "RewardWorker takes no model"),
    ],
)
def test_a_role_whose_worker_contradicts_it_is_refused(role: Role, message: str) -> None:
    recipe = replace(RECIPES["ppo"], name="own", config=OwnConfig, roles=(*RECIPES["ppo"].roles, role))
    with pytest.raises(ConfigError, match=message):
        derive_dataflow(recipe, OwnConfig(), SamplingParams(max_new_tokens=4), num_prompts=8)


@pytest.mark.parametrize("has_model", [True, False])
def test_a_worker_of_ones_own_may_take_a_model(has_model: bool) -> None:
    role = Role(name="judge", worker=JudgeWorker, has_model=has_model)
    recipe = replace(RECIPES["ppo"], name="own", config=OwnConfig, roles=(*RECIPES["ppo"].roles, role))
    flow = derive_dataflow(recipe, OwnConfig(), SamplingParams(max_new_tokens=4), num_prompts=8)
    assert "judge" not in {call.role for call in flow.calls}


def test_a_recipe_stands_next_to_the_configuration(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = module.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    body = {**DATA, "algorithm": {"recipe": f"{module.name}:MINE"}}
    assert parse_config(body, search_path=[str(module.parent)]).recipe.name == "mine"


def test_a_role_that_is_not_trained_has_no_learning_rate() -> None:
    with pytest.raises(
        ConfigError, match=r"^roles\.reference\.learning_rate: the role reference of ppo is not trained"
    ):
        parse_config({**DATA, "roles": {"reference": {"learning_rate": 0.1}}})


@pytest.mark.parametrize("form", ["file", "module"])
def test_a_recipe_that_was_edited_is_loaded_again(module: Path, form: str) -> None:
    """As in a notebook, whose process goes on."""
    place = str(module) if form == "file" else module.stem
    found = []
    for sharpness in (1.5, 3.25, 3.25):
        module.write_text(MODULE.replace("= 2.0", f"= {sharpness}"))
        found.append(load_recipe(f"{place}:MINE", search_path=[str(module.parent)]))
    assert [each.config().sharpness for each in found] == [1.5, 3.25, 3.25]
    assert found[2] is found[1]


@pytest.mark.parametrize("form", ["file", "module"])
def test_a_recipe_is_not_taken_for_its_namesake(module: Path, form: str) -> None:
    for name in ("first", "second"):
        (module.parent / name).mkdir()
        (module.parent / name / module.name).write_text(MODULE)

    def load(name: str) -> Recipe:
        folder = module.parent / name
        place = str(folder / module.name) if form == "file" else module.stem
        return load_recipe(f"{place}:MINE", search_path=[str(folder)])

    assert load("first") is load("first")
    with pytest.raises(ConfigError, match=rf"another module is named .*, {module.parent}/first/.*. Rename the file"):
        load("second")


NEEDY = """
from dataclasses import replace
from hf_algorithms.recipes import RECIPES
from hf_controller import Worker
from hf_protocols import DP, register


class Needy(Worker):
    def __init__(self, context, sharpness):
        raise AssertionError("it is never made")

    @register(protocol=DP, reads=("response_ids",), writes=("scores",))
    def compute_reward(self, batch):
        raise AssertionError("it is traced")

    @register(protocol=DP, reads=("response_ids",), writes=("metric",))
    def compute_metric(self, batch):
        raise AssertionError("it is traced")
    #configure


USUAL = RECIPES["grpo"]
ROLES = tuple(replace(role, worker=Needy, scored_by=None) if role.name == "reward" else role for role in USUAL.roles)
MINE = replace(USUAL, roles=ROLES)
"""
CONFIGURE = "\n    @classmethod\n    def configure(cls, setup):\n        return "


def train_here(module: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TrainingResult:
    monkeypatch.chdir(module.parent)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, "max_positions": 32}
    usual = {"executor": "in_process", "iterations": 1}
    return train(
        {"tokenizer": "characters", **sizes},
        [{"prompt": "1+1=", "answer": "2"}] * 4,
        algorithm=f"{module.name}:MINE",
        config={"run": usual | changes, "rollout": {"batch_size": 2, "samples_per_prompt": 2, "max_new_tokens": 4}},
    )


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        ("", r"Needy\.__init__ needs sharpness\. Pass it in kwargs of the role, or return it from Needy\.configure$"),
        ("setup.sharpness", r"Needy\.configure raised AttributeError: .*\n  at .*\.py:\d+, in configure: return"),
        ("None", r"Needy\.configure returned None\. Return a mapping of the constructor's arguments$"),
    ],
)
def test_arguments_that_no_worker_gets_are_named(
    module: Path, monkeypatch: pytest.MonkeyPatch, configure: str, message: str
) -> None:
    """Before anything starts: no file of a run is left."""
    module.write_text(NEEDY.replace("#configure", CONFIGURE + configure if configure else ""))
    with pytest.raises(ConfigError, match=f"(?s)^role 'reward': {message}"):
        train_here(module, monkeypatch)
    assert not (module.parent / "runs").exists()


KEEPING = """
from dataclasses import replace
import torch
from hf_algorithms.recipes import RECIPES


def step(roles, prompts, config, context):
    if context.iteration >= {first}:
        context.state[{key}] = {value}
    return RECIPES["grpo"].step(roles, prompts, config, context)


MINE = replace(RECIPES["grpo"], step=step)
"""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "'mean'",
            "torch.ones(2)",
            r"context\.state\['mean'\] = tensor.*: a checkpoint keeps numbers, .*as one of these$",
        ),
        ("7", "1.0", r"context\.state\[7\]: a checkpoint keeps values by texts\. Make the key a text$"),
    ],
)
def test_a_state_that_no_commit_keeps_is_named(
    module: Path, monkeypatch: pytest.MonkeyPatch, first: int, key: str, value: str, message: str
) -> None:
    """Before anything starts, if the step of a dataflow that is derived shows it. JSON would make a text of 7."""
    module.write_text(KEEPING.format(first=first, key=key, value=value))
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        train_here(module, monkeypatch, checkpoint_every=1)
    assert not getattr(refused.value, "__notes__", [])
    assert (module.parent / "runs").exists() == bool(first)
    if first == 0:
        assert train_here(module, monkeypatch, checkpoint_every=0).summary["status"] == "finished"
