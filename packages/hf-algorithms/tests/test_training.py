"""Arguments of the functions that train: those that mean nothing are refused, not ignored."""

from __future__ import annotations

from typing import Any

import pytest

from hf_algorithms import dpo, reward_model, sft, train
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
