"""Reading configurations: what is wrong is named, with the nearest thing that would be right."""

from __future__ import annotations

import re
import tomllib
from datetime import UTC, date, datetime, time
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

import hf_algorithms
from hf_algorithms.config import Config, config_keys, format_commented, format_toml, load_config, parse_config
from hf_algorithms.preflight.placement import check_rollout_options
from hf_algorithms.recipes import RECIPES
from hf_protocols import ConfigError

MINIMAL = {"data": {"train": "rows.jsonl"}}
HUGE = 10**20


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_each_key_is_read_by_code() -> None:
    folder = Path(hf_algorithms.__file__).parent
    code = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.parent.name != "config")
    read = {name for names in re.findall(r"\.(\w+)\b|\"(\w+)\"", code) for name in names}
    for recipe in RECIPES.values():
        keys = config_keys(recipe)
        assert len(keys) == len(set(keys))
        names = {key.rpartition(".")[2] for key in keys if key not in ("algorithm.recipe", "roles.actor.path")}
        # `getattr` reads the learning rates, of which each worker names its own.
        assert names <= read


def test_a_resolved_configuration_reads_back_as_itself() -> None:
    config = parse_config({**MINIMAL, "run": {"seed": 3}, "data": {"train": 'odd "name"\\ and\ttab.jsonl'}})
    assert parse_config(tomllib.loads(format_toml(config))) == config


PAIRS = """
from hf_algorithms import AlgorithmConfig, Recipe
from hf_algorithms.recipes import ACTOR


class Pairs(AlgorithmConfig):
    name: str = "pairs"
    pair: tuple[int, float] = (1, 2.0)
    names: tuple[str, ...] | None = None
    steps: list[int] = [1]
    either: list[int] | tuple[int, ...] = [1]


MINE = Recipe(name="pairs", config=Pairs, roles=(ACTOR,), step=lambda roles, prompts, config, context: [])
"""


def test_a_tuple_of_ones_own_is_read_from_a_list(tmp_path: Path) -> None:
    """TOML has lists alone; the file of a run, which names every key, is read again to resume it."""
    (tmp_path / "recipe_of_pairs.py").write_text(PAIRS)
    usual: dict[str, Any] = {"recipe": f"{tmp_path / 'recipe_of_pairs.py'}:MINE"}
    given: dict[str, Any] = {"pair": [3, 4.5], "names": ["a", "b"], "steps": [2], "either": [2]}
    for keys in ({}, given):
        config = parse_config({**MINIMAL, "algorithm": usual | keys})
        assert parse_config(tomllib.loads(format_toml(config))) == config
    found = config.algorithm.model_dump()
    assert {key: found[key] for key in given} == {"pair": (3, 4.5), "names": ("a", "b"), "steps": [2], "either": [2]}
    with pytest.raises(ConfigError, match=r"^algorithm\.pair\[0\] = 'a': must be a whole number"):
        parse_config({**MINIMAL, "algorithm": usual | {"pair": ["a", 4.5]}})


DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    "options",
    [
        {"text": "\x00\x1f\x7f\u0085\u2028 \U0001f600 \"\"\" \\ ''' \n\r\n\t"},
        {"": {}, "a.b": [{"'": [[], [{}]]}], '"': "", "\x7f\n": True, "\u00c4": -0.0},
        {"large": 2**80, "small": -(10**30), "tiny": 5e-324, "most": 1.7976931348623157e308, "whole": 1e22},
        {"day": date(1, 1, 1), "at": time(23, 59, 59, 999999), "then": datetime(2026, 2, 28, 1, 2, 3, 4, tzinfo=UTC)},
        {"tuples": ({"a": (1, 2)}, ())},
    ],
)
def test_every_accepted_configuration_reads_back(options: dict[str, Any]) -> None:
    config = parse_config({**MINIMAL, "rollout": {"options": options}})
    again = parse_config(tomllib.loads(format_toml(config)))
    assert again == config
    assert repr(again) == repr(config)  # -0.0 and 0.0, 1 and True are equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": {"b": [1.0, inf]}}, r"^rollout\.options\.a\.b\[1\] = inf: is not a finite number. Use one that is$"),
        ({"a": nan}, r"^rollout\.options\.a = nan: is not a finite number"),
        ({"a": "\ud800"}, r"^rollout\.options\.a = '\\ud800': contains an unpaired surrogate"),
        ({"\udfff": 1}, r"^rollout\.options = '\\udfff': is not a key of TOML"),
        ({"a": {1: 2}}, r"^rollout\.options\.a = 1: is not a key of TOML"),
        ({"a": 10**5000}, r"^rollout\.options\.a = \(int that cannot be shown\): has thousands of digits"),
        (DEEP, r"^rollout\.options\.a\..*: tables and lists nest deeper than 32 levels"),
        ({"a": [None]}, r"^rollout\.options\.a\[0\] = None: is of type NoneType, which TOML does not have"),
        ({"a": {1}}, r"^rollout\.options\.a = \{1\}: is of type set"),
        ({"a": time(1, tzinfo=UTC)}, r"^rollout\.options\.a = .*: has a time zone that TOML cannot write"),
    ],
)
def test_what_toml_gives_back_otherwise_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse_config({**MINIMAL, "rollout": {"options": options}})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("key", ["optimizer.weight_decay", "optimizer.max_grad_norm", "algorithm.kl_coefficient"])
def test_no_number_of_a_configuration_is_infinite(key: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=rf"^{key} = inf: is not a finite number"):
        parse_config({**MINIMAL, section: {name: inf}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xfe[\x00d\x00]\x00", "is not UTF-8 text: it looks like UTF-16. Save a TOML file as UTF-8$"),
        (b'[data]\ntrain = "\xe9"', "is not UTF-8 text: byte 17 is 0xe9"),
        (b"[data]\ntrain = \x00", "is not valid TOML: "),
        (b"[run]\nseed = 1\nseed = 2\n", "line 3: its key stands twice in one table. Remove one of the two$"),
        (b"[run]\n[data]\n[run]\n", r"line 3: the table \[run\] stands twice. Join the two$"),
        (b"a = " + b"[" * 5000, "is not usable TOML: its tables or lists nest too deeply"),
        (b"a = " + b"9" * 5000, "is not usable TOML: a number has thousands of digits"),
        (b"a = " + b"9" * 5000 + b".x", "is not (valid|usable) TOML: "),
    ],
    ids=["utf-16", "latin-1", "nul", "key twice", "table twice", "nested", "digits", "malformed"],
)
def test_a_file_that_is_not_toml_is_one_line(tmp_path: Path, body: bytes, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(body)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000], ids=["nested", "digits"])
def test_an_override_that_is_too_much_is_one_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set 'run\.seed=.{67}\.\.\. is not usable TOML") as refused:
        load_config(write(tmp_path, ""), [f"run.seed={value}"])
    assert "\n" not in str(refused.value)
    deep = f"rollout.options{'.a' * 900}=1"
    with pytest.raises(ConfigError, match="nest deeper than 32 levels"):
        load_config(write(tmp_path, '[data]\ntrain = "a"\n'), [deep])


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b'\xef\xbb\xbf[data]\r\ntrain = "a.jsonl"\r\n')
    assert load_config(path).data.train == "a.jsonl"


PATHS = ("run.output_dir", "data.train", "data.validation", "data.test", "model.path", "model.tokenizer")


def with_path(key: str, path: str) -> dict[str, dict[str, str]]:
    section, _, name = key.partition(".")
    body: dict[str, dict[str, str]] = {"data": {"train": "a.jsonl"}}
    body.setdefault(section, {})[name] = path
    return body


@pytest.mark.parametrize("key", PATHS)
def test_a_path_begins_at_the_home_directory(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/ada")
    section, _, name = key.partition(".")
    for given, expanded in (("~/runs", "/ada/runs"), ("~", "/ada"), ("./~x", "./~x"), ("a~b", "a~b")):
        config = parse_config(with_path(key, given))
        assert getattr(getattr(config, section), name) == expanded
        assert parse_config(tomllib.loads(format_toml(config))) == config


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "a path cannot be empty or blank"),
        ("  ", "a path cannot be empty or blank"),
        (" runs", "the path begins with a blank"),
        ("runs\n", "the path ends with a blank"),
        ("a\0b", "the path contains a NUL character"),
        ("~no-such-user/runs", "`~` cannot be expanded: there is no user 'no-such-user'"),
        ("a/" + "b" * 256, "a path of 258 bytes with a name of 256 is longer than 4095 bytes, or 255 for one name"),
        ("a/" * 3000, "a path of 6000 bytes"),
    ],
)
def test_what_is_not_a_path_is_refused_with_its_key(key: str, path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(with_path(key, path))
    assert str(refused.value).startswith(f"{key} = {path[:20]!r}"[:-1])
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


def test_options_of_a_rollout_backend_are_a_table_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, '[data]\ntrain = "a.jsonl"\n[rollout.options]\ncache_bytes = 9\n')
    config = load_config(path, ["rollout.options.dtype=bfloat16", "rollout.options.engine_options={a = [1, true]}"])
    assert config.rollout.options == {"cache_bytes": 9, "dtype": "bfloat16", "engine_options": {"a": [1, True]}}
    assert parse_config(tomllib.loads(format_toml(config))) == config


@pytest.mark.parametrize(("name", "hint"), [("cache_byte", "did you mean 'cache_bytes'"), ("seed", "it takes dtype")])
def test_an_unknown_option_of_the_rollout_backend_is_named(name: str, hint: str) -> None:
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
        ("transformers", {"cache_fraction": 2}, "cache_fraction=2. Use a share of the memory above 0 and below 1"),
        ("server", {}, r"urls=\(\). Use a list of 1 or more URLs"),
        ("server", {"urls": []}, r"urls=\[\]. Use a list of 1 or more URLs"),
        ("server", {"urls": [LOCAL, "localhost"]}, "urls: 'localhost' is not a URL. Set it to one such as"),
        ("server", {"urls": [LOCAL], "timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ("server", {"urls": [LOCAL], "connect_timeout_s": -1}, "connect_timeout_s=-1 must be a finite number"),
        ("server", {"urls": [LOCAL, FAR]}, f"the server at {FAR} may be on .* Use rollout.options.weights_directory"),
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

    monkeypatch.setattr("hf_algorithms.preflight.placement.load_rollout_backend", lambda name: Elsewhere)
    check_rollout_options(parse_config({**MINIMAL, "rollout": {"options": {"cache_bytes": 0}}}).rollout)


def test_a_batch_may_have_as_many_samples_as_the_bound() -> None:
    rollout = parse_config({**MINIMAL, "rollout": {"batch_size": 1 << 10, "samples_per_prompt": 1 << 10}}).rollout
    assert rollout.batch_size * rollout.samples_per_prompt == 1 << 20


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    path = write(tmp_path, '[data]\ntrain = "a.jsonl"\n[run]\nseed = 1\n')
    config = load_config(path, ["run.seed=7", "data.train=b.jsonl", "optimizer.betas=[0.8, 0.9]"])
    assert (config.run.seed, config.data.train, config.optimizer.betas) == (7, "b.jsonl", (0.8, 0.9))


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
    examples = sorted((Path(__file__).parents[3] / "examples").rglob("*.toml"))
    assert examples
    assert all(isinstance(load_config(example, command=None), Config) for example in examples)


def test_written_config_with_a_model_path_reads_back() -> None:
    """Its defaults of a fresh model would be other sizes than the model's."""
    body = {"data": {"train": "rows.jsonl"}, "model": {"path": "model", "max_positions": 64}}
    written = format_toml(parse_config(body))
    assert 'path = "model"' in written and "max_positions" not in written and "num_layers" not in written
    read = parse_config(tomllib.loads(written))
    assert format_toml(read) == written and not read.model.sizes_given()
    del body["model"]["path"]
    assert "max_positions = 64" in format_toml(parse_config(body))


def test_whole_numbers_stand_for_floats_and_lists_for_pairs(tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "rows.jsonl"\n[rollout]\ntemperature = 1\n[optimizer]\nbetas = [0, 0.5]\n')
    config = load_config(path)
    assert (config.rollout.temperature, config.optimizer.betas) == (1.0, (0.0, 0.5))


def test_training_rows_may_come_from_a_list_of_sources(tmp_path: Path) -> None:
    body = '[data]\ntrain = [{path = "~/a.jsonl", weight = 3}, {path = "b/*.parquet", weight = 1.5}]\n'
    config = load_config(write(tmp_path, body))
    assert config.data.sources_of("train") == [(str(Path.home() / "a.jsonl"), 3.0), ("b/*.parquet", 1.5)]
    assert config.data.sources_of("validation") == config.data.sources_of("train")
    assert parse_config(tomllib.loads(format_toml(config))) == config
    assert parse_config(tomllib.loads(format_commented(config))) == config
    plain = load_config(write(tmp_path, '[data]\ntrain = ["a.jsonl", {path = "b.csv"}]\nvalidation = "c.csv"\n'))
    assert plain.data.sources_of("train") == [("a.jsonl", None), ("b.csv", None)]
    assert plain.data.sources_of("test") == [("c.csv", None)]
    assert parse_config(tomllib.loads(format_toml(plain))) == plain


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("3", "data.train = 3: must be a path in quotes, or a list of {path = ..., weight = ...}"),
        ("[]", "data.train = []: must be a path in quotes, or a list"),
        ("[3]", "item 1 is not {path = ..., weight = ...}"),
        ('["a", {path = "b", weight = 1}]', "some items have a weight and some do not"),
        ('[{path = "a", weight = 0}]', "item 1 is not {path = ..., weight = ...}: weight = 0: must be above 0"),
        ('[{path = "a", weights = 1}]', "item 1 is not {path = ..., weight = ...}: unknown key 'weights'"),
        ('[{path = ""}]', "path = '': a path cannot be empty or blank"),
    ],
)
def test_a_list_of_sources_that_is_none_is_one_line(tmp_path: Path, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"[data]\ntrain = {value}\n"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


SEVERAL = {"functions": [{"name": "right", "function": "a:f"}, {"name": "form", "function": "b.py:g", "weight": 0.5}]}


def test_scores_that_nothing_counts_are_refused() -> None:
    idle = {"functions": [{"name": "a", "function": "a:f", "weight": 0.0}]}
    with pytest.raises(
        ConfigError, match=r"^reward\.functions: every weight is 0, so no response has a score\. Set one"
    ):
        parse_config({**MINIMAL, "reward": idle})
    parse_config({**MINIMAL, "reward": {**idle, "model": {"path": "m"}}})
    with pytest.raises(
        ConfigError, match=r"^\[cost\] is set, and ppo keeps no cost below a limit\. Remove it, or choose"
    ):
        parse_config({**MINIMAL, "cost": {"function": "a:f"}})


def test_several_functions_read_back_as_they_are() -> None:
    given = {**MINIMAL, "reward": SEVERAL, "cost": {"functions": [{"name": "length", "function": "c:h"}]}}
    config = parse_config({**given, "algorithm": {"name": "safe_rlhf"}})
    assert [(each.name, each.weight, each.deadline_s, each.style) for each in config.reward.list_functions()] == [
        ("right", 1.0, 30.0, "auto"),
        ("form", 0.5, 30.0, "auto"),
    ]
    assert [each.name for each in config.cost.list_functions()] == ["length"]
    assert parse_config(tomllib.loads(format_toml(config))) == config


@pytest.mark.parametrize(
    ("function", "name"),
    [("a.b:score", "score"), ("my/file.py:score", "score"), ("http://127.0.0.1:8000/v1/score", "score"), ("x://", "x")],
)
def test_one_function_is_named_after_itself(function: str, name: str) -> None:
    (found,) = parse_config({**MINIMAL, "reward": {"function": function}}).reward.list_functions()
    assert (found.name, found.function) == (name if "x://" not in function else "function", function)


SECRETS = {
    "reward.function": ("http://me:hidden@127.0.0.1/score", "'http://***@127.0.0.1/score'"),
    "reward.metric": ("https://hidden@127.0.0.1", "'https://***@127.0.0.1'"),
    "cost.function": ("http://127.0.0.1/score?model=a&api_key=hidden", "'http://127.0.0.1/score?model=a&api_key=***'"),
    "cluster.address": ("ray://hidden:hidden@10.0.0.1:1", "'ray://***@10.0.0.1:1'"),
    "data.train": ("https://host/rows.jsonl?accessToken=hidden", "'https://host/rows.jsonl?accessToken=***'"),
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_a_url_is_refused_and_not_shown(key: str) -> None:
    url, shown = SECRETS[key]
    section, name = key.split(".")
    with pytest.raises(ConfigError) as refused:
        parse_config({**MINIMAL, section: {name: url}})
    assert str(refused.value).startswith(f"{key} = {shown}: a password or a key in a URL would be written into")
    assert "hidden" not in str(refused.value)
    is_scorer = section in ("reward", "cost")
    assert ("Write ${NAME} in its place, and set the environment variable NAME" in str(refused.value)) == is_scorer


def test_secrets_are_found_in_lists_and_overrides(tmp_path: Path) -> None:
    functions = [{"name": "a", "function": "a:f"}, {"name": "b", "function": "http://u:hidden@127.0.0.1/"}]
    with pytest.raises(ConfigError, match=r"^reward\.functions\[1\]\.function = 'http://\*\*\*@127"):
        parse_config({**MINIMAL, "reward": {"functions": functions}})
    with pytest.raises(ConfigError, match=r"^rollout\.options\.urls\[0\] = .* set rollout\.options\.api_key_variable"):
        parse_config({**MINIMAL, "rollout": {"options": {"urls": ["http://u:hidden@127.0.0.1:1"]}}})
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "a.jsonl"\n')
    for override in ("http://u:hidden@127.0.0.1", "data.train.a=http://u:hidden@127.0.0.1/"):
        with pytest.raises(ConfigError) as refused:
            load_config(path, [override])
        assert "hidden" not in str(refused.value)


def test_a_variable_in_a_url_is_stored_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_PASSWORD", "classified")
    function = "http://me:${SCORER_PASSWORD}@127.0.0.1/v1/score?key=${SCORER_PASSWORD}&max_tokens=5"
    prompt = "Answer like https://example.com/?key=value"
    config = parse_config(
        {**MINIMAL, "reward": {"function": function}, "data": {"train": "a", "system_prompt": prompt}}
    )
    assert [each.name for each in config.reward.list_functions()] == ["score"]
    text = format_toml(config)
    assert function in text and "classified" not in text
    assert parse_config(tomllib.loads(text)) == config
    alone = parse_config({**MINIMAL, "reward": {"function": "http://me:${SCORER_PASSWORD}@127.0.0.1:80"}})
    assert [each.name for each in alone.reward.list_functions()] == ["127.0.0.1_80"]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({**SEVERAL, "function": "a:f"}, r"reward.function = 'a:f': \[\[reward.functions\]\] are given as well"),
        (
            {"functions": [*SEVERAL["functions"], *SEVERAL["functions"]]},
            "two functions are named 'right'. Set another name for one",
        ),
        ({"functions": [{"name": "a b", "function": "a:f"}]}, r"reward\.functions\[0\]\.name = 'a b': must consist of"),
        ({"functions": [{"function": "a:f"}, {"function": "b:f"}]}, "two functions are named 'f'. Set another name"),
        ({"functions": [{"name": "a"}]}, r"reward\.functions\[0\]\.function is missing"),
        (
            {"functions": [{"name": "a", "function": "a:f", "colour": 1.0}]},
            r"key 'reward\.functions\[0\]\.colour'\. Its table has name, function, weight, deadline_s, style$",
        ),
        (
            {"functions": [{"name": "a", "function": "a:f", "weigth_": 1.0}]},
            r"unknown key 'reward\.functions\[0\]\.weigth_': did you mean 'weight'\?$",
        ),
        ({"model": {"path": "a", "weigt": 1.0}}, r"unknown key 'reward\.model\.weigt': did you mean 'weight'\?$"),
        ({"functions": [{"name": "a", "function": "a:f", "deadline_s": 0.0}]}, "deadline_s = 0.0: must be above 0"),
        ({"functions": [{"name": "a", "function": "a:f", "style": "nemo"}]}, "style = 'nemo': must be 'auto'"),
    ],
)
def test_functions_that_contradict_are_refused(reward: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({**MINIMAL, "reward": reward})


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rnk": 8}, r"^unknown key 'model\.lora\.rnk': did you mean 'rank'\?$"),
        (
            {"targets": "all-linear"},
            r"^model\.lora\.targets = 'all-linear': is what an absent key means\. Remove",
        ),
        ({"targets": "q_proj"}, r'^model\.lora\.targets = .q_proj.: must be a list. Write it as \["text"\]$'),
    ],
)
def test_wrong_keys_of_adapters_are_one_line(lora: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({**MINIMAL, "model": {"path": "a", "lora": lora}})


def test_a_filter_by_an_unknown_reward_is_refused() -> None:
    given = {**MINIMAL, "reward": SEVERAL, "algorithm": {"name": "dapo", "filter_metric": "reward/right"}}
    assert parse_config(given).algorithm.model_dump()["filter_metric"] == "reward/right"
    given["algorithm"] = {"name": "dapo", "filter_metric": "reward/wrong"}
    with pytest.raises(ConfigError, match=r"no reward has this name\. Use one of reward/right, reward/form"):
        parse_config(given)
    given["algorithm"] = {"name": "dapo", "filter_metric": "reward/model"}
    with pytest.raises(ConfigError, match=r"'reward/model': no reward has this name\. Use one of reward/right"):
        parse_config(given)
    model = {"path": "a/model"}
    assert parse_config({**given, "reward": {**SEVERAL, "model": model}}).reward.model is not None
    given["algorithm"] = {"name": "dapo", "filter_metric": "reward/wrong"}
    with pytest.raises(ConfigError, match=r"no reward has this name\. Use one of reward/model$"):
        parse_config({**given, "reward": {"model": model}})
