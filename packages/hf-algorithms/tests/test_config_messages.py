"""Refusals of values and keys of a configuration, as a user reads them."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, PlainValidator, WrapValidator

from hf_algorithms.config import FOREIGN_KEYS, Config, ModelLoraConfig, config_keys, load_config, parse_config
from hf_algorithms.recipes import COMMAND_RECIPES, RECIPES
from hf_protocols import ConfigError

MINIMAL: dict[str, Any] = {"data": {"train": "rows.jsonl"}}
HUGE = 10**20


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("run.itertions", "run.iterations"),
        ("rollout.learning_rate", "warm_start.learning_rate"),
        ("algorithm.clip_hig", "algorithm.clip_high"),
        ("rolout", "rollout"),
        ("seed", "run.seed"),
        ("RUN", "run"),
        ("run.Seed", "run.seed"),
        ("training.max_grad_norm", "optimizer.max_grad_norm"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=f"unknown key '{key}': did you mean '{nearest}'"):
        parse_config({**MINIMAL, section: {name: 1}})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("run.resume", r"unknown key 'run.resume'. \[run\] has output_dir, seed, iterations, eval_every, executor, "),
        (
            "algorithm.xy",
            r"unknown key 'algorithm.xy'. \[algorithm\] has name, recipe, conventions, epochs, mini_batches, ",
        ),
        (
            "algorithm.baseline",
            r"'algorithm.baseline': a key of grpo, .* and others, not of this .*change algorithm.name$",
        ),
        ("algorithm.zest", r"unknown key 'algorithm.zest'. \[algorithm\] has name, recipe, conventions, "),
        ("run.batch_size", r"did you mean 'warm_start.batch_size' or 'rollout.batch_size'\?$"),
        ("wandb", r"unknown key 'wandb'. The sections are run, data, model, "),
    ],
)
def test_a_key_far_from_all_gets_no_misleading_hint(key: str, says: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=says):
        parse_config({**MINIMAL, section: {name: 1} if name else 1})


OURS = {
    "rollout.num_generations": "a key of TRL. Set 'rollout.samples_per_prompt' (8 by default there, 1 here)",
    "run.num_generations": "a key of TRL. Set 'rollout.samples_per_prompt' (8 by default there, 1 here)",
    "rollout.n": "a key of verl. Set 'rollout.samples_per_prompt'",
    "rollout.name": "a key of verl. Set 'rollout.backend'",
    "optimizer.lr": "a key of verl. Set 'optimizer.actor_learning_rate' or 'optimizer.critic_learning_rate'",
    "data.max_prompt_length": "a key of verl. Set 'data.max_prompt_tokens'",
    "rollout.max_prompt_length": "a key of TRL and verl. Set 'data.max_prompt_tokens'",
    "algorithm.beta": "a key of online_dpo, not of this algorithm. Remove it or change algorithm.name. "
    "The key of TRL is 'algorithm.kl_coefficient' (of GRPO and RLOO; that of DPO has the same name) here",
    "model.lora.r": "a key of TRL. Set 'model.lora.rank'",
    "model.lora.lora_alpha": "a key of TRL and verl. Set 'model.lora.alpha'",
    "trainer.save_freq": "a key of verl. Set 'run.checkpoint_every'",
    "actor_rollout_ref.actor.optim.lr": "a key of verl. Set 'optimizer.actor_learning_rate'",
    "critic.optim.lr": "a key of verl. Set 'optimizer.critic_learning_rate'",
    "algorithm.kl_ctrl.kl_coef": "a key of verl. Set 'algorithm.kl_coefficient'",
    "reward.custom_reward_function.path": "a key of verl. Set 'reward.function' ('file.py:function')",
    "algorithm.filter_groups.metric": "a key of verl. This algorithm lacks 'algorithm.filter_metric' (of 'dapo'). "
    "Remove it or change algorithm.name",
}


def nest(key: str) -> dict[str, Any]:
    """A configuration with this key."""
    body: Any = 1
    for part in reversed(key.split(".")):
        body = {part: body}
    return {**MINIMAL, **body, "data": {**MINIMAL["data"], **body.get("data", {})}}


@pytest.mark.parametrize("key", OURS)
def test_a_key_of_another_project_names_the_one_here(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(nest(key))
    assert str(raised.value) == f"unknown key '{key}': {OURS[key]}"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("trainer.colour", "unknown key 'trainer': did you mean 'training'?"),
        ("algorithm.num_batches", "unknown key 'algorithm.num_batches': did you mean 'algorithm.mini_batches'?"),
    ],
)
def test_a_key_of_no_project_has_its_usual_hint(key: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(nest(key))
    assert str(raised.value) == says


@pytest.mark.parametrize("key", ["run.epochs", "run.num_epochs", "training.epochs", "data.epoch", "epochs"])
@pytest.mark.parametrize(("command", "size"), [("sft", "algorithm"), ("train", "rollout")])
def test_epochs_are_counted_in_iterations(key: str, command: str, size: str) -> None:
    section, _, name = key.rpartition(".")
    body = {**MINIMAL, **({section: MINIMAL.get(section, {}) | {name: 3}} if section else {name: 3})}
    says = f"unknown key '{key}': .* iterations of '{size}.batch_size' rows. Set 'run.iterations'"
    with pytest.raises(ConfigError, match=says):
        parse_config(body, command=command)


@pytest.mark.parametrize("key", ["epochs", "mini_batches"])
@pytest.mark.parametrize("value", [2, "1", True, 1.0])
def test_updates_of_sft_are_counted_in_iterations(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} = .*: must be 1, .* raise run\.iterations"):
        parse_config({**MINIMAL, "algorithm": {key: value}}, command="sft")
    assert getattr(parse_config({**MINIMAL, "algorithm": {key: 1}}, command="sft").algorithm, key) == 1


def test_what_a_command_lacks_is_not_suggested() -> None:
    rows = {**MINIMAL, "training": {"per_device_train_batch_size": 4}}
    with pytest.raises(ConfigError, match=r"a key of TRL\. Set 'training\.micro_batch_tokens' "):
        parse_config(rows)
    with pytest.raises(
        ConfigError, match=r"Set 'algorithm\.batch_size' or 'training\.micro_batch_tokens' \(of 'sft', "
    ):
        parse_config(rows, command="sft")
    body = {**MINIMAL, "algorithm": {"epsilon": 0.2}}
    with pytest.raises(ConfigError, match=r"'algorithm\.epsilon': a key of TRL\. Set 'algorithm\.clip_low'$"):
        parse_config(body)
    with pytest.raises(ConfigError, match=r"'algorithm\.epsilon'\. \[algorithm\] has name, recipe, "):
        parse_config(body, command="sft")


def test_every_key_that_stands_for_another_exists() -> None:
    recipes = [recipe for found in COMMAND_RECIPES.values() for recipe in found.values()]
    known = {key for recipe in recipes for key in config_keys(recipe)}
    known |= {f"model.lora.{key}" for key in ModelLoraConfig.model_fields}
    ours = {each.ours for keys in FOREIGN_KEYS.values() for each in keys}
    assert len(ours) > 40 and sorted(ours - known) == []


def test_every_key_of_another_project_is_refused_with_ours() -> None:
    lacking = []
    for keys in FOREIGN_KEYS.values():
        for each in keys:
            found = [
                (command, name)
                for command, recipes in COMMAND_RECIPES.items()
                for name, recipe in recipes.items()
                if each.ours in config_keys(recipe) or each.ours.startswith("model.lora.")
            ]
            command, name = found[0]
            body = nest(each.name)
            body["algorithm"] = {"name": name, **body.get("algorithm", {})}
            with pytest.raises(ConfigError) as raised:
                parse_config(body, command=command)
            if f"unknown key '{each.name}': a key of " not in str(raised.value) or each.ours not in str(raised.value):
                lacking.append(f"{each.name}: {raised.value}")
    assert lacking == []


def test_no_key_of_another_project_is_listed_twice() -> None:
    for keys in FOREIGN_KEYS.values():
        names = [(each.name, each.ours) for each in keys]
        assert len(set(names)) == len(names) > 40


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, r"^data\.train is missing\. Set it in the configuration$"),
        ({"data": {}}, r"^data\.train is missing\. Set it in the configuration$"),
        ({**MINIMAL, "run": {"iterations": True}}, r"^run\.iterations = true: must be a whole number$"),
        ({**MINIMAL, "run": {"iterations": 0}}, r"run\.iterations = 0: must be at least 1$"),
        ({**MINIMAL, "run": {"executor": "slurm"}}, r"run\.executor = 'slurm': must be 'ray' or 'in_process'$"),
        ({**MINIMAL, "rollout": {"temperature": float("nan")}}, r"rollout\.temperature"),
        ({**MINIMAL, "rollout": {"temperature": 1e-9}}, r"rollout\.temperature = 1e-09: must be at least 1e-06$"),
        ({**MINIMAL, "rollout": {"batch_size": HUGE}}, r"rollout\.batch_size = 1.*0: must be at most 1048576$"),
        (
            {**MINIMAL, "rollout": {"samples_per_prompt": HUGE}},
            r"rollout\.samples_per_prompt = 1.*0: must be at most",
        ),
        (
            {**MINIMAL, "rollout": {"batch_size": 1 << 11, "samples_per_prompt": 513}},
            r"^rollout\.samples_per_prompt = 513: with rollout\.batch_size = 2048 .* 1048576 samples\. Lower rollout",
        ),
        (
            {**MINIMAL, "training": {"micro_batch_tokens": HUGE}},
            r"training\.micro_batch_tokens = 1.*0: must be at",
        ),
        ({**MINIMAL, "run": {"seed": HUGE}}, r"run\.seed = 1.*0: must be below 4611686018427387904$"),
        ({**MINIMAL, "run": 5}, r"^run = 5: must be a table$"),
        ({**MINIMAL, "run": {"seed": 1.5}}, r"^run\.seed = 1\.5: must be a whole number$"),
        ({**MINIMAL, "run": {"seed": "x" * 10_000}}, r"^run\.seed = 'x{76}\.\.\.: must be a whole number$"),
        ({**MINIMAL, "optimizer": {"betas": [0.5]}}, r"^optimizer\.betas\[1\] is missing"),
        ({**MINIMAL, "optimizer": {"betas": 0.5}}, r"^optimizer\.betas = 0\.5: must be a list$"),
        ({**MINIMAL, "model": {"path": 3}}, r"^model\.path = 3: must be a string, in quotes$"),
        (
            {**MINIMAL, "algorithm": {"name": "ppoo"}},
            r"^algorithm\.name = 'ppoo': is not an algorithm\. Did you mean 'ppo'",
        ),
        ({**MINIMAL, "x" * 10_000: 1}, r"^unknown key 'x{76}\.\.\."),
    ],
)
def test_a_bad_value_names_its_key(body: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(body)


@pytest.mark.parametrize("given", ["60m", -1, True, "none", 2.5, "1e-9s", [], None])
def test_a_key_of_several_kinds_has_one_line(given: object) -> None:
    rule = "must be 'auto', a number of iterations \\(0: never\\), or seconds such as '60s'"
    with pytest.raises(ConfigError, match=rf"^run.checkpoint_every = [^\n]*: {rule}$"):
        parse_config({**MINIMAL, "run": {"checkpoint_every": given}})
    with pytest.raises(ConfigError, match=r"^training.shared_prompts = [^\n]*: must be 'auto', true or false$"):
        parse_config({**MINIMAL, "training": {"shared_prompts": given if given is not True else 1}})


def test_keys_of_several_kinds_say_which() -> None:
    """pydantic has a message for each kind that a value is not, and names keys that users did not write."""
    sections: list[type[BaseModel]] = [Config, *(recipe.config for recipe in RECIPES.values())]
    seen: set[type[BaseModel]] = set()
    several = []
    while sections:
        section = sections.pop()
        if section in seen:
            continue
        seen.add(section)
        for key, field in section.model_fields.items():
            kinds = [each for each in get_args(field.annotation) if each is not type(None)]
            sections += find_models(field.annotation)
            if get_origin(field.annotation) in (Union, UnionType) and len(kinds) > 1:
                several.append(key)
                assert any(isinstance(each, PlainValidator | WrapValidator) for each in field.metadata), key
    assert {"checkpoint_every", "shared_prompts", "train"} <= set(several)


def find_models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for each in get_args(annotation) for found in find_models(each)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=-1", "run.seed = -1: must be at least 0"),
        ("run.seed=true", "run.seed = true: must be a whole number"),
        ('run.seed="1"', "run.seed = '1': must be a whole number"),
        ("run.iterations=1.0", "run.iterations = 1.0: must be a whole number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas[1] = 1: must be below 1.0"),
        ("algorithm.clip_low=1e300", "algorithm.clip_low = 1e+300: must be at most 1000000"),
        ("algorithm.kl_coefficient=1e39", "algorithm.kl_coefficient = 1e+39: must be at most 1000000"),
        ("optimizer.actor_learning_rate=1e39", "optimizer.actor_learning_rate = 1e+39: must be at most 1e+30"),
        ("cluster.machines=9007199254740992", "cluster.machines = 9007199254740992: must be at most 65536"),
        ("training.micro_batch_tokens=9007199254740992", "training.micro_batch_tokens = 9007199254740992: must be"),
        ('cluster.address=""', "cluster.address = '': must not be empty"),
        ("data.train.weight=2", "=2': train is a value, not a section. Set it without .weight"),
        ("evaluation.0.temperature=0.8", "=0.8': evaluation is a list. Set all of it, or change it in the file"),
        ("run.seed=1\nbad=2", "it holds more than one value. Write one --set for each key"),
    ],
)
def test_value_that_no_run_takes_names_its_key(tmp_path, override, message) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "rows.jsonl"\n[[evaluation]]\nname = "b"\n')
    with pytest.raises(ConfigError) as refused:
        load_config(path, [override])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.trackers=[tensorboard]", r"run\.trackers = '\[tensorboard\]': must be a list. Write it as \[\"text\"\]"),
        ("rollout.stop=###", r"rollout\.stop = '###': must be a list. Write it as \[\"text\"\]"),
        ('rollout.options={"a": 5}', r"rollout\.options = .*: must be a table. Write it as \{name = \"text\"\}"),
    ],
)
def test_a_list_without_quotes_is_shown_one(tmp_path: Path, override: str, says: str) -> None:
    (tmp_path / "c.toml").write_text('[data]\ntrain = "rows.jsonl"\n')
    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path / "c.toml", [override])


def test_thousands_of_unknown_keys_are_summed_up() -> None:
    body = {**MINIMAL, "run": {f"key_{number}": 1 for number in range(5000)}}
    with pytest.raises(ConfigError) as refused:
        parse_config(body)
    assert str(refused.value).endswith("and 4997 more") and len(str(refused.value)) < 2000
