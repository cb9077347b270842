"""References that stay packed until they are read; and rows that all readers of a machine see in one memory."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy
import pytest
import ray
import torch
from tensordict import TensorDict

from hf_controller import ResourcePool, Worker, WorkerGroup, WorkerSpec
from hf_controller.executors.ray.store import RayStore
from hf_protocols import (
    ONE_TO_ALL,
    RANK_ZERO,
    BatchError,
    ParallelSpec,
    PoolError,
    Topology,
    WorkerError,
    WorkerTimeoutError,
    register,
)


def test_a_sealed_reference_outlives_the_name_it_was_put_under(ray_executor):
    store = RayStore()
    container = ray.put({"near": store.put([numpy.arange(10**6)]), "far": store.put([numpy.zeros(10**6)])})
    gc.collect()
    received = ray.get(container)
    assert received["near"]._reference is None
    assert store.get([received["near"]], 5.0)[0][0].sum() == sum(range(10**6))
    assert received["far"]._reference is None


def test_a_store_waits_no_longer_than_it_is_asked_to(ray_executor):
    never = ray.remote(resources={"a slot that nobody has": 1})(lambda: 1).remote()
    with pytest.raises(WorkerTimeoutError, match=r"1 earlier calls of the pool were not done after 0\.1 s"):
        RayStore().wait([ray.put(1), never], 0.1)
    ray.cancel(never)


def test_a_closed_store_serves_nobody():
    store = RayStore()
    store.close()
    for use in (
        lambda: store.put([numpy.zeros(1)]),
        lambda: store.get([], 1.0),
        lambda: store.wait([], 1.0),
        lambda: store.request(None, None),
    ):
        with pytest.raises(PoolError, match="this executor is closed"):
            use()


class Place(NamedTuple):
    """Location of a tensor's memory: the mapped file, its sharing, and the tensor's first byte in it."""

    file: tuple[str, int]
    path: str
    permissions: str
    offset: int


def find_place(tensor: torch.Tensor) -> Place:
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, offset, device, inode, *path = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if start <= tensor.data_ptr() < stop:
                within = int(offset, 16) + tensor.data_ptr() - start
                return Place((device, int(inode)), path[0] if path else "", permissions, within)
    raise AssertionError("no memory of this process")


class Sharer(Worker):
    needs_process_group = False

    @register(protocol=RANK_ZERO)
    def make(self, width):
        x = torch.arange(4.0 * width).view(4, width)
        tokens = torch.nested.nested_tensor([x[row, : row + 1] for row in range(4)], layout=torch.jagged)
        return TensorDict({"x": x, "tokens": tokens, "unread": torch.zeros(4)}, batch_size=[4])

    @register(protocol=ONE_TO_ALL, returns="object", reads=["x", "tokens"])
    def find(self, batch):
        return os.getpid(), find_place(batch["x"]), find_place(batch["tokens"].values())

    @register(protocol=ONE_TO_ALL, returns="object", reads=["x"])
    def write(self, batch, rank, how):
        if self.context.rank != rank:
            return
        if how == "numpy":
            batch["x"].numpy()[0, 0] = -1.0
        elif how == "data":
            batch["x"].data[0, 0] = -1.0
        else:
            batch["x"][0, 0] = -1.0

    @register(protocol=RANK_ZERO, returns="object")
    def fail_with(self, size):
        gc.disable()
        activation = torch.zeros(size)
        self.activation = weakref.ref(activation)
        raise MemoryError("the next one does not fit")

    @register(protocol=RANK_ZERO, returns="object")
    def holds_it(self):
        gc.enable()
        return self.activation() is not None


@pytest.fixture(scope="module")
def sharers(ray_executor) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    pools = [ResourcePool([count], device="cpu", name=name) for count, name in ((1, "maker"), (2, "readers"))]
    groups = []
    for pool in pools:
        spec = WorkerSpec(worker=Sharer, topology=Topology(ParallelSpec(dp_size=pool.num_slots)))
        groups.append(ray_executor.build_groups(pool, {pool.name: spec})[pool.name])
    yield tuple(groups)
    for pool in pools:
        ray_executor.release(pool)


@pytest.mark.parametrize("width", [4, 2**16], ids=["small", "a MiB"])
def test_all_readers_of_a_machine_see_a_column_in_one_memory(sharers, width):
    maker, readers = sharers
    made = maker.make(width)
    (first, x, tokens), (second, other_x, other_tokens) = readers.find(made).result()
    assert len({os.getpid(), first, second}) == 3
    assert (x, tokens) == (other_x, other_tokens)
    for place in (x, tokens):
        assert place.path.startswith("/dev/shm/plasma")
        assert place.permissions.endswith("s")
    here = made.result()
    assert find_place(here["x"]) == x
    assert find_place(here["tokens"].values()) == tokens
    for _, later_x, later_tokens in readers.find(made.rows(range(2, 4))).result():
        assert (later_x.file, later_x.offset) == (x.file, x.offset + 2 * 4 * width)
        assert (later_tokens.file, later_tokens.offset) == (x.file, tokens.offset + (1 + 2) * 4)


@pytest.mark.parametrize("width", [4, 2**16], ids=["small", "a MiB"])
@pytest.mark.parametrize("how", ["torch", "numpy", "data"])
def test_a_write_reaches_all_readers_and_torchs_own_is_an_error(sharers, how, width):
    """Ray maps the memory writable, and torch knows no tensors that are not."""
    maker, readers = sharers
    made = maker.make(width)
    seen_before = made.result()["x"]
    written = readers.write(made, 1, how)
    if how == "torch":
        with pytest.raises(BatchError, match=r"^readers\.write wrote in place into x, .* damaged for everybody. Clone"):
            written.result()
    else:
        written.result()
    assert seen_before[0, 0] == made.result()["x"][0, 0] == -1.0


def test_what_a_failed_method_held_is_freed_at_once(sharers):
    maker, _ = sharers
    with pytest.raises(WorkerError, match="the next one does not fit"):
        maker.fail_with(2**20).result()
    assert maker.holds_it().result() is False
