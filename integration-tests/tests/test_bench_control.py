"""`bench_control.py`'s recorded ranks get the messages of an iteration, each of which is pickled once."""

from __future__ import annotations

import pytest
from bench_control import NUM_MINI_BATCHES, measure
from recorded_ray import recorded_ray


@pytest.mark.parametrize("ranks", [8, 16])
def test_each_call_is_pickled_once_for_all_its_ranks(ranks: int) -> None:
    with recorded_ray() as recorded:
        found = measure(recorded, ranks)
    num_calls = 5 + 2 * NUM_MINI_BATCHES
    assert found["messages"] == num_calls * ranks + 1  # advantages on one rank
    assert found["pickled"] == num_calls + 1
