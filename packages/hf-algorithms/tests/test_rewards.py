from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_algorithms.rewards import (
    FunctionSpec,
    Samples,
    ScoringFunctions,
    exact_match,
    gsm8k_accuracy,
    gsm8k_reward,
    load_function,
    number_match,
)
from hf_protocols.errors import ConfigError, RewardError

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"


class StaysHere:
    """A function that cannot be pickled: it is called in this process."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self):
        raise TypeError("stays here")


def compute_scores(function, prompts, responses, answers, **more):
    samples = Samples(prompts=prompts, responses=responses, answers=answers, groups=[0] * len(responses), **more)
    with pytest.warns(UserWarning, match="runs in this process"):
        functions = ScoringFunctions([FunctionSpec(name="own", function=StaysHere(function))])
    (scored,) = functions.score(samples)
    return scored.scores


def _score(function, *answers):
    responses = [f"r{index}" for index in range(2)]
    return compute_scores(function, ["p0", "p1"], responses, list(answers) or ["a0", "a1"])


# ------------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize("function", [exact_match, number_match, gsm8k_reward, gsm8k_accuracy])
def test_an_absent_answer_is_not_scorable(function):
    """Not even by a response that is empty, as the absent answer seems to be; an empty answer is an answer."""
    assert function(["p"] * 4, ["", "1", "#### 1", "#### 2"], [None, None, None, "#### 2"])[:3] == [None] * 3
    assert exact_match(["p"], [" "], [""]) == [1.0]


def test_exact_match_ignores_white_space_around():
    assert exact_match(["", "", ""], ["122", " 122\n", "12 2"], ["122", "122", "122"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so it is 72.\n#### 72", 1.0),
        ("#### 72.0", 1.0),
        ("####$72 \n", 1.0),
        ("#### 5\n#### 72", 1.0),
        ("#### 72 clips", 1.0),
        ("#### 0,072", 1.0),
        ("#### 71", 0.2),
        ("#### 71.\n", 0.2),
        ("#### -72", 0.2),
        ("#### 72\n#### 5", 0.2),
        ("#### 71 clips", 0.1),
        ("#### 71\n####", 0.1),
        ("#### seventy", 0.0),
        ("72", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_reward_pays_for_the_number_then_for_the_form(response, score):
    assert gsm8k_reward(["q"], [response], ["48/2 = 24\n#### 72"]) == [score]
    assert gsm8k_accuracy(["q"], [response], ["72"]) == [float(score == 1.0)]


def test_gsm8k_numbers_have_separators_and_fractions():
    assert gsm8k_reward(["q"] * 3, ["#### 1200", "#### .5", "#### -3"], ["#### 1,200", "0.50", "$-3"]) == [
        1.0,
        1.0,
        1.0,
    ]
    with pytest.raises(RewardError, match="'many' of the data has no number"):
        compute_scores(gsm8k_reward, ["q"], ["#### 3"], ["many"])


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not in the shared folder")
def test_every_solution_of_gsm8k_earns_one():
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert set(gsm8k_reward([""] * len(answers), answers, answers)) == {1.0}


# ----------------------------------------------------------------------------------------------------- compute_scores


@pytest.mark.parametrize(
    "answer",
    [[0, 1], (0.0, 1.0), [False, True], np.array([0, 1]), [np.float32(0), np.bool_(True)], torch.tensor([0.0, 1.0])],
    ids=["ints", "tuple", "bools", "array", "numpy scalars", "tensor"],
)
def test_numbers_of_every_kind_are_scores(answer):
    scores = _score(lambda prompts, responses, answers: answer)
    assert scores == [0.0, 1.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1.0], "returned 1 scores for 2 responses"),
        ([], "returned 0 scores"),
        (1.0, "which is not a list, for 2 responses. Return one for each"),
        (None, "which is not a list, for 2 responses. Return one for each"),
        ("01", "which is not a list, for 2 responses. Return one for each"),
        ({0: 1.0, 1: 2.0}, "returned a mapping of [0, 1] for 2 responses. Name its list of scores 'rewards'"),
        (torch.tensor(1.0), "which is not a list, for 2 responses. Return one for each"),
        (
            [1.0, float("inf")],
            "returned inf, which is not a finite number, for sample 1: prompt 'p1', response 'r1', answer 'a1'",
        ),
        ([float("-inf"), 0.0], "returned -inf, which is not a finite number, for sample 0"),
        ([10**400, 0.0], "not a finite number, for sample 0"),
        ([0.0, 1e300], "returned 1e+300, which is beyond the range of float32, for sample 1"),
        ({0.0, 1.0}, "which is not a list, for 2 responses. Return one for each"),
        (np.array(["NaT", "2020-01-01"], dtype="datetime64[D]"), "which is not a number, for sample 0"),
        (["0.5", 1.0], "returned '0.5' (str), which is not a number, for sample 0"),
        ([{"reward": 1.0}, 1.0], "returned {'reward': 1.0} for sample 0"),
        ({"score": [1.0, 2.0]}, "returned a mapping of ['score'] for 2 responses. Name its list of scores 'rewards'"),
        ({"rewards": [1.0]}, "returned 1 scores for 2 responses"),
        ({"rewards": [1.0, 2.0], "extra_logs": {"length": [1]}}, "returned 1 numbers of 'length' for 2 responses"),
        ([torch.ones(500), 1.0], "(Tensor), which is not a number, for sample 0"),
        (torch.ones(2, 1), "returned [1.0] (list), which is not a number, for sample 0"),
    ],
)
def test_nonsense_is_named_with_its_sample(answer, says):
    with pytest.raises(RewardError) as caught:
        _score(lambda prompts, responses, answers: answer)
    assert says in str(caught.value)
    assert "test_rewards:test_nonsense_is_named" in str(caught.value)


def test_an_exception_shows_the_place_in_the_users_code():
    def divide(prompts, responses, answers):
        return [1 / len(answer) for answer in answers]

    with pytest.raises(RewardError) as caught:
        _score(divide, "", "a")
    message = str(caught.value)
    assert "divide raised ZeroDivisionError: division by zero" in message
    assert f"at {__file__}:{divide.__code__.co_firstlineno + 1}" in message
    assert "return [1 / len(answer) for answer in answers]" in message


def test_a_function_cannot_change_the_batch():
    prompts = ["p"]

    def clear(prompts, responses, answers):
        prompts.clear()
        return [1.0]

    assert compute_scores(clear, prompts, ["r"], ["a"]) == [1.0]
    assert prompts == ["p"]


# ------------------------------------------------------------------------------------------------------ load_function


@pytest.fixture
def folder(tmp_path):
    names = set(sys.modules)
    (tmp_path / "my_rewards.py").write_text(
        "import my_sibling\n"
        "LIMIT = 3\n"
        "def brevity(prompts, responses, answers):\n"
        "    return [my_sibling.SCORE] * len(responses)\n"
    )
    (tmp_path / "my_sibling.py").write_text("SCORE = 0.5\n")
    (tmp_path / "my-rewards.py").touch()
    yield tmp_path
    for name in set(sys.modules) - names:
        del sys.modules[name]


def test_a_function_is_found_next_to_the_configuration(folder):
    path = list(sys.path)
    function = load_function("my_rewards:brevity", search_path=[folder])
    assert function(["p"], ["r"], ["a"]) == [0.5]
    assert sys.path == path
    assert load_function("hf_algorithms.rewards:exact_match") is exact_match


def test_a_function_is_found_by_its_file(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "my_rewards.py").write_text("def brevity(responses):\n    return [0.25]\n")
    assert load_function("my_rewards.py:brevity", search_path=[folder])(["p"], ["r"], ["a"]) == [0.5]
    assert load_function("inner/my_rewards.py:brevity", search_path=[folder])(["r"]) == [0.25]
    assert load_function(f"{folder}/inner/my_rewards.py:brevity")(["r"]) == [0.25]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_rewards", "Write module:function"),
        ("my_rewards.py", "Write module:function"),
        ("other.py:brevity", r"no file 'other.py' in .*\. Give the path of a Python file$"),
        ("$HOME/other.py:brevity", r"no file '\$HOME/other.py' in .* file\. Variables such as \$HOME are not replaced"),
        ("my-rewards.py:brevity", "is not the name of a module. Rename the file"),
        ("my_rewards:", "Write module:function"),
        ("my-rewards:brevity", "Write module:function"),
        ("my_reward:brevity", "no module 'my_reward' in .*Did you mean my_rewards"),
        ("nowhere:brevity", "Use one of hf_algorithms.rewards, my_rewards, my_sibling"),
        ("my_rewards:brevty", r"brevty does not exist in .*my_rewards.py. Did you mean brevity\?"),
        ("my_rewards:LIMIT", "LIMIT is not a function"),
        ("hf_algorithms.rewards:gsm8k", "Did you mean gsm8k_reward|Use one of"),
        ("my_rewards.inner:brevity", "my_rewards.inner"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(folder, name, says):
    with pytest.raises(ConfigError, match=says):
        load_function(name, search_path=[folder])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import absent_library\n", "ModuleNotFoundError: No module named 'absent_library'"),
        ("def broken(:\n", "SyntaxError"),
        ("LIMIT = 1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_to_import_shows_where(folder, source, says):
    (folder / "failing.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function("failing:score", search_path=[folder])
    assert says in str(caught.value)
    assert "failing.py" in str(caught.value)


def test_an_address_of_another_scheme_keeps_its_secret():
    with pytest.raises(
        ConfigError, match=r"^'ftp://[^@]*@host/score': a server is asked by http:// or https://"
    ) as caught:
        load_function("ftp://me:secret@host/score")
    assert "secret" not in str(caught.value)


def test_an_import_that_takes_long_is_mentioned(folder, monkeypatch, capfd):
    monkeypatch.setattr("hf_algorithms.rewards._load._SLOW_IMPORT_S", 0.01)
    (folder / "slow_rewards.py").write_text("import time\ntime.sleep(0.3)\nscore = print\n")
    load_function("slow_rewards:score", search_path=[folder])
    assert capfd.readouterr().err == "'slow_rewards:score': importing slow_rewards has taken 0.01 s and goes on\n"


def test_a_file_that_was_edited_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "edited_rewards.py"
    for paid in (1.0, 5.0):
        file.write_text(f"def score(responses):\n    return [{paid}] * len(responses)\n")
        os.utime(file, (paid, paid))  # or Python takes what it compiled of the file within the same second
        for name in ("edited_rewards:score", "edited_rewards.py:score"):
            assert load_function(name, search_path=[tmp_path])(["r"]) == [paid]


def test_two_folders_may_use_one_name(folder):
    first = load_function("my_rewards:brevity", search_path=[folder])
    other = folder / "other"
    other.mkdir()
    (other / "my_rewards.py").write_text("def brevity(prompts, responses, answers):\n    return [0.25]\n")
    assert load_function("my_rewards:brevity", search_path=[other])(["p"], ["r"], ["a"]) == [0.25]
    assert first(["p"], ["r"], ["a"]) == [0.5]


NAMESAKES = ["json", "sys", "random", "secrets", "types", "tokenizers", "transformers", "pytest", "turtle"]


@pytest.mark.parametrize("name", NAMESAKES)
def test_a_users_module_may_have_an_installed_name(folder, name):
    """`turtle` is not loaded before, `sys` is built in; what others import under the name stays what it was."""
    before = sys.modules.get(name)
    source = "import my_sibling\nUSES = []\ndef score(prompts, responses, answers):\n    return [my_sibling.SCORE]\n"
    (folder / f"{name}.py").write_text(source)
    function = load_function(f"{name}:score", search_path=[folder])
    assert function(["p"], ["r"], ["a"]) == [0.5]
    module = sys.modules[function.__module__]
    assert load_function(f"{name}:score", search_path=[folder]).users_function is module.score
    assert sys.modules.get(name) is before
    assert not str(importlib.util.find_spec(name).origin).startswith(str(folder))


def test_a_users_package_may_have_an_installed_name(folder):
    (folder / "email" / "inner").mkdir(parents=True)
    (folder / "email" / "__init__.py").write_text("from .inner import VALUE\n")
    (folder / "email" / "inner" / "__init__.py").write_text("VALUE = 0.75\n")
    (folder / "email" / "scores.py").write_text(
        "from . import VALUE\ndef score(prompts, responses, answers):\n    return [VALUE]\n"
    )
    assert load_function("email.scores:score", search_path=[folder])(["p"], ["r"], ["a"]) == [0.75]
    (folder / "xml").mkdir()  # without __init__.py
    (folder / "xml" / "scores.py").write_text("def score(prompts, responses, answers):\n    return [0.125]\n")
    assert load_function("xml.scores:score", search_path=[folder])(["p"], ["r"], ["a"]) == [0.125]


@pytest.mark.parametrize("found", ["hf_algorithms.py", "hf_algorithms/data.txt", "hf_algorithms/rewards/data.txt"])
def test_a_folder_without_the_module_does_not_hide_it(folder, found):
    (folder / found).parent.mkdir(parents=True, exist_ok=True)
    (folder / found).write_text("")
    assert load_function("hf_algorithms.rewards:exact_match", search_path=[folder]) is exact_match


def test_namesakes_next_to_a_reward_do_not_reach_its_imports(folder):
    """Of modules that were not loaded before, too: `turtle` draws, and `this` is a poem."""
    for name in ("turtle", "this", "random", "torch"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
    (folder / "careful.py").write_text(
        "import random, torch, plistlib\n"
        "def score(prompts, responses, answers):\n"
        "    import my_sibling, sndhdr\n"
        "    return [my_sibling.SCORE]\n"
    )
    for name in ("plistlib", "sndhdr"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
        sys.modules.pop(name, None)
    function = load_function("careful:score", search_path=[folder])
    assert function(["p"], ["r"], ["a"]) == [0.5]
    (folder / "not_installed.py").write_text("raise RuntimeError('imported by mistake')\n")
    assert importlib.util.find_spec("not_installed") is None


def test_a_sample_is_named_by_its_id_where_it_has_one() -> None:
    with pytest.raises(RewardError, match=r"for response 2 to row 7 \(epoch 1\): prompt 'p'"):
        compute_scores(lambda *texts: ["x"], ["p"], ["r"], ["a"], sample_ids=[[1, 7, 2, 0]])
    with pytest.raises(RewardError, match=r"for response 0 to row 3 \(epoch 0, attempt 2\): "):
        compute_scores(lambda *texts: ["x"], ["p"], ["r"], ["a"], sample_ids=[[0, 3, 0, 2]])
