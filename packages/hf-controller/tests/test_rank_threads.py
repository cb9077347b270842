"""Threads of torch in ranks on Ray: the cores of a host divided among the ranks of a pool."""

from __future__ import annotations

import os

import pytest
import torch

from hf_controller import ResourcePool, Worker, WorkerSpec
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register

CORES = len(os.sched_getaffinity(0))


class CountingWorker(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def count_threads(self) -> int:
        return torch.get_num_threads()


class SoloCountingWorker(CountingWorker):
    needs_process_group = False


def count(executor, num_ranks, worker=CountingWorker, environment=None):
    pool = ResourcePool([num_ranks], device="cpu")
    topology = Topology(ParallelSpec(dp_size=num_ranks))
    spec = WorkerSpec(worker=worker, topology=topology, environment=environment or {})
    try:
        return executor.build_groups(pool, {"counting": spec})["counting"].count_threads().result()
    finally:
        executor.release(pool)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_of_a_pool_divide_the_cores(ray_executor, monkeypatch, num_ranks):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count(ray_executor, num_ranks) == [max(1, CORES // num_ranks)] * num_ranks


def test_a_rank_without_a_process_group_has_one_thread(ray_executor, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count(ray_executor, 1, SoloCountingWorker) == [1]


@pytest.mark.parametrize(("program", "role", "threads"), [("3", None, 3), ("3", "4", 4), ("5,2", None, 5)])
def test_omp_num_threads_is_the_number_of_threads(ray_executor, monkeypatch, program, role, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", program)
    environment = {} if role is None else {"OMP_NUM_THREADS": role}
    assert count(ray_executor, 1, environment=environment) == [threads]
    assert count(ray_executor, 1, SoloCountingWorker, environment) == [threads]


@pytest.mark.parametrize("program", ["", "0", "many"])
def test_another_omp_num_threads_is_ignored(ray_executor, monkeypatch, program):
    monkeypatch.setenv("OMP_NUM_THREADS", program)
    assert count(ray_executor, 2) == [max(1, CORES // 2)] * 2
