from __future__ import annotations

import pickle
import threading

import pytest

from hf_controller import RemoteCallError
from hf_controller.failures import Failure, LostClusterError
from hf_protocols import ReshardError, RewardError, WorkerError


class DoubledError(RewardError):
    """Makes its message from its arguments."""

    def __init__(self, row: object) -> None:
        super().__init__(f"row {row} is wrong")


class LockedError(RewardError):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("the door is locked")
        self.lock = threading.Lock()


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


def test_an_error_that_makes_its_message_keeps_it():
    error = failure_of(DoubledError(3)).to_error()
    assert type(error) is DoubledError
    assert str(error) == "row 3 is wrong"


def test_errors_of_the_controller_reach_other_processes():
    """A pool of processes that cannot unpickle a result breaks, and its program learns nothing of the error."""
    failed = failure_of(KeyError("x")).to_error()
    lost = LostClusterError("the cluster is gone", is_local=True)
    for error in (failed, lost):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", [KeyError("x"), LockedError()])
def test_others_become_one_error_that_names_everything(error):
    answer = failure_of(error).to_error()
    assert isinstance(answer, RemoteCallError)
    assert isinstance(answer, WorkerError)
    assert str(answer) == f"actor.update on rank 3 failed: {type(error).__name__}: {error}"
    assert (answer.role, answer.method, answer.rank) == ("actor", "update", 3)
    assert answer.cause_type == type(error).__name__
    assert "in work" in answer.remote_traceback
