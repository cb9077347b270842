"""The default process group of a host, and the generators' seeds: what a worker finds when it is constructed."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["Rendezvous", "join_default_group", "open_rendezvous", "seed_generators"]


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a host set meet; None of both for a single rank, which meets nobody."""

    address: str
    port: int


def open_rendezvous(address: str) -> tuple[Rendezvous, Any]:
    """Listen on a free port of ``address`` (no race: the system chooses it). Keep the second answer alive."""
    from torch import distributed

    store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return Rendezvous(address, store.port), store


def join_default_group(
    rank: int,
    world_size: int,
    *,
    device: str,
    timeout_s: float,
    rendezvous: Rendezvous | None = None,
    store: Any = None,
    on_one_machine: bool = True,
) -> None:
    """Make ``torch.distributed``'s default group of the host set: gloo on the CPU, nccl on GPUs.

    Args:
        rank: this rank.
        world_size: ranks of the host set.
        device: ``"cpu"`` or a CUDA device.
        timeout_s: deadline of every collective.
        rendezvous: where to meet; None with one rank.
        store: the store itself on the rank that opened it.
        on_one_machine: whether all ranks share a machine; gloo then talks over the loopback interface, which needs no
            name resolution.
    """
    import torch
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store = distributed.HashStore()  # type: ignore[attr-defined]
    elif store is None:
        assert rendezvous is not None
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            rendezvous.address, rendezvous.port, is_master=False, timeout=timeout
        )
    if on_one_machine and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def seed_generators(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generator."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
