"""Members that run a plan: the ranks of a process group and the device on which they communicate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_engine.process_groups import local_device, rank_in, require_process_group
from hf_protocols.errors import ReshardError
from hf_protocols.validation import are_whole, show

__all__ = ["choose_device", "find_members"]


def choose_device(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device | str:
    """Returns where a group's messages live: a given device, or else that of this rank in the group.

    Raises:
        ReshardError: for a device on which nothing can be sent.
    """
    if device is None:
        return local_device(group)
    try:
        is_meta = torch.empty(0, device=device).is_meta
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ReshardError(f"device={show(device)} cannot be used: {error}") from error
    if is_meta:
        raise ReshardError(f"device={show(device)} holds no bytes. Use the CPU or a GPU")
    return device


def find_members(group: dist.ProcessGroup | None, ranks: Sequence[int] | None) -> tuple[tuple[int, ...], int]:
    """The plan ranks of a group, in its order, and the one of this process.

    Args:
        group: None is the default group.
        ranks: plan rank of every group rank; None: they are the global ranks.

    Raises:
        ReshardError: without a process group, in a process outside of the group, or for other than one plan rank for
            every group rank.
    """
    require_process_group(ReshardError)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ReshardError(
            f"group={show(group)}. Use a process group that this rank is in, or None for the default one"
        )
    global_ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    own = rank_in(group)
    if ranks is None:
        return global_ranks, global_ranks[own]
    if not are_whole(ranks) or len({*ranks}) != len(ranks) or len(ranks) != len(global_ranks):
        raise ReshardError(
            f"ranks={show(ranks)}. Use one plan rank for each of the {len(global_ranks)} ranks of the group, "
            "all different"
        )
    return tuple(ranks), ranks[own]
