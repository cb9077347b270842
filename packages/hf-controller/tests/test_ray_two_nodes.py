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
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerError, register
from hf_controller import RayExecutor, ResourcePool, WorkerSpec
from hf_controller.testing import ProbeWorker

class Located(ProbeWorker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def node(self):
        return ray.get_runtime_context().get_node_id()

def batch(rows):
    tokens = torch.nested.nested_tensor([torch.arange(row + 1) for row in range(rows)], layout=torch.jagged)
    return TensorDict({"x": torch.arange(float(rows)), "row": torch.arange(rows), "tokens": tokens}, batch_size=[rows])

def from_afar(executor, method):
    return {span.rank: span.bytes_from_afar for span in executor.trace.drain() if span.method == method}

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 80 * 2**20})
second = cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20)
with RayExecutor(address=cluster.address, call_timeout_s=60, collective_timeout_s=20) as executor:
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
    assert from_afar(executor, "add") == {rank: 0 if node == head else 2 * 4 for rank, node in enumerate(nodes)}

    # Between groups: rows 0..3 lie on one machine, 4..7 on the other.
    made = spread.echo(batch(8))
    made.wait()
    executor.trace.drain()
    for solo in (a, b):
        solo.center(made.select(["x"])).wait()
        assert from_afar(executor, "center") == {0: 4 * 4}
        solo.echo(made.select(["tokens", "x"]).rows([7, 2, 2, 1])).wait()
        far_rows = [row for row in (7, 2, 1) if nodes[row // 2] != solo.node().result()[0]]
        assert from_afar(executor, "echo") == {0: sum(8 * (row + 1) + 4 for row in far_rows)}
    result = a.echo(made.rows([7, 0, 3, 4])).result()
    assert result["row"].tolist() == [7, 0, 3, 4]
    assert [row.tolist() for row in result["tokens"].unbind()] == [list(range(row + 1)) for row in (7, 0, 3, 4)]
    print("moved", flush=True)

    lost = spread.step(batch(8), seconds=30.0)
    cluster.remove_node(second, allow_graceful=False)
    try:
        lost.result()
    except WorkerError as error:
        assert error.rank == (2 if nodes[0] == head else 0) or error.rank == (3 if nodes[0] == head else 1), error
        assert f"process spread/{error.rank} is gone" in str(error), error
        print("lost", flush=True)
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"moved", "lost"} <= set(done.stdout.splitlines()), done.stdout + done.stderr
