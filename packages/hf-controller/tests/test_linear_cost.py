"""The cost of a call is linear in its number of ranks, not quadratic: operations are counted, not seconds."""

from __future__ import annotations

import sys

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec
from hf_protocols import DP, ONE_TO_ALL, ParallelSpec, Topology, register

RANKS = (8, 16, 24)


class Adder(Worker):
    needs_process_group = False

    @register(protocol=DP, reads=["x"], writes=["x", "tokens"])
    def add(self, batch):
        return TensorDict({"x": batch["x"] + 1, "tokens": batch["x"]}, batch_size=batch.batch_size)

    @register(protocol=ONE_TO_ALL, returns="object")
    def name(self):
        return {"rank": self.context.rank}


def count_operations(work):
    """Bytecode instructions that Python executes: a loop over all ranks counts, wherever it is written."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def count_calls(ranks):
    """Operations of three calls after a first round, which fills caches: rows from ranks to ranks, and a list."""
    spec = WorkerSpec(worker=Adder, topology=Topology(ParallelSpec(dp_size=ranks)), balance_tokens=True)
    with InProcessExecutor() as executor:
        group = executor.build_groups(ResourcePool([ranks], device="cpu"), {"adder": spec})["adder"]
        tokens = torch.nested.nested_tensor([torch.ones(1 + row % 3) for row in range(ranks)], layout=torch.jagged)
        batch = executor.put(TensorDict({"x": tokens}, batch_size=[ranks]))

        def work():
            assert group.add(group.add(batch)).num_rows == ranks
            assert [item.result()["rank"] for item in group.name().items] == list(range(ranks))

        work()
        return count_operations(work)


def test_in_process_calls_take_operations_in_proportion_to_ranks():
    few, some, many = map(count_calls, RANKS)
    added = some - few
    assert many - some == pytest.approx(added, rel=0.1), f"{few}, {some}, {many} operations on {RANKS} ranks"


def test_joining_batches_takes_as_many_operations_at_any_depth():
    with InProcessExecutor() as executor:
        batch = executor.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]))
        deep = [batch]
        for _ in range(300):
            deep.append(deep[-1].rows([1, 2, 0]))
        few, many = (count_operations(lambda at=at: batch.concat(deep[at]).union(deep[at])) for at in (3, 300))
    assert many == pytest.approx(few, rel=0.2)
