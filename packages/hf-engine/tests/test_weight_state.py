"""The state of an engine that keeps its weights itself, through updates as a transition makes them."""

from __future__ import annotations

import pytest
import torch

from hf_engine.resharding.layouts import spread_layout
from hf_engine.rollout.loading import WeightState
from hf_engine.testing import LocalRanks
from hf_protocols import BackendError, ReshardError

SHAPES = {"a.weight": (4, 2), "b.weight": (3,)}


@pytest.fixture(scope="module")
def alone():
    with LocalRanks(1, timeout_s=60) as ranks:
        yield ranks


def new_state():
    return WeightState(spread_layout(SHAPES, range(1), dtype="float32"))


def shards(*names):
    return {name: [torch.ones(SHAPES[name])] for name in names}


def update_in_parts():
    state = new_state()
    for version in (1, 2):
        state.begin()
        for name in SHAPES:
            with pytest.raises(ReshardError, match=r"did not arrive. Load them before commit_weights"):
                state.check_commit(version)
            with pytest.raises(BackendError, match="begun and not committed"):
                state.check_ready()
            state.check_shards(shards(name))
            state.add(shards(name))
            with pytest.raises(ReshardError, match=rf"the parameters \['{name}'\] came twice in one update"):
                state.check_shards(shards(name))
        state.check_commit(version)
        state.commit(version)
        state.check_ready()
        assert (state.version, state.is_updating) == (version, False)


def update_what_is_not_held():
    state = new_state()
    state.begin(["a.weight"])
    with pytest.raises(ReshardError, match=r"the parameters \['b.weight'\] did not arrive"):
        state.check_commit(1)
    state.add(["b.weight"])
    state.check_commit(1)


def refuse_what_is_out_of_place():
    state = new_state()
    for method, act in (
        ("load_shards", lambda: state.check_shards(shards("a.weight"))),
        ("load_buffers", lambda: state.require_update("load_buffers")),
    ):
        with pytest.raises(BackendError, match=f"^{method} without an update. Call begin_weights first"):
            act()
    state.check_commit(4)
    state.commit(4)
    assert state.version == 4, "a version without an update is that of the weights as they are"
    for wrong in (-1, "x", 2**31):
        with pytest.raises(BackendError, match="version="):
            state.check_commit(wrong)
    state.is_released = True
    with pytest.raises(BackendError, match=r"the KV cache was released\. Call resume\(\)"):
        state.check_ready()


@pytest.mark.parametrize("test", [update_in_parts, update_what_is_not_held, refuse_what_is_out_of_place])
def test_a_state_follows_updates(alone, test):
    alone.run(test, deadline_s=60)
