"""Reading configurations: what is wrong is named, with the nearest thing that would be right."""

from __future__ import annotations

import tomllib
from math import inf
from pathlib import Path

import pytest

from hf_algorithms.config import Config, config_keys, format_toml, load_config, parse_config
from hf_algorithms.placement import check_rollout_options
from hf_protocols import ConfigError

MINIMAL = {"data": {"train": "rows.jsonl"}}
HUGE = 10**20


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_at_most_60_keys() -> None:
    assert len(config_keys()) == len(set(config_keys())) <= 60


def test_a_resolved_configuration_reads_back_as_itself() -> None:
    config = parse_config({**MINIMAL, "run": {"seed": 3}, "data": {"train": 'odd "name"\\ and\ttab.jsonl'}})
    assert parse_config(tomllib.loads(format_toml(config))) == config


def test_options_of_a_rollout_backend_are_a_table_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, '[data]\ntrain = "a.jsonl"\n[rollout.options]\ncache_bytes = 9\n')
    config = load_config(path, ["rollout.options.dtype=bfloat16", "rollout.options.engine_options={a = [1, true]}"])
    assert config.rollout.options == {"cache_bytes": 9, "dtype": "bfloat16", "engine_options": {"a": [1, True]}}
    assert parse_config(tomllib.loads(format_toml(config))) == config


@pytest.mark.parametrize(("name", "hint"), [("cache_byte", "did you mean 'cache_bytes'"), ("seed", "it takes dtype")])
def test_an_option_that_the_rollout_backend_does_not_take_is_named(name: str, hint: str) -> None:
    config = parse_config({**MINIMAL, "rollout": {"options": {name: 1}}})
    with pytest.raises(ConfigError, match=rf"rollout\.options\.{name}: backend 'transformers' has no .*; {hint}"):
        check_rollout_options(config.rollout)


@pytest.mark.parametrize(
    ("backend", "option", "wanted"),
    [
        ("transformers", {"cache_bytes": "1 GiB"}, "cache_bytes = '1 GiB': .*integer"),
        ("transformers", {"cache_bytes": True}, "cache_bytes = True: .*integer"),
        ("transformers", {"dtype": "bf16"}, "dtype = 'bf16': .*'float32', 'bfloat16' or 'float16'"),
        ("server", {"urls": "http://127.0.0.1:1"}, "urls = 'http://127.0.0.1:1': .*Sequence"),
        ("server", {"urls": ["http://127.0.0.1:1"], "weights_directory": 3}, "weights_directory = 3: .*string"),
        ("server", {"urls": [], "timeout_s": "60"}, "timeout_s = '60': .*number"),
    ],
)
def test_an_option_of_another_kind_is_refused(backend: str, option: dict[str, object], wanted: str) -> None:
    config = parse_config({**MINIMAL, "rollout": {"backend": backend, "options": option}})
    with pytest.raises(ConfigError, match=rf"rollout\.options\.{wanted}"):
        check_rollout_options(config.rollout)


LOCAL, FAR = "http://127.0.0.1:1", "http://far.example:1"


@pytest.mark.parametrize(
    ("backend", "options", "wanted"),
    [
        ("transformers", {"cache_bytes": 9, "cache_fraction": 0.5}, "cache_bytes=9 and cache_fraction=0.5 both size"),
        ("transformers", {"cache_bytes": 0}, "cache_bytes=0 must be a whole number of at least 1"),
        ("transformers", {"cache_fraction": 2}, "cache_fraction=2: give a share of the memory above 0 and below 1"),
        ("server", {}, r"urls=\(\): give a list of 1 or more URLs"),
        ("server", {"urls": []}, r"urls=\[\]: give a list of 1 or more URLs"),
        ("server", {"urls": [LOCAL, "localhost"]}, "urls: 'localhost' is no URL; give one such as"),
        ("server", {"urls": [LOCAL], "timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ("server", {"urls": [LOCAL], "connect_timeout_s": inf}, "connect_timeout_s=inf must be a finite number"),
        ("server", {"urls": [LOCAL, FAR]}, f"the server at {FAR} may be on .* give rollout.options.weights_directory"),
    ],
)
def test_a_value_that_is_wrong_on_any_machine_is_refused(backend: str, options: dict[str, object], wanted: str) -> None:
    config = parse_config({**MINIMAL, "rollout": {"backend": backend, "options": options}})
    with pytest.raises(ConfigError, match=rf"rollout\.options of backend '{backend}': {wanted}"):
        check_rollout_options(config.rollout)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("transformers", {}),
        ("transformers", {"cache_bytes": 1 << 60}),  # above this machine's memory, which need not be the run's
        ("transformers", {"cache_fraction": 0.5, "dtype": "bfloat16"}),
        ("server", {"urls": [LOCAL], "timeout_s": 60, "reproducible": False}),
        ("server", {"urls": [FAR], "weights_directory": "/shared"}),
    ],
)
def test_good_options_are_taken(backend: str, options: dict[str, object]) -> None:
    check_rollout_options(parse_config({**MINIMAL, "rollout": {"backend": backend, "options": options}}).rollout)


def test_a_backend_that_checks_no_options_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        @classmethod
        def build(cls, model: str, *, topology: object, seed: int = 0, cache_bytes: int = 1) -> None: ...

    monkeypatch.setattr("hf_algorithms.placement.load_rollout_backend", lambda name: Elsewhere)
    check_rollout_options(parse_config({**MINIMAL, "rollout": {"options": {"cache_bytes": 0}}}).rollout)


def test_a_batch_may_have_as_many_samples_as_the_bound() -> None:
    rollout = parse_config({**MINIMAL, "rollout": {"batch_size": 1 << 10, "samples_per_prompt": 1 << 10}}).rollout
    assert rollout.batch_size * rollout.samples_per_prompt == 1 << 20


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    path = write(tmp_path, '[data]\ntrain = "a.jsonl"\n[run]\nseed = 1\n')
    config = load_config(path, ["run.seed=7", "data.train=b.jsonl", "optimizer.betas=[0.8, 0.9]"])
    assert (config.run.seed, config.data.train, config.optimizer.betas) == (7, "b.jsonl", (0.8, 0.9))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("run.itertions", "run.iterations"),
        ("rollout.learning_rate", "warm_start.learning_rate"),
        ("algorithm.clip", "algorithm.clip_range"),
        ("rolout", "rollout"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=f"unknown key '{key}': did you mean '{nearest}'"):
        parse_config({**MINIMAL, section: {name: 1}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, r"data is missing"),
        ({"data": {}}, r"data\.train is missing"),
        ({**MINIMAL, "run": {"iterations": 0}}, r"run\.iterations = 0: .*greater than or equal to 1"),
        ({**MINIMAL, "run": {"executor": "slurm"}}, r"run\.executor = 'slurm': .*'ray' or 'in_process'"),
        ({**MINIMAL, "rollout": {"temperature": float("nan")}}, r"rollout\.temperature"),
        ({**MINIMAL, "rollout": {"temperature": 1e-9}}, r"rollout\.temperature = 1e-09: .*equal to 0\.000001"),
        ({**MINIMAL, "rollout": {"batch_size": HUGE}}, r"rollout\.batch_size = 1.*0: .*less than or equal to 1048576"),
        ({**MINIMAL, "rollout": {"samples_per_prompt": HUGE}}, r"rollout\.samples_per_prompt = 1.*0: .*to 1048576"),
        (
            {**MINIMAL, "rollout": {"batch_size": 1 << 11, "samples_per_prompt": 513}},
            r"^rollout\.samples_per_prompt = 513: with rollout\.batch_size = 2048 .* 1048576 samples; lower either$",
        ),
        ({**MINIMAL, "training": {"micro_batch_tokens": HUGE}}, r"training\.micro_batch_tokens = 1.*0: .*less than"),
        ({**MINIMAL, "run": {"seed": HUGE}}, r"run\.seed = 1.*0: .*less than 4611686018427387904"),
        ({**MINIMAL, "run": 5}, r"run = 5"),
    ],
)
def test_a_bad_value_names_its_key(body: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(body)


@pytest.mark.parametrize(
    ("overrides", "message"), [(["run"], "section.key=value"), (["run.seed"], "section.key=value")]
)
def test_a_malformed_override_says_how_to_write_one(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, ""), overrides)


def test_a_missing_and_a_malformed_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(write(tmp_path, "[run\n"))


def test_every_shipped_configuration_is_valid() -> None:
    examples = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
    assert examples
    assert all(isinstance(load_config(example), Config) for example in examples)
