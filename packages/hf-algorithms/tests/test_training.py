"""Arguments of the functions that train: those that mean nothing are refused, not ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_algorithms import dpo, reward_model, sft, train
from hf_algorithms.recipes import COMMAND_RECIPES, StepError, SupervisedRecipe, find_command
from hf_protocols import ConfigError


@pytest.mark.parametrize("function", [train, sft, dpo, reward_model])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"allow_changed": "run.seed", "resume": "run"},
            r"'run\.seed': is not a list of keys\. Pass \['section\.key'\]",
        ),
        ({"allow_changed": 3, "resume": "run"}, r"3: is not a list of keys"),
        ({"allow_changed": ["run.seed"]}, r"\['run\.seed'\]: belongs to resume, which is not given\. Leave it out"),
    ],
)
def test_changes_are_allowed_by_a_list_and_to_a_resumed_run(
    function: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^allow_changed = {message}"):
        function("model", [{"prompt": "1"}], **arguments) if "resume" not in arguments else function(**arguments)


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda *given: 1 / 0, rf"raised ZeroDivisionError: .*\n  at {__file__}:\d+, in <lambda>"),
        (lambda roles: {}, r"raised TypeError: .* takes 1 positional argument but 4 were given"),
        (lambda *given: None, r"returned None\. Return a mapping of names to numbers$"),
        (lambda *given: {"loss": "low"}, r"returned \{'loss': 'low'\}\. Return a mapping of names to numbers$"),
        (lambda *given: {"score": 1.0}, r"returned score, and its metric is 'loss'\. Return a number of this name"),
    ],
)
def test_an_evaluation_of_ones_own_that_fails_is_named(evaluate: Any, message: str) -> None:
    usual: Any = COMMAND_RECIPES["sft"]["sft"]
    assert isinstance(usual, SupervisedRecipe)
    own: Any = replace(usual, evaluate=evaluate)
    with pytest.raises(StepError, match=f"^evaluate of recipe 'sft' {message}"):
        own.run_evaluate(None, None, 2, usual.config())


def test_a_note_names_a_command_that_there_is() -> None:
    """A recipe of the user's own has a name that no command has."""
    usual = COMMAND_RECIPES["sft"]["sft"]
    assert find_command(replace(usual, name="mine")) == "train"
    found = {find_command(recipe) for known in COMMAND_RECIPES.values() for recipe in known.values()}
    assert found == {"train", "sft", "dpo", "reward-model"}
