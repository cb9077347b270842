"""`hybridflow config` and `hybridflow algorithms`: every key is documented, and what is printed reads back."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from pydantic import BaseModel

from hf_algorithms import cli
from hf_algorithms.config import (
    Config,
    EvaluationConfig,
    RoleConfig,
    config_keys,
    describe_keys,
    load_config,
    parse_config,
)
from hf_algorithms.recipes import RECIPES

MODULE = '''"""Mine: twice as sharp.

More of it.
"""
from typing import Literal

from hf_algorithms import AlgorithmConfig, Recipe
from hf_algorithms.recipes import ACTOR, REWARD


class Config(AlgorithmConfig):
    name: Literal["mine"] = "mine"
    sharpness: float = 2.0
    """How sharp: 0 is
    blunt."""
    plain: int | None = None


def step(roles, prompts, config, context):
    return []


MINE = Recipe(name="mine", config=Config, roles=(ACTOR, REWARD), step=step)
'''

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hybridflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs the command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hybridflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capsys.readouterr()
        return int(cast("int | None", ended.value.code) or 0), output, errors

    return run


def printed(hybridflow: Command, *arguments: object) -> str:
    code, output, errors = hybridflow("config", *arguments)
    assert (code, errors) == (0, "")
    return output


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_of_an_algorithm_is_documented(name: str) -> None:
    sections = {key: cast("type[BaseModel]", field.annotation) for key, field in Config.model_fields.items()}
    sections |= {"algorithm": RECIPES[name].config, "roles": RoleConfig, "evaluation": EvaluationConfig}
    silent = {
        f"{section}.{key}"
        for section, model in sections.items()
        for key, meaning in describe_keys(model).items()
        if not re.fullmatch(r".{10,}\.", meaning)
    }
    assert silent == set()


@pytest.mark.parametrize("name", RECIPES)
def test_a_starting_file_reads_back_and_shows_every_key(name: str, hybridflow: Command, tmp_path: Path) -> None:
    text = printed(hybridflow, "--algorithm", name, "--model", "my/model", "--data", "rows.jsonl")
    file = tmp_path / "config.toml"
    file.write_text(text)
    config = load_config(file)
    assert (config.algorithm.name, config.model.path, config.data.train) == (name, "my/model", "rows.jsonl")
    assert config.recipe.config.least_samples <= config.rollout.samples_per_prompt
    assert config.rollout.samples_per_prompt <= (config.recipe.config.most_samples or 8)
    assert printed(hybridflow, file) == text
    sizes = {"hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions"}  # of a fresh model only
    shown: set[str] = set()
    section, above = "", ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(?:# )?\[{1,2}([\w.]+)\]{1,2}", line):
            section = match[1]
        elif match := re.match(r"(?:# )?(\w+) =", line):
            assert above.startswith("# "), line
            shown.add(f"{section}.{match[1]}")
        above = line
    without_model = {role.name for role in config.recipe.roles if not role.has_model}
    expected = {key for key in config_keys(config.recipe) if key.split(".")[1] not in without_model}
    assert shown == expected - {f"model.{size}" for size in sizes}


def test_a_file_is_resolved_with_its_overrides(hybridflow: Command, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[data]\ntrain = "a \\"b\\".jsonl"\n[roles.critic]\nlearning_rate = 0.5\n')
    text = printed(hybridflow, file, "--set", "run.seed=3", "--model", 'odd "name"')
    body = tomllib.loads(text)
    assert (body["data"]["train"], body["run"]["seed"], body["model"]["path"]) == ('a "b".jsonl', 3, 'odd "name"')
    assert body["roles"] == {"critic": {"learning_rate": 0.5}}
    assert parse_config(body) == load_config(file, ["run.seed=3", 'model.path=odd "name"'])
    assert "[roles.critic]\n" in text
    assert "# [roles.actor]\n" in text
    with_options = printed(hybridflow, file, "--set", 'rollout.options={"a b" = [1, {c = true}]}')
    assert parse_config(tomllib.loads(with_options)).rollout.options == {"a b": [1, {"c": True}]}


def test_the_algorithm_of_a_file_is_replaced(hybridflow: Command, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[data]\ntrain = "a.jsonl"\n[algorithm]\nrecipe = "absent:MINE"\nkl_coefficient = 0.5\n')
    body = tomllib.loads(printed(hybridflow, file, "--algorithm", "remax", "--data", "b.jsonl"))
    assert (body["algorithm"]["name"], body["algorithm"]["kl_coefficient"], body["data"]["train"]) == (
        *("remax", 0.5, "b.jsonl"),
    )


def test_without_a_file_there_is_one_to_start_from(hybridflow: Command) -> None:
    config = parse_config(tomllib.loads(printed(hybridflow)))
    assert (config.algorithm.name, config.data.train, config.model.tokenizer) == ("ppo", "train.jsonl", "bpe")
    safe = tomllib.loads(printed(hybridflow, "--algorithm", "safe_rlhf", "--set", "cost.function=mine:cost"))
    assert safe["cost"]["function"] == "mine:cost"
    distillation = tomllib.loads(printed(hybridflow, "--algorithm", "distillation"))
    assert distillation["roles"] == {"teacher": {"path": "path/to/teacher"}}


def test_an_algorithm_of_ones_own_is_shown_with_its_docstrings(hybridflow: Command, tmp_path: Path) -> None:
    file = tmp_path / "my_sharp_recipe.py"
    file.write_text(MODULE)
    try:
        text = printed(hybridflow, "--algorithm", f"{file}:MINE")
        assert "# How sharp: 0 is blunt.\nsharpness = 2.0\n" in text
        assert parse_config(tomllib.loads(text)).recipe.summary == "Mine: twice as sharp."
    finally:
        sys.modules.pop(file.stem, None)
    assert "# plain =\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "grpoo"], "algorithm.name = 'grpoo': is not an algorithm. Did you mean 'grpo'?"),
        (["--algorithm", "absent.py:MINE"], "absent.py does not exist. Give the path of a Python file"),
        (["--set", "run.sead=1"], "unknown key 'run.sead': did you mean 'run.seed'?"),
        (["--set", "run.seed"], "--set 'run.seed'. Write it as section.key=value"),
        (["--algorithm", "grpo", "--set", "algorithm.gamma=1"], "unknown key 'algorithm.gamma'"),
        (["absent.toml"], "absent.toml"),
        (["broken.toml"], "broken.toml is not valid TOML"),
        (["other.toml", "--algorithm", "safe_rlhf"], "cost.function or [cost.model] is missing"),
    ],
)
def test_what_train_refuses_is_refused_alike(
    arguments: list[str], message: str, hybridflow: Command, tmp_path: Path
) -> None:
    (tmp_path / "broken.toml").write_text("[data")
    (tmp_path / "other.toml").write_text('[data]\ntrain = "a.jsonl"\n')
    code, output, errors = hybridflow("config", *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("Error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_the_family_is_listed(hybridflow: Command) -> None:
    code, output, _ = hybridflow("algorithms")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(RECIPES)
    assert "DAPO: GRPO with a higher upper clip" in output
    code, output, _ = hybridflow("algorithms", "--json")
    found = json.loads(output)
    assert code == 0
    assert [each["name"] for each in found] == list(RECIPES)
    assert all(each["summary"].endswith(".") and "\n" not in each["summary"] for each in found)
    assert found[0]["roles"] == ["actor", "critic", "reference", "reward", "advantage"]


def test_a_key_that_is_switched_off_reads_back(hybridflow: Command) -> None:
    off = printed(hybridflow, "--set", "algorithm.value_clip=none", "--set", "algorithm.log_ratio_clamp=none")
    algorithm = parse_config(tomllib.loads(off)).algorithm
    assert (algorithm.value_clip, algorithm.log_ratio_clamp) == (None, None)  # type: ignore[attr-defined]
    assert '"none" switches it off.' in off
