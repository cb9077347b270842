"""A block that all ranks get through, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hf_engine.lost_peers import is_of_a_lost_peer
from hf_engine.process_groups import local_device
from hf_engine.resharding.agreement import HIGHEST, refuse_together, spread
from hf_protocols.errors import BackendError

__all__ = ["all_or_none", "what_came_first"]


@contextmanager
def all_or_none(outcome: str) -> Iterator[None]:
    """A block that all ranks get through, or none. Collective at its end, over the default group.

    Nobody can be in a collective of the block when one fails: else see `failures_end_all`. The reasons travel only
    where there are some.

    Args:
        outcome: what comes of it where a rank failed: `"no rank generates"`.

    Raises:
        BackendError: on the ranks that did not fail, naming those that did and why. Not for a lost rank: nobody could
            be told.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        if is_of_a_lost_peer(error):
            raise
        refusal = error
    number = 0 if refusal is None else HIGHEST
    with what_came_first(refusal):
        _, highest = spread(number, number, None, local_device())
        if highest == HIGHEST:
            refuse_together(refusal, None, range(dist.get_world_size()), BackendError, outcome)


@contextmanager
def what_came_first(failure: Exception | None) -> Iterator[None]:
    """A rank tells others that it failed: it says so itself, also where it could not because one of them is gone."""
    try:
        yield
    except Exception as error:
        if failure is None or error is failure or not is_of_a_lost_peer(error):
            raise
        raise failure from failure.__cause__
