"""Process groups and devices of a rank: the only place that creates groups, and that uses torch's internals of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_protocols.errors import BackendError, HybridFlowError, TopologyError
from hf_protocols.topology import Axis, Topology
from hf_protocols.validation import Checks, show

__all__ = [
    "build_groups",
    "default_group",
    "default_timeout",
    "find_machines",
    "is_alive",
    "keeping_random_numbers",
    "local_device",
    "rank_in",
    "refuse_unused_devices",
    "require_process_group",
    "sum_over_group",
    "wait_for_connections",
    "wait_for_device",
    "world_group",
]

_check = Checks(TopologyError)

_SETTLING_S = 0.2
"""A thread of gloo that has just ended a collective frees tensors, for which it needs Python. Where Python ends
meanwhile, the process aborts: torchrun would report exit code -6, not 1. Here it has time to finish.
"""


def require_process_group(error: type[HybridFlowError]) -> None:
    """Refuses, with this error, a process that has no default process group."""
    if not dist.is_initialized():
        raise error("torch.distributed has no default process group. Call torch.distributed.init_process_group first")


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group (None: the default group), also in a group that joins ranks of two worlds.

    `torch.distributed.get_rank(group)` looks it up by the global rank, but ranks of the other world have the same ones.
    """
    return dist.get_rank() if group is None else int(group.rank())


@contextmanager
def default_group(backend: Literal["gloo", "nccl"] | None = None, *, timeout_s: float) -> Iterator[None]:
    """The default process group of a program that torchrun started, from its start to its end. Collective.

    A failure inside the block goes to this rank's error file, from which torchrun reports rank, reason and exit code.
    Then torchrun ends the other ranks.

    Example:
        with default_group(timeout_s=600):
            train()

    Args:
        backend: torch.distributed's; None is NCCL where there are CUDA devices, else gloo.
        timeout_s: how long a collective may wait for a rank; after that, a rank that is stopped is an error on the
            others.

    Raises:
        TopologyError: for a deadline that is not a number above 0.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    _check.number("timeout_s", timeout_s)
    handler = get_error_handler()
    handler.initialize()
    with ExitStack() as failing:
        failing.push(partial(_record, handler))
        chosen = backend or ("nccl" if local_device().type == "cuda" else "gloo")
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))
        yield
        dist.destroy_process_group()


def _record(handler: Any, _kind: object, error: BaseException | None, _trace: object) -> None:
    if error is not None:
        handler.record_exception(error)
        time.sleep(_SETTLING_S)


def build_groups(topology: Topology, axis: Axis) -> dist.ProcessGroup:
    """Creates every group of `axis` and returns the one that this rank is in. Collective over all ranks.

    Members are in the axis's order; global ranks are the topology's ranks. A group of all ranks in rank order is
    the default group itself, so that it costs no connections. Collectives of the new groups may wait as long as those
    of the default group.

    Args:
        topology: the ranks; its world size is the default group's.
        axis: any axis that `topology.groups` knows.

    Raises:
        TopologyError: if the default group has another number of ranks; for what is not a topology.
    """
    _check.kind("topology", topology, Topology, "a Topology, such as Topology(ParallelSpec(dp_size=2))")
    require_process_group(TopologyError)
    if dist.get_world_size() != topology.world_size:
        raise TopologyError(
            f"the topology has {topology.world_size} ranks, the default process group {dist.get_world_size()}. "
            "Start as many processes as the topology names"
        )
    # torch would give a new group half an hour, even if the caller chose another timeout for the default one.
    timeout = default_timeout()
    own: dist.ProcessGroup | None = None
    for ranks in topology.groups(axis):
        if ranks == tuple(range(topology.world_size)):
            return world_group()
        group = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None, "every rank is in one group of every axis"
    wait_for_connections()
    return own


def wait_for_connections() -> None:
    """Waits until every rank has made its groups. Collective over all ranks.

    In torch a rank continues once its own connections stand. Such a rank may be refused for another reason, and would
    then destroy its groups at once. A rank that still connects to it over gloo would report a lost peer instead of that
    reason.
    """
    dist.all_reduce(torch.zeros(1, device=local_device()))


def sum_over_group(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Adds each value over the ranks of a group in float64; every rank gets the sums. Collective where it has several.

    Args:
        values: of this rank, as many on every rank.
        group: the ranks.
        device: where the group communicates.
    """
    if dist.get_world_size(group) == 1:
        return [float(each) for each in values]
    sums = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    added: list[float] = sums.tolist()
    return added


def default_timeout() -> timedelta:
    """Returns the timeout of collectives of the default process group."""
    timeout: timedelta = world_group()._get_backend(local_device()).options._timeout
    return timeout


def world_group() -> dist.ProcessGroup:
    """Returns the default process group.

    Raises:
        ValueError: if there is none.
    """
    return dist.distributed_c10d._get_default_group()


def is_alive(group: dist.ProcessGroup) -> bool:
    """True for a group that was not destroyed, alone or with all others."""
    return group in dist.distributed_c10d._world.pg_map


def local_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of this rank in a group, whose communication it can take part in.

    It is the host without CUDA, or where the group communicates over gloo alone. Else it is the CUDA device numbered
    LOCAL_RANK, which becomes the current one; without that variable, the current one.

    Args:
        group: None is the default group. Without one the device is that of a group that communicates over NCCL.

    Raises:
        TopologyError: where the variable holds no number of a device.
    """
    if not torch.cuda.is_available() or _is_on_hosts(group):
        return torch.device("cpu")
    text, count = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if text is None:
        return torch.device("cuda", torch.cuda.current_device())
    if not text.isdecimal() or int(text) >= count:
        raise TopologyError(
            f"LOCAL_RANK={show(text)}: torchrun sets it to the rank's number on its machine, which has {count} CUDA "
            "devices. Start no more ranks on a machine, and show them no fewer in CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", int(text))
    torch.cuda.set_device(device)
    return device


def refuse_unused_devices(backend: str) -> None:
    """Refuses a default group over gloo in a process that sees CUDA devices, on which a backend would compute.

    Raises:
        BackendError: naming the backend.
    """
    if torch.cuda.is_available() and local_device().type == "cpu":
        raise BackendError(
            f"backend {show(backend)} computes on the CUDA devices that it sees, and the process group communicates "
            "over gloo, between hosts. Make the group with NCCL, or set CUDA_VISIBLE_DEVICES to an empty text"
        )


def _is_on_hosts(group: dist.ProcessGroup | None) -> bool:
    """True for a group that communicates over gloo alone, which has a backend for each kind of device."""
    if not dist.is_initialized():
        return False
    backends = dist.get_backend_config(group).split(",")
    return {each.rpartition(":")[2] for each in backends} == {"gloo"}


@contextmanager
def keeping_random_numbers() -> Iterator[None]:
    """Restores the random numbers of the host and of this rank's device after the block."""
    device = local_device()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def find_machines(group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Returns the ranks of a group that share a machine, for each machine, by their numbers in the group. Collective.

    Ranks with one host name are on one machine.
    """
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        machines.setdefault(name, []).append(rank)
    return [*machines.values()]


def wait_for_device() -> None:
    """Waits for the kernels of this rank's device, so that a clock read afterwards has seen them."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
