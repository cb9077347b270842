"""Process groups of `torch.distributed`: the default one of an actor group, joint ones of two groups, and the seeds.

No other module of this package uses torch's internals of process groups.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hf_protocols import WorkerTimeoutError

__all__ = [
    "Rendezvous",
    "call_off",
    "is_only_group",
    "join_default_group",
    "join_joint_group",
    "leave_joint_group",
    "name_group",
    "open_rendezvous",
    "plain_tracebacks",
    "seed_generators",
]

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of linux/sockios.h
_ARRIVED, _CALLED_OFF = "arrived", "called off"
_POLL_S = 0.02
_GRACE_S = 0.5


@dataclass(frozen=True)
class Rendezvous:
    """Meeting point of ranks.

    Attributes:
        address: of the rank that listens.
        port: where it listens.
        token: distinguishes it from an earlier one at the same address and port.
    """

    address: str
    port: int
    token: str


def open_rendezvous(address: str, token: str) -> tuple[Rendezvous, Any]:
    """Listens on a free port of `address`, chosen by the system. Keep the second returned value, the store, alive."""
    from torch import distributed

    listener = _listen(address)
    port = listener.getsockname()[1]
    # A socket of the store's own would listen on every interface of the machine.
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return Rendezvous(address, port, token), store


def join_default_group(
    rank: int,
    world_size: int,
    *,
    device: str,
    timeout_s: float,
    meeting_timeout_s: float | None = None,
    rendezvous: Rendezvous | None = None,
    store: Any = None,
    on_one_machine: bool = True,
) -> None:
    """Makes `torch.distributed`'s default group of an actor group: gloo on the CPU, nccl on GPUs.

    Args:
        rank: this rank.
        world_size: ranks of the actor group.
        device: `"cpu"` or a CUDA device.
        timeout_s: deadline of every collective.
        meeting_timeout_s: deadline of the other ranks' arrival, whose processes may start late; None: `timeout_s`.
        rendezvous: where to meet; None with one rank.
        store: the store itself on the rank that opened it.
        on_one_machine: whether all ranks share a machine.
    """
    import torch
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store = distributed.HashStore()  # type: ignore[attr-defined]
    if device != "cpu":
        torch.cuda.set_device(device)
    # It stays chosen for the groups that workers make later.
    interface = _choose_interface(rendezvous, on_one_machine)
    if interface is not None:
        os.environ.setdefault(_INTERFACE, interface)
    if store is None:
        store = _connect(rendezvous, timeout)
    store.set(f"arrived/{rank}", "")
    meeting = timeout if meeting_timeout_s is None else timedelta(seconds=meeting_timeout_s)
    store.wait([f"arrived/{each}" for each in range(world_size)], meeting)
    with plain_tracebacks():
        distributed.init_process_group(
            _backend(device),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


@contextmanager
def plain_tracebacks() -> Iterator[None]:
    """Restores `sys.excepthook` afterwards: a new default group makes it put its rank before each line, for ever."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def join_joint_group(
    name: str,
    rank: int,
    world_size: int,
    *,
    device: str,
    timeout_s: float,
    rendezvous: Rendezvous,
    store: Any = None,
    on_one_machine: bool = True,
) -> Any:
    """Makes a process group in addition to the default one, of ranks that have no default group in common.

    Ranks in it are joint ranks, as an argument of `torch.distributed`'s functions too (`src`, `dst`). `device`
    is `"cpu"` for gloo or a CUDA device for nccl; the other arguments are those of `join_default_group`.
    """
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=timeout_s)
    with _reaching(rendezvous, on_one_machine):
        met = c10d.PrefixStore(name, store or _connect(rendezvous, timeout))
        _await_others(met, world_size, timeout_s)
        # The public constructors need one default group over all ranks, and these come from two.
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(_backend(device)),
            met,
            group_name=c10d.GroupName(name),
            timeout=timeout,
        )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def call_off(name: str, store: Any) -> None:
    """Wakes the ranks that wait for others in a joint group's `store`: they get an error.

    This takes a moment, after which the store may be dropped. A rank that found no store would retry until its
    deadline.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d.PrefixStore(name, store).set(_CALLED_OFF, "")
    time.sleep(_GRACE_S)


def _await_others(store: Any, world_size: int, timeout_s: float) -> None:
    """Waits until every rank has arrived. The backend's own wait could not be cancelled."""
    ends_s = time.monotonic() + timeout_s
    store.add(_ARRIVED, 1)
    while (arrived := store.add(_ARRIVED, 0)) < world_size:
        if store.check([_CALLED_OFF]):
            raise WorkerTimeoutError("the connection was given up")
        if time.monotonic() > ends_s:
            raise WorkerTimeoutError(
                f"{arrived} of {world_size} ranks met within {timeout_s:g} s. Raise collective_timeout_s (of a run: "
                "cluster.call_timeout_s)"
            )
        time.sleep(_POLL_S)


def leave_joint_group(group: Any) -> None:
    """Destroys a joint group with its threads and sockets; no other rank has to take part."""
    from torch import distributed

    distributed.destroy_process_group(group)


def is_only_group(group: Any) -> bool:
    """True if `group` is the default group of this process, and its only group."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._world.default_pg is group and len(c10d._world.pg_map) == 1


def name_group(group: Any, name: str) -> None:
    """Gives a process group that is not one of torch's the name that torch looks it up by."""
    group._set_group_name(name)


def seed_generators(seed: int) -> None:
    """Seeds Python's, torch's and, where it is loaded, numpy's global generator."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _backend(device: str) -> str:
    return "gloo" if device == "cpu" else "nccl"


def _connect(rendezvous: Rendezvous | None, timeout: timedelta) -> Any:
    from torch import distributed

    assert rendezvous is not None
    return distributed.TCPStore(  # type: ignore[attr-defined]
        rendezvous.address, rendezvous.port, is_master=False, timeout=timeout
    )


def _listen(address: str) -> socket.socket:
    """A socket that listens on this address alone."""
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.bind(place)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _choose_interface(rendezvous: Rendezvous | None, on_one_machine: bool) -> str | None:
    """By default gloo uses the interface to which the machine's name resolves: on many machines the loopback interface.

    On one machine loopback is right, and no name has to be resolved. Between machines the right interface is the one
    that reaches the rendezvous.
    """
    if sys.platform != "linux":
        return None
    return "lo" if rendezvous is None or on_one_machine else _find_interface(rendezvous.address)


def _find_interface(address: str) -> str | None:
    """Name of the interface by which this machine reaches the IPv4 `address`; None if it cannot be determined."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


@contextmanager
def _reaching(rendezvous: Rendezvous, on_one_machine: bool) -> Iterator[None]:
    """Without the loopback interface where ranks of other machines are to be reached."""
    chosen = os.environ.get(_INTERFACE)
    if on_one_machine or chosen != "lo":
        yield
        return
    interface = _choose_interface(rendezvous, on_one_machine)
    if interface is None:
        del os.environ[_INTERFACE]
    else:
        os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ[_INTERFACE] = chosen
