"""A port that stops to take connections, and one that is closed for a moment."""

from __future__ import annotations

import socket

from hf_controller.executors.ray.cluster import Reachability


def test_a_closed_port_is_lost_after_several_looks() -> None:
    now = [0.0]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    reachability = Reachability(f"127.0.0.1:{port}", lambda: now[0])

    def look(num: int) -> list[str]:
        found = []
        for _ in range(num):
            now[0] += 2.0
            found.append(reachability.find_loss())
        return found

    assert look(3) == ["", "", ""]
    listener.close()
    assert look(2) == ["", ""]
    with socket.create_server(("127.0.0.1", port)):
        assert look(2) == ["", ""]
    refused = look(3)
    assert refused[:2] == ["", ""] and "refused" in refused[2]
    assert reachability.find_loss() == refused[2]
