"""Who is asked whether it lives, for each thing that may be seen of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, WorkerCrashedError

from hf_controller.executors.ray.causes import choose_telling, find_suspects
from hf_controller.failures import Failure, LostResultError
from hf_controller.trace import CallReport, Span

PEER, PARTNER, MAKER, STRANGER = (
    SimpleNamespace(label=label, origin=f"process {number:032x}")
    for number, label in enumerate(("peer", "partner", "maker", "stranger"))
)


def failure(error: BaseException, traceback: str = "") -> Failure:
    described = Failure.of(error, role="actor", method="update", rank=0, origin="call 3")
    return Failure(**described.__dict__ | {"remote_traceback": traceback})


def brought_in_vain(maker: SimpleNamespace | None) -> RayTaskError:
    """What Ray answers for a rank to which it could not bring an input."""
    cause: Exception = WorkerCrashedError()
    if maker is not None:
        cause = ActorDiedError()
        cause.actor_id = maker.origin.removeprefix("process ")
    return RayTaskError("actor.run", "", cause)


CASES = {
    "its own exception": (failure(KeyError("x"), 'File "train.py", line 3, in update'), []),
    "its own exception that names a library": (
        failure(ValueError("x"), 'File "/gloo/train.py", line 3, in update\nValueError: there is no backend nccl'),
        [],
    ),
    "the error of a collective": (
        failure(RuntimeError("x"), 'File ".../torch/distributed/distributed_c10d.py", line 3, in all_reduce'),
        [PEER, PARTNER],
    ),
    "the error of a library below one": (
        failure(RuntimeError("x"), "RuntimeError: NCCL error in ..."),
        [PEER, PARTNER],
    ),
    "an input that it could not read": (failure(LostResultError("lost", MAKER.origin)), [MAKER]),
    "an input of unknown origin": (failure(LostResultError("lost")), []),
    "an input that Ray could not bring": (brought_in_vain(MAKER), [MAKER]),
    "an input of unknown origin that Ray could not bring": (brought_in_vain(None), [PEER]),
    "an answer that is lost": (ActorDiedError(), [PEER]),
}


@pytest.mark.parametrize("case", CASES)
def test_only_who_can_explain_a_failure_is_suspected(case):
    seen, expected = CASES[case]
    everyone = [STRANGER, PEER, PARTNER, MAKER]
    suspects = find_suspects(seen, unanswered=lambda: [PEER], connected=[PARTNER], everyone=everyone)
    assert [each.label for each in suspects] == [each.label for each in expected]


def report(failed: Failure | None, end_s: float, *, upstream: bool = False) -> CallReport:
    times = dict.fromkeys(("submit_s", "ready_s", "fetched_s", "computed_s"), 0.0)
    span = Span(
        call_id=3,
        pool="gpus",
        host="actor",
        role="actor",
        method="update",
        rank=0,
        end_s=end_s,
        bytes_read=0,
        bytes_written=0,
        labels={},
        **times,
    )
    return CallReport(span=span, failure=failed, upstream=upstream)


OWN, OTHER = failure(KeyError("own")), failure(KeyError("other"))
LEFT_ALONE = failure(RuntimeError("x"), "[gloo/transport/tcp/pair.cc] Connection closed by peer")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(None, 1.0), report(None, 2.0)], None),
        ([report(LEFT_ALONE, 1.0), report(None, 2.0)], (LEFT_ALONE, False)),
        ([report(LEFT_ALONE, 1.0), report(OWN, 2.0)], (OWN, False)),  # although its clock is behind
        ([report(OTHER, 2.0), report(OWN, 1.0)], (OWN, False)),
        ([report(OTHER, 2.0), report(OWN, 1.0, upstream=True)], (OWN, True)),
    ],
)
def test_of_failures_that_come_together_the_one_is_told_that_makes_the_others(reports, expected):
    assert choose_telling(reports) == expected
