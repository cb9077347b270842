"""Failures after which a run goes on by itself, and when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_algorithms.checkpoints import LEDGER, Ledger, count_ledger
from hf_algorithms.checkpoints.program import Program
from hf_algorithms.config import RunConfig
from hf_algorithms.data import RowOrder
from hf_algorithms.run.restarts import Restarts
from hf_algorithms.run_directory import RunDirectory
from hf_controller import LostClusterError, RemoteCallError
from hf_protocols import (
    BackendError,
    ConfigError,
    HybridFlowError,
    NonFiniteLossError,
    PoolError,
    RewardError,
    WorkerTimeoutError,
)


def failed_call(cause_type: str) -> RemoteCallError:
    return RemoteCallError(
        "actor.update_actor on rank 1 failed: reason", role="actor", method="update_actor", rank=1,
        cause_type=cause_type, remote_traceback="",
    )  # fmt: skip


FAILURES: dict[str, tuple[HybridFlowError, bool, bool]] = {
    "a process ended": (failed_call(""), True, True),
    "a rank raised": (failed_call("RuntimeError"), False, True),
    "a rank hangs": (WorkerTimeoutError("late"), False, True),
    "an engine ended": (BackendError("the server is gone"), False, True),
    "a local cluster is lost": (LostClusterError("lost", is_local=True), True, True),
    "a remote cluster is lost": (LostClusterError("lost", is_local=False), False, False),
    "slots are missing": (PoolError("too few"), False, False),
    "the loss is not finite": (NonFiniteLossError("nan"), False, False),
    "a reward raised": (RewardError("raised"), False, False),
    "a value is wrong": (ConfigError("wrong"), False, False),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_goes_on_after_what_may_pass(name: str) -> None:
    error, at_start, later = FAILURES[name]
    for has_begun, expected in ((False, at_start), (True, later)):
        restarts = Restarts(RunConfig())
        restarts.stop.has_begun = has_begun
        line = restarts.decide(error, 8, "goes on after iteration 5")
        assert (line is not None) == restarts.take() == expected
        assert restarts.total == int(expected) and not restarts.take()
        if line is not None:
            assert line.endswith(". Restart 1 of run.max_restarts = 2: the run goes on after iteration 5")


def test_restarts_end_at_the_limit_or_an_iteration_failing_twice() -> None:
    restarts, error = Restarts(RunConfig(max_restarts=2), total=4), failed_call("")
    assert restarts.decide(error, 8, "goes on after iteration 5")
    assert restarts.decide(error, 8, "goes on after iteration 5") is None
    assert error.__notes__ == ["iteration 8 failed twice, so that the run is not restarted"]
    assert restarts.decide(error, 9, "goes on after iteration 5") and restarts.total == 6
    again = failed_call("")
    assert restarts.decide(again, 10, "goes on after iteration 5") is None
    assert again.__notes__ == ["run.max_restarts = 2 restarts were made before"]


def test_a_run_is_not_restarted_where_it_should_stop() -> None:
    assert Restarts(RunConfig(max_restarts=0)).decide(failed_call(""), 2, "starts again") is None
    asked = Restarts(RunConfig())
    asked.stop.code = 143
    assert asked.decide(failed_call(""), 2, "starts again") is None


def test_a_rollback_is_a_restart_that_passes_draws_over(tmp_path: Path) -> None:
    """Iteration 8 fails twice: back to 5 and, of a commit made meanwhile, to 7. Then a process ends."""
    restarts, error = Restarts(RunConfig(max_restarts=3), rolls_back=True), NonFiniteLossError("nan")
    assert restarts.decide(error, 1, "starts again") is None, "before the first iteration"
    restarts.stop.has_begun = True
    assert restarts.decide(error, 101, "goes on after iteration 100") is None, "the last evaluation draws nothing"
    for start, skipped in ((5, 3), (7, 4)):
        line = restarts.decide(error, 8, "goes on")
        assert line is not None and line.endswith("goes on with other draws")
        restarts.begin(start)
        assert restarts.skipped_draws == skipped
    assert restarts.decide(failed_call(""), 8, "goes on") == (
        "actor.update_actor on rank 1 failed: reason. Restart 3 of run.max_restarts = 3: the run goes on"
    )
    restarts.begin(7)
    assert restarts.rollbacks == [{"iteration": 8, "after": 5}, {"iteration": 8, "after": 7}]
    assert (restarts.skipped_draws, restarts.measure()) == (4, {"rollback/count": 2.0})
    assert restarts.decide(error, 9, "goes on") is None, "all restarts were made"

    directory = RunDirectory(tmp_path / "run")
    directory.begin()
    program = Program(iteration=7, state={}, summary={}, totals={}, ledger={}, data={"rows_drawn": 20},
                      generators={}, sizes={}, skipped_draws=3)  # fmt: skip
    ledger, order = Ledger(directory), RowOrder([64])
    restarts.continue_draws(ledger, order, program, batch_size=2, samples=3, seed=1)
    assert [restarts.count_drawn(iteration, 2) for iteration in (7, 8)] == [22, 24]
    assert ledger.counts == count_ledger(directory.path / LEDGER)
    assert ledger.counts == {"planned": 6, "trained": 0, "filtered": 0, "dropped": 6, "in_flight": 0}
    (draw,) = [order.draw(2, iteration=10, seed=1)]
    prompts = str([[epoch, row, 0] for epoch, row in draw])
    assert f'"iteration": 8, "state": "dropped", "samples": 3, "prompts": {prompts}' in (
        (directory.path / LEDGER).read_text()
    )
    directory.close()
