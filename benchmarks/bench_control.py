"""Measures the cost of one PPO iteration in the controller: CPU seconds and bytes with 8, 64, 512 and 4,096 ranks.

Actors are recorded instead of started (`recorded_ray`): messages are packed, sent and counted, answers are read,
and no rank runs. Ray's own cost of a message is not part of it. The iteration has the fourteen calls of PPO with four
mini-batches: generation, log-probs, values, reference and reward on all ranks, advantages on one, and two updates for
each mini-batch. There are four rows for every rank; the tensors are eight wide.

The in-process executor has no messages: it is measured with 64 to 2,048 ranks of one program, two data-parallel calls
in which every rank adds one to a row, of which the second takes what the first made.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import sys
import time

import torch
from measurement import record
from recorded_ray import RecordedRay, recorded_ray
from tensordict import TensorDict

from hf_controller import InProcessExecutor, RayExecutor, ResourcePool, Worker, WorkerGroup, WorkerSpec
from hf_protocols import (
    DP,
    RANK_ZERO,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    GenerationSpec,
    ParallelSpec,
    Topology,
    register,
)

RANKS = (8, 64, 512, 4096)
ROUNDS = 3
TP_SIZE, GEN_TP_SIZE = 8, 2
ROWS_OF_RANK = 4
NUM_MINI_BATCHES = 4
MAX_US_PER_RANK_AND_CALL = 100.0
MAX_ITERATION_S = 2.0
IN_PROCESS_RANKS = (64, 256, 1024, 2048)
MAX_GROWTH = 1.5
"""Of the cost of a rank and call, and of its bytes, from 512 to 4,096 ranks; in process from 256 to 2,048 ranks."""


class Unrun(Worker):
    """The methods of a PPO role, which nobody runs."""

    needs_process_group = False

    @register(protocol=THREE_D_ALL_MICRO_DP, writes=["responses", "response_mask"])
    def generate_sequences(self, batch: TensorDict, seed: int) -> TensorDict: ...

    @register(protocol=THREE_D, reads=["prompts", "responses"], writes=["old_logprobs"])
    def compute_logprobs(self, batch: TensorDict) -> TensorDict: ...

    @register(protocol=THREE_D, reads=["prompts", "responses"], writes=["ref_logprobs"])
    def compute_ref_logprobs(self, batch: TensorDict) -> TensorDict: ...

    @register(protocol=THREE_D, reads=["prompts", "responses"], writes=["values"])
    def compute_values(self, batch: TensorDict) -> TensorDict: ...

    @register(protocol=DP, reads=["responses"], writes=["rewards"])
    def compute_reward(self, batch: TensorDict) -> TensorDict: ...

    @register(
        protocol=RANK_ZERO,
        reads=["old_logprobs", "ref_logprobs", "values", "rewards", "response_mask"],
        writes=["advantages", "returns"],
    )
    def compute_advantages(self, batch: TensorDict, gamma: float) -> TensorDict: ...

    @register(protocol=THREE_D, returns="metrics")
    def update(self, batch: TensorDict, clip: float) -> dict[str, tuple[float, float]]: ...


def build(executor: RayExecutor, ranks: int) -> dict[str, WorkerGroup]:
    """Two pools, each with two models in processes of their own, and one rank for the advantages."""
    topology = Topology(
        ParallelSpec(tp_size=TP_SIZE, dp_size=ranks // TP_SIZE), GenerationSpec(gen_tp_size=GEN_TP_SIZE)
    )
    groups: dict[str, WorkerGroup] = {}
    for roles in (("actor", "reference"), ("critic", "reward")):
        pool = ResourcePool([8] * (ranks // 8), device="cpu", name="+".join(roles))
        groups |= executor.build_groups(pool, {role: WorkerSpec(worker=Unrun, topology=topology) for role in roles})
    alone = {"advantage": WorkerSpec(worker=Unrun, topology=Topology(ParallelSpec()))}
    return groups | executor.build_groups(ResourcePool([1], device="cpu", name="advantage"), alone)


def iterate(executor: RayExecutor, groups: dict[str, WorkerGroup], prompts: TensorDict, seed: int) -> None:
    """One iteration of PPO, from its prompts to the last update."""
    with executor.trace.label(iteration=seed):
        batch = executor.put(prompts)
        batch = batch.union(groups["actor"].generate_sequences(batch, seed))
        for made in (
            groups["actor"].compute_logprobs(batch),
            groups["critic"].compute_values(batch),
            groups["reference"].compute_ref_logprobs(batch),
            groups["reward"].compute_reward(batch),
        ):
            batch = batch.union(made)
        batch = batch.union(groups["advantage"].compute_advantages(batch, 1.0))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
        updates = [
            groups[role].update(batch.rows(chosen), 0.2)
            for chosen in order.chunk(NUM_MINI_BATCHES)
            for role in ("critic", "actor")
        ]
        for update in updates:
            update.result()
    executor.trace.drain()


def measure(recorded: RecordedRay, ranks: int) -> dict[str, float]:
    """The cheapest of some rounds, after a first one that fills caches."""
    prompts = TensorDict({"prompts": torch.zeros(ROWS_OF_RANK * ranks, 8)}, batch_size=[ROWS_OF_RANK * ranks])
    found: list[dict[str, float]] = []
    with RayExecutor(address="recorded") as executor:
        groups = build(executor, ranks)
        for seed in range(1 + ROUNDS):
            recorded.forget()
            start_s = time.thread_time()
            iterate(executor, groups, prompts, seed)
            seconds = time.thread_time() - start_s - recorded.own_s
            found.append(
                {
                    "iteration_s": seconds,
                    "us_per_rank_and_call": seconds / recorded.num_messages * 1e6,
                    "bytes_per_rank_and_call": recorded.sent_bytes / recorded.num_messages,
                    "messages": recorded.num_messages,
                    "pickled": recorded.num_pickled,
                }
            )
    return min(found[1:], key=lambda each: each["iteration_s"])


class Incrementer(Worker):
    """A rank of one program that does next to nothing."""

    needs_process_group = False

    @register(protocol=DP, reads=["x"], writes=["x"])
    def add(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"x": batch["x"] + 1}, batch_size=batch.batch_size)


def measure_in_process(ranks: int) -> dict[str, float]:
    """The cheapest of some rounds of two calls in one program, after a first one that fills caches."""
    rows = TensorDict({"x": torch.zeros(ranks, 8)}, batch_size=[ranks])
    spec = WorkerSpec(worker=Incrementer, topology=Topology(ParallelSpec(dp_size=ranks)))
    found: list[float] = []
    with InProcessExecutor() as executor:
        group = executor.build_groups(ResourcePool([ranks], device="cpu"), {"incrementer": spec})["incrementer"]
        batch = executor.put(rows)
        for _ in range(1 + ROUNDS):
            start_s = time.process_time()
            made = group.add(group.add(batch)).result()
            found.append((time.process_time() - start_s) / 2)
            assert bool((made["x"] == 2).all())
    return {"call_s": min(found[1:]), "us_per_rank_and_call": min(found[1:]) / ranks * 1e6}


def main() -> int:
    """Measure, print each target and whether it was reached, and keep the result."""
    units = {"iteration_s": "s", "call_s": "s", "us_per_rank_and_call": "us", "bytes_per_rank_and_call": "bytes"}
    with recorded_ray() as recorded:
        found = {ranks: measure(recorded, ranks) for ranks in RANKS}
    alone = {ranks: measure_in_process(ranks) for ranks in IN_PROCESS_RANKS}
    record(
        "control",
        {
            f"{prefix}{ranks}_ranks_{name}": (round(value, 4), units.get(name, "messages"))
            for prefix, all_found in (("", found), ("in_process_", alone))
            for ranks, each in all_found.items()
            for name, value in each.items()
        },
    )
    least, most = found[RANKS[-2]], found[RANKS[-1]]
    targets = [
        (f"{n} ranks, us a rank and call", e["us_per_rank_and_call"], MAX_US_PER_RANK_AND_CALL)
        for n, e in found.items()
    ]
    targets += [(f"{n} ranks, pickled messages", e["pickled"], 6 + 2 * NUM_MINI_BATCHES) for n, e in found.items()]
    targets += [
        (f"{name} at {RANKS[-1]} / at {RANKS[-2]} ranks", most[name] / least[name], MAX_GROWTH)
        for name in ("us_per_rank_and_call", "bytes_per_rank_and_call")
    ]
    targets.append((f"{RANKS[-1]} ranks, s an iteration", most["iteration_s"], MAX_ITERATION_S))
    base, last = IN_PROCESS_RANKS[1], IN_PROCESS_RANKS[-1]
    growth = alone[last]["us_per_rank_and_call"] / alone[base]["us_per_rank_and_call"]
    targets.append((f"in process, us a rank at {last} / at {base} ranks", growth, MAX_GROWTH))
    missed = [name for name, value, limit in targets if value > limit]
    for name, value, limit in targets:
        print(f"{'MISSED ' if name in missed else 'reached':8} {name:56} {value:10.2f} (wanted <= {limit})")
    print(f"{len(missed)} of {len(targets)} targets missed" if missed else f"all {len(targets)} targets reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
