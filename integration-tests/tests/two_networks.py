"""Program of test_cluster_page.py: two networks with a cable between them, and in each of them a node started as
docs/how-to/cluster.md says. Every byte between the nodes passes the cable's counters.

It runs alone in a namespace of its own for networks and processes, which ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict

from hf_algorithms.cli import main
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec
from hf_protocols import DP, ONE_TO_ALL, RANK_ZERO, ParallelSpec, RowSelection, Topology, register, route

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md"
HEAD, SECOND = "10.0.0.1", "10.0.0.2"
ROW_BYTES = 2**20
NUM_ROWS = 32
# of linux/if_tun.h
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


class Mover(Worker):
    @register(protocol=DP, reads=["x"], writes=["y"])
    def double(self, batch):
        return TensorDict({"y": 2 * batch["x"]}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, reads=["y"], returns="object")
    def total(self, batch):
        return batch["y"].double().sum().item()

    @register(protocol=ONE_TO_ALL, returns="object")
    def network(self):
        # The namespace, for both nodes see the same files.
        return os.readlink("/proc/self/ns/net")


def sh(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


def lay_cable() -> list[str]:
    """A second network; the words before a command that is to run in it.

    The ends are two taps, and a process that hands frames from one to the other: not every kernel has veth.
    """
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    deadline_s = time.monotonic() + 10
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    there = ["nsenter", "--target", str(holder.pid), "--net"]
    ends = [open_tap("cable"), open_tap("cable-there")]
    sh("ip", "link", "set", "cable-there", "netns", str(holder.pid))
    sh(*there, "ip", "link", "set", "cable-there", "name", "cable")
    if os.fork() == 0:
        hand_over(ends)
    for where, own, other in (([], HEAD, SECOND), (there, SECOND, HEAD)):
        sh(*where, "ip", "address", "add", f"{own}/24", "dev", "cable")
        sh(*where, "ip", "link", "set", "lo", "up")
        sh(*where, "ip", "link", "set", "cable", "mtu", "9000", "up")
        sh(*where, "ip", "route", "add", "default", "via", other)
    return there


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def hand_over(ends: Sequence[int]) -> None:
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        for end in select.select(ends, [], [])[0]:
            with contextlib.suppress(OSError):  # before both ends are up
                os.write(other[end], os.read(end, 2**16))


def bytes_on_cable() -> int:
    """Both ways."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("cable:")]
    counters = line.partition(":")[2].split()
    return int(counters[0]) + int(counters[8])


def start_nodes(there: Sequence[str]) -> None:
    """The page's two commands, each in its network."""
    first, second = re.findall(r"^ray start .*--block$", PAGE.read_text(), re.MULTILINE)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(first.split(), **quiet)
    deadline_s = time.monotonic() + 60
    while socket.socket().connect_ex((HEAD, 6379)):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    subprocess.Popen([*there, *second.split()], **quiet)


def move_batches() -> None:
    with RayExecutor(address=f"{HEAD}:6379", call_timeout_s=60, start_timeout_s=90) as executor:
        import ray

        deadline_s = time.monotonic() + 60
        while sum(node["Alive"] for node in ray.nodes()) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        spec = WorkerSpec(worker=Mover, topology=Topology(ParallelSpec(dp_size=2)))
        group = executor.build_groups(ResourcePool([1, 1], device="cpu", name="movers"), {"movers": spec})["movers"]
        networks = group.network().result()
        assert len(set(networks)) == 2
        here = networks.index(os.readlink("/proc/self/ns/net"))
        for rank, text in executor.describe(group).items():
            assert f" on {HEAD if rank == here else SECOND} (" in text, text

        batch = executor.put(TensorDict({"x": torch.ones(NUM_ROWS, ROW_BYTES // 4)}, batch_size=[NUM_ROWS]))
        shares = DP.distribute(group.topology, NUM_ROWS)
        group.double(executor.put(TensorDict({"x": torch.ones(2, 1)}, batch_size=[2]))).wait()

        from_controller = route({0: RowSelection.range(0, NUM_ROWS)}, [shares[1 - here]])
        before = bytes_on_cable()
        doubled = group.double(batch)
        doubled.wait()
        check("controller to ranks", bytes_on_cable() - before, from_controller.bytes_moved(ROW_BYTES))

        to_rank_zero = route(dict(enumerate(shares)), RANK_ZERO.distribute(group.topology, NUM_ROWS))
        far = sum(len(piece.rows) for piece in to_rank_zero.pieces[0] if networks[piece.producer] != networks[0])
        before = bytes_on_cable()
        assert group.total(doubled).result() == 2.0 * NUM_ROWS * (ROW_BYTES // 4)
        check("ranks to rank", bytes_on_cable() - before, far * ROW_BYTES)


def check(what: str, counted: int, expected: float) -> None:
    """At most 3 % and 1 MiB more: headers, acknowledgements, the calls themselves and what Ray says anyway."""
    print(what, counted, int(expected), flush=True)
    assert expected > 0
    assert expected <= counted <= 1.03 * expected + 2**20, (what, counted, expected)


if __name__ == "__main__":
    start_nodes(lay_cable())
    move_batches()
    sys.argv = ["hybridflow", *sys.argv[1:]]
    main()
