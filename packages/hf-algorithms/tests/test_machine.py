"""Requirements of a run on this machine."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_algorithms.config import parse_config
from hf_algorithms.preflight import machine
from hf_algorithms.preflight.machine import check_machine
from hf_algorithms.rewards import _http
from hf_protocols import ConfigError, MachinePlan, MappingPlan, PoolPlan


def plan_of(kind: str, slots: int) -> MappingPlan:
    pools = {"models": (kind, slots), "reward": ("cpu", 1), "advantage": ("cpu", 1)}
    held = {name: (MachinePlan(gpu_kind=kind, slots=slots),) for name, (kind, slots) in pools.items()}
    return MappingPlan(pools=tuple(PoolPlan(name=name, machines=of) for name, of in held.items()), models={})


def check(monkeypatch: pytest.MonkeyPatch, plan: MappingPlan, *, gib: float, devices: int = 0, **sections: Any) -> None:
    monkeypatch.setattr(machine, "read_machine_limits", lambda: SimpleNamespace(memory_bytes=int(gib * 2**30)))
    monkeypatch.setattr(machine, "check_local_start", lambda num_ranks: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    check_machine(parse_config({"data": {"train": "rows.jsonl"}, **sections}), plan)


def test_processes_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, plan_of("cpu", 6), gib=4)
    with pytest.raises(
        ConfigError, match=r"7 of models \+ 1 of reward \+ 1 of advantage = 9 processes .* need 4.5 GiB"
    ):
        check(monkeypatch, plan_of("cpu", 7), gib=4)
    check(monkeypatch, plan_of("cpu", 7), gib=4, run={"executor": "in_process"})
    check(monkeypatch, plan_of("cpu", 7), gib=4, cluster={"address": "10.0.0.1:6379"})


@pytest.mark.parametrize("executor", ["ray", "in_process"])
def test_devices_must_be_here(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    sections = {"run": {"executor": executor}, "cluster": {"gpu": "h100"}}
    check(monkeypatch, plan_of("h100", 2), gib=64, devices=2, **sections)
    with pytest.raises(ConfigError, match=r"^cluster.gpu = 'h100' needs a CUDA device, and none was found"):
        check(monkeypatch, plan_of("h100", 2), gib=64, **sections)
    with pytest.raises(ConfigError, match=r"the plan needs 2 CUDA devices, and this machine has 1\."):
        check(monkeypatch, plan_of("h100", 2), gib=64, devices=1, **sections)
    sections["cluster"]["address"] = "auto"
    if executor == "ray":
        check(monkeypatch, plan_of("h100", 2), gib=64, **sections)


def test_a_cache_above_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {"options": {"cache_bytes": 10**15}}
    for executor in ("ray", "in_process"):
        with pytest.raises(ConfigError, match=r"rollout.options.cache_bytes = 10+: this machine has \d+ bytes"):
            check(monkeypatch, plan_of("cpu", 1), gib=4, run={"executor": executor}, rollout=rollout)
    check(monkeypatch, plan_of("cpu", 1), gib=4, rollout={"options": {"cache_bytes": 1 << 30}})


def test_an_object_store_above_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"object_store_bytes": 1 << 50}
    with pytest.raises(ConfigError, match=rf"^cluster.object_store_bytes={1 << 50}: this machine has \d+ bytes"):
        check(monkeypatch, plan_of("cpu", 1), gib=4, cluster=given)
    check(monkeypatch, plan_of("cpu", 1), gib=4, cluster=given, run={"executor": "in_process"})
    check(monkeypatch, plan_of("cpu", 1), gib=4, cluster={"object_store_bytes": 100 << 20})


def test_a_server_must_listen_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would wait out the deadline of every response. A cluster elsewhere has other servers on its machines."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        sections: dict[str, Any] = {"reward": {"function": f"http://127.0.0.1:{port}/score"}}
        monkeypatch.setattr(_http, "_CONNECT_S", 0.2)
        words = f"reward.function = 'http://127.0.0.1:{port}/score': cannot connect to 127.0.0.1 at port {port}: "
        with pytest.raises(ConfigError, match="^" + re.escape(words) + "connection refused"):
            check(monkeypatch, plan_of("cpu", 1), gib=4, **sections)
        check(monkeypatch, plan_of("cpu", 1), gib=4, cluster={"address": "10.0.0.1:6379"}, **sections)
        monkeypatch.setattr(_http, "_CONNECT_S", 60.0)
        starts = threading.Timer(0.3, server.listen)
        starts.start()
        check(monkeypatch, plan_of("cpu", 1), gib=4, **sections)
        starts.join()
