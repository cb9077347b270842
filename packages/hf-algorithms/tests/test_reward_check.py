"""Reward functions are checked before a run starts: by their signature, and by the answers they can read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from hf_algorithms.config import Config, parse_config
from hf_algorithms.data import Row
from hf_algorithms.preflight import reward_functions
from hf_algorithms.preflight.reward_functions import check_rewards, describe_logs
from hf_algorithms.rewards import (
    SupportsAnswerCheck,
    answers_checked_by,
    exact_match,
    gsm8k_accuracy,
    gsm8k_reward,
)
from hf_protocols import ConfigError, DataError

ROWS = [Row("p", "1"), Row("p", "#### 2"), Row("p", "three")]


def plain(prompts: Any, responses: Any, answers: Any) -> Any: ...


def with_defaults(prompts: Any, responses: Any, answers: Any, weight: float = 1.0, **options: Any) -> Any: ...


def any_arguments(*args: Any, **kwargs: Any) -> Any: ...


def needs_four(prompts: Any, responses: Any, answers: Any, weight: float) -> Any: ...


def needs_a_keyword(prompts: Any, responses: Any, answers: Any, *, weight: float) -> Any: ...


def two(responses: Any, answers: Any) -> Any: ...


def of_another_trainer(completions: Any, **kwargs: Any) -> Any: ...


def of_two_conventions(completions: Any, solution_str: Any) -> Any: ...


def logs(completions: Any, log_extra: Any = None, log_metric: Any = None) -> Any: ...


async def waits(prompts: Any, responses: Any, answers: Any) -> Any: ...


def yields(prompts: Any, responses: Any, answers: Any) -> Any:
    yield from responses


async def waits_and_yields(prompts: Any, responses: Any, answers: Any) -> Any:
    yield 1.0


class Scorer:
    def __call__(self, prompts: Any, responses: Any, answers: Any) -> Any: ...

    def with_two(self, responses: Any, answers: Any) -> Any: ...


class WaitingReward:
    async def __call__(self, prompts: Any, responses: Any, answers: Any) -> Any: ...


def passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def adapts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(prompts: Any, responses: Any, answers: Any) -> Any:
        return function(responses, answers)

    return call


def config_with(**reward: str) -> Config:
    return parse_config({"data": {"train": "train.jsonl", "validation": "val.jsonl"}, "reward": reward})


def check(monkeypatch: pytest.MonkeyPatch, function: Any, key: str = "function") -> None:
    found = {"mine:f": function, "mine:any": plain}
    monkeypatch.setattr(reward_functions, "load_function", lambda name, *, search_path: found[name])
    other = "metric" if key == "function" else "function"
    check_rewards(config_with(**{key: "mine:f", other: "mine:any"}), {"train": ROWS, "validation": ROWS, "test": ROWS})


@pytest.mark.parametrize(
    "function",
    [
        plain,
        with_defaults,
        any_arguments,
        Scorer(),
        functools.partial(needs_four, weight=1.0),
        functools.partial(needs_a_keyword, weight=1.0),
        passes_on(plain),
        adapts(two),
        two,
        of_another_trainer,
        waits,
        WaitingReward(),
        functools.partial(plain, []),
        max,  # has no signature to read
    ],
)
def test_a_callable_that_takes_three_lists_is_accepted(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    check(monkeypatch, function)


@pytest.mark.parametrize("section", ["reward", "cost"])
def test_another_machine_needs_the_key_of_its_section(section: str) -> None:
    """A host that one section allows is still refused in the other section."""
    url, other = "http://scorer.example/score", "cost" if section == "reward" else "reward"
    body: dict[str, Any] = {"data": {"train": "train.jsonl"}, "algorithm": {"name": "safe_rlhf"}}
    body |= {"reward": {"function": url}, "cost": {"function": url}}
    body[other]["allowed_hosts"] = ["scorer.example"]
    says = (
        rf"^{section}\.function = '{url}': the host 'scorer.example' is not this machine, .* {section}\.allowed_hosts$"
    )
    with pytest.raises(ConfigError, match=says):
        check_rewards(parse_config(body), {})
    body[section]["allowed_hosts"] = ["scorer.example"]
    check_rewards(parse_config(body), {})


def test_logs_that_are_not_kept_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mine:logs": logs, "mine:any": plain}
    monkeypatch.setattr(reward_functions, "load_function", lambda name, *, search_path: found[name])
    assert describe_logs(config_with(function="mine:any", metric="mine:any")) == []
    kept = "reward.function = 'mine:logs': what it gives log_extra is kept for the rows of samples/ alone"
    assert describe_logs(config_with(function="mine:logs", metric="mine:any")) == [kept]
    of_metric = "reward.metric = 'mine:logs': evaluations keep its scores alone, so log_metric has no effect there"
    assert describe_logs(config_with(function="mine:logs", metric="mine:logs")) == [kept, of_metric]
    costs = {"data": {"train": "train.jsonl"}, "algorithm": {"name": "safe_rlhf"}, "cost": {"function": "mine:logs"}}
    (line,) = describe_logs(parse_config({**costs, "reward": {"function": "mine:any", "metric": "mine:any"}}))
    assert line == "cost.function = 'mine:logs': the samples have no columns of costs, so log_extra has no effect"


@pytest.mark.parametrize("key", ["function", "metric"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            needs_four,
            "parameter weight, which nothing fills: the convention hybridflow does not offer it, and",
        ),
        (needs_a_keyword, "has the parameter weight, which nothing fills"),
        (
            of_two_conventions,
            r"names of two conventions, completions \(trl\) and solution_str \(verl\): .*(Set style of|Rename one)",
        ),
        (len, "too many positional arguments"),
        (waits_and_yields, "yields. Return its scores"),
        (yields, "yields. Return its scores"),
        (Scorer, "is a class. Name a function, or an instance"),
    ],
)
def test_another_signature_is_refused_by_its_key(
    monkeypatch: pytest.MonkeyPatch, function: Any, says: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^reward.{key} = 'mine:f' .*{says}"):
        check(monkeypatch, function, key)


def test_a_name_that_is_not_found_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^reward.metric = 'hf_algorithms.rewards:exact_mach': .*Did you mean"):
        check_rewards(config_with(metric="hf_algorithms.rewards:exact_mach"), {})


@pytest.mark.parametrize("metric", ["hf_algorithms.rewards:exact_match", "hf_algorithms.rewards:gsm8k_accuracy"])
@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_an_answer_that_cannot_be_read_is_named(name: str, metric: str) -> None:
    config = config_with(function="hf_algorithms.rewards:gsm8k_reward", metric=metric)
    rows = {"train": ROWS[:2], "validation": ROWS[:1], "test": ROWS[:2], name: ROWS}
    path = {"train": "train.jsonl"}.get(name, "val.jsonl")
    says = f"^{path}, line 3: the answer 'three' cannot be read by reward.function = .*: it has no number"
    with pytest.raises(DataError, match=says):
        check_rewards(config, rows)
    check_rewards(config, {**rows, name: ROWS[:2]})


def test_a_metric_looks_at_answers_as_well() -> None:
    with pytest.raises(DataError, match=r"line 3: .* by reward.metric = 'hf_algorithms.rewards:gsm8k_accuracy'"):
        check_rewards(config_with(metric="hf_algorithms.rewards:gsm8k_accuracy"), {"test": ROWS})


def test_the_shipped_functions_say_what_they_read() -> None:
    for function in (exact_match, gsm8k_reward, gsm8k_accuracy):
        assert isinstance(function, SupportsAnswerCheck)
        assert function.check_answer("#### 1,200") is None
    with pytest.raises(ValueError, match="has no number"):
        gsm8k_accuracy.check_answer("")  # type: ignore[attr-defined]


NEEDY = ["exact_match", "number_match", "gsm8k_reward", "gsm8k_accuracy"]


@pytest.mark.parametrize("name", NEEDY)
def test_rows_without_answers_are_left_to_the_score(name: str) -> None:
    rows = [Row("p", "1"), Row("p"), Row("q", "2")]
    function = f"hf_algorithms.rewards:{name}"
    check_rewards(config_with(function=function, metric=function), dict.fromkeys(("train", "validation", "test"), rows))


@pytest.mark.parametrize("name", NEEDY)
@pytest.mark.parametrize(
    ("key", "absent", "source"),
    [
        ("function", "train", "data.train = 'train.jsonl'"),
        ("metric", "validation", "data.validation = 'val.jsonl'"),
        ("metric", "test", "data.validation = 'val.jsonl'"),
    ],
)
def test_data_without_any_answer_is_refused(name: str, key: str, absent: str, source: str) -> None:
    function = f"hf_algorithms.rewards:{name}"
    other = "metric" if key == "function" else "function"
    config = config_with(**{key: function, other: "builtins:max"})
    rows = {"train": ROWS[:1], "validation": ROWS[:1], "test": ROWS[:1], absent: [Row("p"), Row("q")]}
    with pytest.raises(DataError) as caught:
        check_rewards(config, rows)
    assert str(caught.value) == (
        f"{source}: no row has an answer, with which reward.{key} = '{function}' compares responses. Set "
        f"data.answer_field, or set reward.{key} to a function that needs no answers"
    )


def of_a_solution(completions: Any, solution: Any, **columns: Any) -> Any: ...


@pytest.mark.parametrize(
    ("key", "absent", "source"),
    [("function", "train", "data.train = 'train.jsonl'"), ("metric", "test", "data.validation = 'val.jsonl'")],
)
def test_a_parameter_of_answers_needs_answers(
    monkeypatch: pytest.MonkeyPatch, key: str, absent: str, source: str
) -> None:
    """The rows' own column or their answers fill the parameter `solution`; without either it would always be None."""
    found = {"mine:f": of_a_solution, "mine:any": any_arguments}
    monkeypatch.setattr(reward_functions, "load_function", lambda name, *, search_path: found[name])
    other = "metric" if key == "function" else "function"
    config = config_with(**{key: "mine:f", other: "mine:any"})
    rows = {"train": ROWS, "validation": ROWS, "test": ROWS}
    check_rewards(config, rows)
    check_rewards(config, {**rows, absent: [Row("p"), Row("q", columns={"solution": "2"})]})
    with pytest.raises(DataError) as caught:
        check_rewards(config, {**rows, absent: [Row("p"), Row("q", columns={"chosen": "2"})]})
    assert str(caught.value) == (
        f"{source}: no row has an answer or a column 'solution', which reward.{key} = 'mine:f' has as a parameter. Set "
        f"data.answer_field, or set reward.{key} to a function that needs no answers"
    )


def test_only_the_rows_that_are_scored_need_answers() -> None:
    """Prompts alone to train on, answers in the held-out rows, or the reverse."""
    function = "hf_algorithms.rewards:exact_match"
    rows = {"train": [Row("p")], "validation": ROWS, "test": ROWS}
    check_rewards(config_with(function="builtins:max", metric=function), rows)
    rows = {"train": ROWS, "validation": [Row("p")], "test": [Row("p")]}
    check_rewards(config_with(function=function, metric="builtins:max"), rows)


def refuse(answer: str) -> None:
    raise KeyError(answer)


def leave(answer: str) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("checker", "says"), [(refuse, "'1'"), (leave, "3"), (str.isalpha, "check_answer returned False")]
)
def test_a_users_own_check_is_asked(monkeypatch: pytest.MonkeyPatch, checker: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"^train.jsonl, line 1: the answer '1' cannot be read by .*: .*{says}"):
        check(monkeypatch, answers_checked_by(checker)(lambda prompts, responses, answers: [1.0]))


@pytest.mark.parametrize("checker", [int, float, Decimal])
def test_a_class_may_check_answers(monkeypatch: pytest.MonkeyPatch, checker: Any) -> None:
    with pytest.raises(DataError, match=r"^train.jsonl, line 2: the answer '#### 2' cannot be read by"):
        check(monkeypatch, answers_checked_by(checker)(lambda prompts, responses, answers: [1.0]))


def test_a_check_of_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^reward.function = 'mine:f': check_answer cannot be called as f\(answer\)"):
        check(monkeypatch, answers_checked_by(lambda prompt, answer: None)(lambda prompts, responses, answers: [1.0]))


def test_a_check_that_is_not_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = answers_checked_by("any")(lambda prompts, responses, answers: [1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^reward.function = 'mine:f': check_answer is 'any', not a function"):
        check(monkeypatch, function)


def test_a_long_answer_is_cut_in_the_message() -> None:
    config = config_with(function="hf_algorithms.rewards:gsm8k_reward")
    with pytest.raises(DataError) as caught:
        check_rewards(config, {"train": [Row("p", "x" * 5000)]})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def f(prompts, responses, answers): yield 0.0", "yields"),
        ("class f:\n    def __init__(self, a, b, c): pass", "is a class"),
        ("def f(one, two): return []", "too many positional arguments"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_function_of_a_users_folder_is_seen_as_written(tmp_path: Any, source: str, part: str) -> None:
    """The loader wraps it, so that its imports are found."""
    (tmp_path / "own_rewards.py").write_text(source + "\n")
    config = parse_config({"data": {"train": "rows.jsonl"}, "reward": {"function": "own_rewards:f"}})
    with pytest.raises(ConfigError, match=rf"(?s)^reward.function = 'own_rewards:f'.*{part}"):
        check_rewards(config, {}, search_path=[str(tmp_path)])


USERS = """
import enum

def f(prompts, responses, answers): return [0.0] * len(responses)

class Loud(Exception):
    def __str__(self): raise RuntimeError("no text")

class Odd:
    def __call__(self, prompts, responses, answers): return [0.0] * len(responses)
    def __getattr__(self, name): raise ValueError("no such thing")

class Property(Odd):
    @property
    def check_answer(self): raise KeyError("nothing")

class bool_(int): pass

odd, with_property = Odd(), Property()
def neighbour(prompts, responses, answers): return [0.0] * len(responses)
def _neighbour(answer): import own_helper
neighbour.check_answer = _neighbour
def loud(prompts, responses, answers): return [0.0] * len(responses)
def _loud(answer): raise Loud
loud.check_answer = _loud
def lengthy(prompts, responses, answers): return [0.0] * len(responses)
def _lengthy(answer): raise ValueError("x" * 10_000)
lengthy.check_answer = _lengthy
def other_false(prompts, responses, answers): return [0.0] * len(responses)
other_false.check_answer = lambda answer: bool_(0)
def swapped(responses, prompts, answers): return [0.0] * len(responses)
"""


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("f", None),
        ("neighbour", None),
        ("odd", "cannot be inspected: no such thing"),
        ("with_property", "cannot be inspected: "),
        ("loud", "cannot be read by reward.function = 'own_rewards:loud': "),
        ("lengthy", "x..."),
        ("other_false", "its check_answer returned False"),
        ("swapped", None),
    ],
)
def test_users_objects_end_in_one_short_message(tmp_path: Any, function: str, part: str | None) -> None:
    (tmp_path / "own_rewards.py").write_text(USERS)
    (tmp_path / "own_helper.py").touch()
    config = parse_config({"data": {"train": "rows.jsonl"}, "reward": {"function": f"own_rewards:{function}"}})
    rows = {"train": [Row(prompt="1+1=", answer="2")]}
    if part is None:
        check_rewards(config, rows, search_path=[str(tmp_path)])
        return
    with pytest.raises((ConfigError, DataError)) as refused:
        check_rewards(config, rows, search_path=[str(tmp_path)])
    assert part in str(refused.value) and len(str(refused.value)) < 700
