"""Batches that do not fit in the object store of a local cluster: Ray moves them to files, and one line says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from hf_controller.executors.ray.spilling import SpillCheck

PROGRAM = """
import sys
from pathlib import Path
import ray
import torch
from tensordict import TensorDict
from hf_protocols import DP, ParallelSpec, Topology, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec

class Link(Worker):
    @register(protocol=DP, rows="unknown")
    def make(self, num_rows):
        return TensorDict({"x": torch.ones(num_rows, 2**18)}, batch_size=[num_rows])

    @register(protocol=DP)
    def hand_on(self, batch):
        return TensorDict({"x": batch["x"].clone()}, batch_size=batch.batch_size)

    @register(protocol=DP, returns="metrics")
    def read(self, batch):
        return {"mean": (batch["x"].mean().item(), 1)}

given = {"object_store_bytes": int(sys.argv[1])} if len(sys.argv) > 1 else {}
with RayExecutor(num_cpus=6, call_timeout_s=300.0, **given) as executor:
    spec = WorkerSpec(worker=Link, topology=Topology(ParallelSpec(dp_size=2)))
    first, second, last = (
        executor.build_groups(ResourcePool([2], device="cpu", name=name), {name: spec})[name] for name in "abc"
    )
    made = first.make(256)  # MiB, of each of two ranks
    handed = second.hand_on(made)
    assert last.read(handed).result()["mean"] == 1.0
    assert last.read(made).result()["mean"] == 1.0
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    print(sum("ray_spilled_objects" in str(each) for each in session.rglob("*")), "in the folders of spilled objects")
"""


@pytest.mark.slow
@pytest.mark.parametrize("store_bytes", [None, 512 << 20])
def test_two_arrays_of_512_mb_stay_in_memory_by_default(store_bytes):
    words = [] if store_bytes is None else [str(store_bytes)]
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    num_warnings = done.stderr.count(f"cluster.object_store_bytes={store_bytes} ")
    is_spilled = not done.stdout.startswith("0 in the folders")
    assert (is_spilled, num_warnings) == ((False, 0) if store_bytes is None else (True, 1)), (done.stdout, done.stderr)


def test_spilling_names_the_key_of_the_size(tmp_path, caplog):
    check = SpillCheck([str(tmp_path / "absent"), str(tmp_path)], 100 << 20)
    (tmp_path / "logs").mkdir()
    assert not check.look()
    assert not caplog.records
    (tmp_path / "ray_spilled_objects_1f").mkdir()  # what was in it is freed again
    assert check.look()
    (line,) = caplog.messages
    assert line.startswith(
        "cluster.object_store_bytes=104857600 (RayExecutor(object_store_bytes=...)): the object store"
    )
    assert f"to files in '{tmp_path}'" in line


def test_a_batch_above_the_store_is_announced_once(ray_executor, monkeypatch, caplog):
    monkeypatch.setattr(ray_executor._cluster, "_spilling", SpillCheck([], 4096))
    ray_executor.put(TensorDict({"x": torch.ones(8, 128)}, batch_size=[8]))
    assert not caplog.records
    for _ in range(2):
        batch = ray_executor.put(TensorDict({"x": torch.ones(8, 128), "y": torch.ones(8)}, batch_size=[8]))
    (line,) = caplog.messages
    assert line.startswith(
        "cluster.object_store_bytes=4096 (RayExecutor(object_store_bytes=...)): a batch of 4128 bytes"
    )
    assert batch.result()["x"].sum() == 1024
