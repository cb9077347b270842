from __future__ import annotations

import pickle

import pytest

from hf_controller import RemoteCallError
from hf_controller.failures import Failure
from hf_protocols import ReshardError, RewardError, WorkerError


class PickyError(RewardError):
    """Cannot be made again from its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def failure_of(error: Exception) -> Failure:
    def work() -> None:
        raise error

    try:
        work()
    except Exception as raised:  # noqa: BLE001
        return pickle.loads(pickle.dumps(Failure.of(raised, role="actor", method="update", rank=3)))
    raise AssertionError


def test_our_own_errors_come_back_as_themselves():
    error = failure_of(ReshardError("box is missing")).to_error()
    assert type(error) is ReshardError
    assert str(error) == "box is missing"
    (note,) = error.__notes__
    assert note.startswith("actor.update on rank 3, traceback there:")
    assert "in work" in note


@pytest.mark.parametrize("error", [KeyError("x"), PickyError(1, 2)])
def test_others_become_one_error_that_names_everything(error):
    answer = failure_of(error).to_error()
    assert isinstance(answer, RemoteCallError)
    assert isinstance(answer, WorkerError)
    assert str(answer) == f"actor.update on rank 3 failed: {type(error).__name__}: {error}"
    assert (answer.role, answer.method, answer.rank) == ("actor", "update", 3)
    assert answer.cause_type == type(error).__name__
    assert "in work" in answer.remote_traceback
