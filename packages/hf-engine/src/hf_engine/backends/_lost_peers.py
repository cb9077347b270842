"""What torch.distributed says when another rank died or did not come, in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hf_protocols.errors import BackendError, ReshardError

__all__ = ["is_of_a_lost_peer", "lost_peers_are_errors"]

# gloo's errors have no class of their own. Most name its source files; the one of a rank that had a pair closed by its
# own deadline says nothing else.
_OF_GLOO = ("gloo", "Application timeout caused pair closure")


@contextmanager
def lost_peers_are_errors(method: str) -> Iterator[None]:
    """Names the method whose collective failed because a rank died or did not come within the groups' deadline.

    Raises:
        BackendError: in place of torch.distributed's error.
    """
    try:
        yield
    except (RuntimeError, ReshardError) as error:
        reason = error.__cause__ if isinstance(error, ReshardError) else error
        if not is_of_a_lost_peer(reason):
            raise
        raise BackendError(
            f"{method} lost another rank on rank {dist.get_rank()}: {reason}; that rank's own error says why. The "
            "process groups cannot be used again: start the ranks anew from a checkpoint. A rank that was only slow "
            "needs a longer timeout of init_process_group"
        ) from error


def is_of_a_lost_peer(error: BaseException | None) -> bool:
    """Whether torch.distributed raised it because another rank died or did not come."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _OF_GLOO)
