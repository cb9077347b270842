"""A cluster of two raylets: what moves between them is what the routes say, and losing one ends in a typed error."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import ray
from ray.cluster_utils import Cluster
from tensordict import TensorDict
from hf_protocols import ONE_TO_ALL, ParallelSpec, PoolError, Topology, WorkerError, register
from hf_controller import RayExecutor, ResourcePool, WorkerSpec, rebuild
from hf_controller.testing import ProbeWorker

class Located(ProbeWorker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def node(self):
        return ray.get_runtime_context().get_node_id()

def batch(rows):
    tokens = torch.nested.nested_tensor([torch.arange(row + 1) for row in range(rows)], layout=torch.jagged)
    return TensorDict({"x": torch.arange(float(rows)), "row": torch.arange(rows), "tokens": tokens}, batch_size=[rows])

def remote_bytes_of(executor, method):
    return {span.rank: span.remote_bytes for span in executor.trace.drain() if span.method == method}

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 80 * 2**20})
second = cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20)
with RayExecutor(address=cluster.address, call_timeout_s=60, collective_timeout_s=20) as executor:
    # There would be room for both ranks on one machine.
    two = ResourcePool([1, 1], device="cpu", name="two")
    spec = WorkerSpec(worker=Located, topology=Topology(ParallelSpec(dp_size=2)))
    assert len(set(executor.build_groups(two, {"two": spec})["two"].node().result())) == 2
    executor.release(two)
    try:
        executor.build_groups(ResourcePool([1, 1, 1], device="cpu", name="three"), {"three": WorkerSpec(
            worker=Located, topology=Topology(ParallelSpec(dp_size=3)))})
    except PoolError as error:
        assert "on 2 machine(s): it has fewer than 3 machines" in str(error), error

    machines = {"spread": [2, 2], "a": [1], "b": [1]}
    pools = [ResourcePool(slots, device="cpu", name=name) for name, slots in machines.items()]
    spread, a, b = (
        executor.build_groups(
            pool,
            {pool.name: WorkerSpec(worker=Located, topology=Topology(ParallelSpec(dp_size=pool.num_slots)))},
            wait=False,
        )[pool.name]
        for pool in pools
    )
    executor.wait_until_ready()
    nodes = spread.node().result()
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {*a.node().result(), *b.node().result()} == set(nodes)
    assert spread.sum_of_ranks().result() == [6.0] * 4

    # From the controller: each rank on the other machine asks for its own rows of the columns that it reads.
    head = ray.get_runtime_context().get_node_id()
    assert spread.add(batch(8)).result()["y"].tolist() == [float(row) for row in range(8)]
    assert remote_bytes_of(executor, "add") == {rank: 0 if node == head else 2 * 4 for rank, node in enumerate(nodes)}

    # Between groups: rows 0..3 lie on one machine, 4..7 on the other.
    made = spread.echo(batch(8))
    made.wait()
    executor.trace.drain()
    for solo in (a, b):
        solo.center(made.select(["x"])).wait()
        assert remote_bytes_of(executor, "center") == {0: 4 * 4}
        solo.echo(made.select(["tokens", "x"]).rows([7, 2, 2, 1])).wait()
        far_rows = [row for row in (7, 2, 1) if nodes[row // 2] != solo.node().result()[0]]
        assert remote_bytes_of(executor, "echo") == {0: sum(8 * (row + 1) + 4 for row in far_rows)}
    result = a.echo(made.rows([7, 0, 3, 4])).result()
    assert result["row"].tolist() == [7, 0, 3, 4]
    assert [row.tolist() for row in result["tokens"].unbind()] == [list(range(row + 1)) for row in (7, 0, 3, 4)]
    print("moved", flush=True)

    (a_node,) = a.node().result()
    lost = spread.step(batch(8), seconds=30.0)
    cluster.remove_node(second, allow_graceful=False)
    try:
        lost.result()
    except WorkerError as error:
        assert error.rank == (2 if nodes[0] == head else 0) or error.rank == (3 if nodes[0] == head else 1), error
        assert f"process spread/{error.rank} is gone" in str(error), error
        print("lost", flush=True)

    near = a if a_node == head else b
    try:
        near.echo(made).result()
    except WorkerError as error:
        assert "an earlier call's result is lost" in str(error) or "is gone" in str(error), error
        print("object lost", flush=True)
    try:
        rebuild(executor, [spread.pool])
    except PoolError as error:
        assert "asks for 2 + 2 slots" in str(error), error
        print("shrunk", flush=True)
    executor.release((b if near is a else a).pool)  # Ray gave its slot a new place
    smaller = ResourcePool([2], device="cpu", name="smaller")
    again = executor.build_groups(smaller, {"again": spec})["again"]
    assert again.sum_of_ranks().result() == [1.0] * 2
    assert near.echo(batch(2)).result()["row"].tolist() == [0, 1]
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"moved", "lost", "object lost", "shrunk"} <= set(done.stdout.splitlines()), done.stdout + done.stderr
