from __future__ import annotations

import inspect
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d as c10d

from hf_controller.groups.default_group import Rendezvous, _choose_interface, open_rendezvous


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_the_interface_is_the_one_that_reaches_the_rendezvous():
    assert _choose_interface(None, on_one_machine=False) == "lo"
    assert _choose_interface(Rendezvous("192.0.2.1", 1, "token"), on_one_machine=True) == "lo"
    assert _choose_interface(Rendezvous("127.0.0.1", 1, "token"), on_one_machine=False) == "lo"
    assert _choose_interface(Rendezvous("no such address", 1, "token"), on_one_machine=False) is None


def test_internals_of_this_torch_are_known():
    inspect.signature(c10d._new_process_group_helper).bind(2, 0, [], "gloo", None, group_name="", timeout=None)
    assert hasattr(c10d._world, "default_pg") and callable(c10d.ProcessGroup._set_group_name)
    assert isinstance(c10d._world.pg_map, dict) and isinstance(c10d._world.pg_group_ranks, dict)


@pytest.mark.skipif(sys.platform != "linux", reason="files of Linux")
def test_a_rendezvous_listens_at_its_address_alone():
    before = list_listeners()
    rendezvous, store = open_rendezvous("127.0.0.1", "token")
    assert list_listeners() - before == {("tcp", "127.0.0.1", rendezvous.port)}
    socket.create_connection(("127.0.0.1", rendezvous.port), timeout=10).close()
    del store
    assert list_listeners() == before


def list_listeners() -> set[tuple[str, str, int]]:
    """Sockets on which this process listens: protocol, address of IPv4 or "", and port."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself is gone
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for protocol in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", protocol).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                host, _, port = local.partition(":")
                address = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if protocol == "tcp" else ""
                found.add((protocol, address, int(port, 16)))
    return found
