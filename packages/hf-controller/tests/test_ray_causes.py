"""Failures as a program sees them: the cause is reported, even if other ranks died or failed of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

CAUSES_PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from tensordict import TensorDict
from hf_protocols import (
    DP, ONE_TO_ALL, RANK_ZERO, THREE_D, ParallelSpec, Topology, WorkerError, WorkerTimeoutError, register)
from hf_controller import Deadline, RayExecutor, ResourcePool, Worker, WorkerSpec

class Pair(Worker):
    @register(protocol=DP)
    def echo(self, batch, seconds=0):
        time.sleep(seconds)
        return batch.clone()

    @register(protocol=ONE_TO_ALL, returns="object")
    def die(self, rank, seconds=0):
        time.sleep(seconds)
        if self.context.rank == rank:
            os._exit(1)
        torch.distributed.all_reduce(torch.ones(()))

    @register(protocol=THREE_D)
    def lose_copy(self, batch):
        self.die(1)
        return batch.clone()

    @register(protocol=RANK_ZERO, returns="object")
    def fail(self):
        raise KeyError("own")

    @register(protocol=ONE_TO_ALL, returns="object")
    def rest(self):
        pass

    @register(protocol=RANK_ZERO, returns="object")
    def save(self, path):
        Path(path).write_text("saved")

class Single(Pair):
    needs_process_group = False

    @register(protocol=DP)
    def stall(self, batch):
        time.sleep(60)
        return batch

def say(line):
    with Path(sys.argv[2]).with_name("said").open("a") as file:  # Ray's threads write to the standard output, too
        file.write(line + "\\n")

def report(call):
    try:
        call.wait()
        say("returned")
    except WorkerError as error:
        say(f"raised: {error}")

batch = TensorDict({"x": torch.arange(4)}, batch_size=[4])
deadlines = {"stall": Deadline(8.0, "call_timeout_s")}  # any other call may take long on a machine that is busy
with RayExecutor(num_cpus=3, object_store_bytes=100 * 2**20, deadlines=deadlines) as executor:
    pools = [ResourcePool([slots], device="cpu") for slots in (2, 1)]
    size = "tp_size" if sys.argv[1] == "a reader of a survivor's copy" else "dp_size"
    specs = [WorkerSpec(worker=worker, topology=Topology(ParallelSpec(**{size: pool.num_slots})))
             for worker, pool in zip((Pair, Single), pools)]
    pair = executor.build_groups(pools[0], {"pair": specs[0]}, wait=False)["pair"]
    colocated = executor.build_groups(pools[1], {"single": specs[1], "behind": specs[1]}, wait=False)
    single, behind = colocated.values()
    executor.wait_until_ready()
    if sys.argv[1] == "a death behind its peer's error":
        pair.die(1)
        pair.rest()
    elif sys.argv[1] == "an input that was released":
        pair.echo(single.echo(batch, seconds=60))
        executor.release(pools[1])
        pair.rest()
    elif sys.argv[1] == "a pool that is late":
        pair.echo(batch).wait()  # it loads libraries
        single.stall(batch)
        behind.rest()  # in vain: its turn does not come in time
        for _ in range(3):
            pair.echo(batch, seconds=4)
        pair.save(sys.argv[2])
    elif sys.argv[1] == "a death after a timeout":
        try:
            single.die(0, seconds=2).wait(timeout_s=0.5)
        except WorkerTimeoutError:
            time.sleep(6)
    elif sys.argv[1] == "a reader of a survivor's copy":
        copy = pair.lose_copy(batch)  # of which rank 0 gives the rows, and rank 1 none
        report(single.echo(copy))
        report(copy)
    else:
        lost = single.echo(batch)
        lost.wait()
        report(single.die(0))
        report(pair.fail())  # its own exception, even if others died elsewhere
        time.sleep(3)  # each rank hears by itself that the owner of `lost` died; one that had not would end the group
        report(pair.echo(lost))
        pair.echo(lost)  # the program knows why
        early = pair.fail()
        pair.rest().wait()  # calls run in their order
        dying = pair.die(1)
        report(dying)
        report(early)  # answered before the process died
say("closed")
"""

CAUSES = {
    "a death behind its peer's error": r"pair\.die on rank 1 failed: .*process pair/1 is gone",
    "an input that was released": r"LostResultError: an earlier call's result is lost with its process",
    "a pool that is late": r"WorkerTimeoutError: single\.stall is not done after 8 s on rank\(s\) 0:",
    "a death after a timeout": r"single\.die on rank 0 failed: .*process single/0 is gone",
    "a reader of a survivor's copy": None,
    "deaths and failures apart": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("argument", CAUSES)
def test_a_block_and_its_calls_say_the_cause_of_a_failure(argument, tmp_path):
    command = [sys.executable, "-c", CAUSES_PROGRAM, argument, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    is_saved = (tmp_path / "saved").exists()
    assert is_saved is (argument == "a pool that is late"), done.stderr  # whose other pools go on
    if CAUSES[argument] is not None:
        assert done.returncode == 1
        raised = next(line for line in done.stderr.splitlines() if re.match(r"hf_\w+\.\w+\.\w+Error: ", line))
        assert re.search(CAUSES[argument], raised), done.stderr
        return
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text().splitlines()
    if argument == "a reader of a survivor's copy":
        read, copied, _ = said
        assert read.startswith("raised: pair.lose_copy on rank 1 failed: ") and "process pair/1 is gone" in read
        assert copied == read
        return
    assert len(said) == 6, said
    death, own, loss, last_death, early, closed = said
    assert death.startswith("raised: single.die on rank 0 failed: ") and "process single/0 is gone" in death
    assert own.startswith("raised: pair.fail on rank 0 failed: KeyError: 'own'")
    assert loss == death
    assert last_death.startswith("raised: pair.die on rank 1 failed: ") and "process pair/1 is gone" in last_death
    assert early == own
    assert closed == "closed"
