"""Recipes' view of a role, which type checkers read, is what the role's worker registers."""

from __future__ import annotations

import inspect

import pytest

from hf_algorithms.workers import calls
from hf_algorithms.workers.actor import ActorWorker
from hf_algorithms.workers.advantage import AdvantageWorker
from hf_algorithms.workers.critic import CriticWorker
from hf_algorithms.workers.reference import ReferenceWorker
from hf_algorithms.workers.reward import CostWorker, RewardWorker
from hf_algorithms.workers.scorer import PairScorer
from hf_protocols.remote import registered_methods

WORKERS = {
    calls.ActorCalls: ActorWorker,
    calls.AdvantageCalls: AdvantageWorker,
    calls.CostCalls: CostWorker,
    calls.CriticCalls: CriticWorker,
    calls.PairScorerCalls: PairScorer,
    calls.ReferenceCalls: ReferenceWorker,
    calls.RewardCalls: RewardWorker,
}
FUTURES = {"batch": "BatchFuture", "metrics": "MetricsFuture", "object": "ObjectFuture", "list": "ListFuture"}


def test_every_view_is_compared() -> None:
    assert {view.__name__ for view in WORKERS} == set(calls.__all__)


@pytest.mark.parametrize("view", WORKERS, ids=lambda view: view.__name__)
def test_a_call_takes_what_the_workers_method_takes(view: type) -> None:
    registered = registered_methods(WORKERS[view])
    named = {name: member for name, member in vars(view).items() if inspect.isfunction(member) and name[0] != "_"}
    assert named
    for name, call in named.items():
        taken, given = (inspect.signature(each) for each in (getattr(WORKERS[view], name), call))
        assert [str(each).replace("TensorDict", "BatchFuture") for each in taken.parameters.values()] == [
            str(each) for each in given.parameters.values()
        ], name
        assert given.return_annotation == FUTURES[registered[name].returns], name
