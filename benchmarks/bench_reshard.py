"""What a transition costs on real processes: gloo, a model of about 220 MB, four layouts on four and eight ranks.

For the methods that each layout defines: seconds of the slowest rank, bytes that the busiest rank received as counted
by wrappers around torch.distributed that know no plan, and most bytes of weights live on a rank, read off storages
(the paper's method moves the training shard; the others keep it). Every method starts with the training weights alone
and ends with generation weights in memory that it takes meanwhile: hybridflow-v and ds-chat gather the whole model, cut
their generation shard from it, parameter by parameter, and free it. The floor is a bare all-gather that brings each
rank exactly the planned bytes in the same group, into memory that it has already; what some ranks have to receive
beyond the others goes as messages. Everything takes turns, each round, in one run; medians with the fastest and the
slowest.

A run in which the counted bytes are not the planned ones, or the peak is above the planned one by more than a bucket,
fails. The planned peak of the methods that keep the training shard is the plan's, which counts the shard inside the
gathered model, and what of the shard lies there twice.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from measurement import record

from hf_engine import Box, ReshardExecutor, TransitionPlan, plan_transition
from hf_engine.resharding.moving import ShardMover, storage_bytes
from hf_engine.testing import LocalRanks
from hf_engine.testing._traffic import count_traffic
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, Topology, TopologyError
from hf_protocols.errors import ReshardError

MODEL = ModelShape(
    name="bench",
    num_layers=6,
    hidden_size=768,
    intermediate_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=48,
    vocab_size=8192,
)
CASES = (
    ("1-4-1", "1-2", "megatron"),
    ("1-4-2", "1-2", "megatron"),
    ("2-2-1", "1-1", "megatron"),
    ("1-1-4", "1-2", "fsdp"),
)
METHODS = ("hybridflow", "hybridflow-v", "ds-chat")
NUM_ROUNDS = 15
MAX_OVER_FLOOR = 1.3
MIN_SPEED_UP = 0.8
BUCKET_BYTES = 64 << 20


def main() -> int:
    """Measure every case; 1 if a target is missed."""
    metrics: dict[str, tuple[float, str]] = {}
    missed = 0
    for train, generation, sharding in CASES:
        case = f"{sharding}_{train}_to_{generation}"
        size = ParallelSpec.parse(train).world_size
        with LocalRanks(size, timeout_s=120) as ranks:
            found = ranks.run(measure_case, train, generation, sharding, deadline_s=600)
        missed += _report(case, found, metrics)
    record("reshard", metrics)
    return 1 if missed else 0


def _report(case: str, found: list[dict[str, Any]], metrics: dict[str, tuple[float, str]]) -> int:
    """Keep the figures of one case, print its targets, and count those that were missed."""
    seconds, received = {}, {}
    for name in found[0]:
        runs = [max(values) for values in zip(*(rank[name]["seconds"] for rank in found), strict=True)]
        seconds[name] = statistics.median(runs)
        key = f"{case}_{name}"
        for kind, value in (("median", seconds[name]), ("fastest", min(runs)), ("slowest", max(runs))):
            metrics[f"{key}_{kind}_s"] = (round(value, 4), "s")
        if name.startswith("floor"):
            continue
        received[name] = max(rank[name]["planned"] for rank in found)
        metrics[f"{key}_planned_bytes"] = (received[name], "bytes")
        for figure in ("counted", "planned_peak", "peak"):
            metrics[f"{key}_{figure}_bytes"] = (max(rank[name][figure] for rank in found), "bytes")
    targets = [("hybridflow / floor", seconds["hybridflow"] / seconds["floor of hybridflow"], "<=", MAX_OVER_FLOOR)]
    for other in ("hybridflow-v", "ds-chat"):
        if other in received and received["hybridflow"]:
            wanted = MIN_SPEED_UP * received[other] / received["hybridflow"]
            targets.append((f"{other} / hybridflow", seconds[other] / seconds["hybridflow"], ">=", wanted))
    missed = 0
    for name, ratio, sign, limit in targets:
        reached = ratio <= limit if sign == "<=" else ratio >= limit
        missed += not reached
        print(
            f"{'reached' if reached else 'MISSED '} {case} {name}: {ratio:.2f} (wanted {sign} {limit:.2f})", flush=True
        )
    return missed


def measure_case(train: str, generation: str, sharding: Any) -> dict[str, Any]:
    """On every rank: all methods and their floors, in turns."""
    topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
    works: dict[str, Any] = {}
    for method in METHODS:
        try:
            planned = plan_transition(MODEL, topology, method, dtype_bytes=4, sharding=sharding)
        except (ReshardError, TopologyError):
            continue
        work = _Transition(planned)
        works[method] = work
        works[f"floor of {method}"] = _Gather(work)
    results: dict[str, Any] = {name: {"seconds": []} for name in works}
    for number in range(NUM_ROUNDS + 1):
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            work.run()
            if number:
                results[name]["seconds"].append(time.perf_counter() - start)
            work.restore()
    return {name: results[name] | work.count() for name, work in works.items()}


class _Transition:
    """One method on this rank."""

    def __init__(self, planned: TransitionPlan) -> None:
        rank = dist.get_rank()
        plan = planned.plan
        self.planned_bytes = plan.recv_bytes[rank]
        is_moved = planned.method == "hybridflow"
        self._planned_peak_bytes = planned.peak_param_bytes[rank] + (0 if is_moved else plan.kept_bytes[rank])
        self.group, self.ranks = _own_group(planned)
        self._source = _tensors(plan.source.boxes_of(rank))
        self._target = _tensors(plan.target.boxes_of(rank))
        self._executor = ReshardExecutor(plan, group=self.group, ranks=self.ranks, bucket_bytes=BUCKET_BYTES)
        self._mover = ShardMover(plan, rank, self._source, self._target) if is_moved else None
        self._cut = _Cut(self._target, planned.generation.boxes_of(rank)) if self._mover is None else None
        self.restore()

    def run(self) -> None:
        if self._cut is not None:
            self._cut.take()
        self._executor.run(self._source, self._target, version=1, mover=self._mover)
        if self._cut is not None:
            self._cut.run()

    def restore(self) -> None:
        """The training weights alone."""
        if self._mover is not None:
            self._mover.restore()
        if self._cut is not None:
            self._cut.free()

    def count(self) -> dict[str, float]:
        """One more run under counters: weights received without their seals, and the most bytes live."""
        seen: list[int] = []

        def see() -> None:
            sides = (self._source, self._target, self._cut.shard if self._cut is not None else {})
            seen.append(storage_bytes([t for side in sides for parts in side.values() for t in parts]))

        with count_traffic(see) as traffic:
            self.run()
            see()
        self.restore()
        peak, planned_peak = max(seen), self._planned_peak_bytes
        assert traffic.matches(self.planned_bytes), (traffic, self.planned_bytes)
        assert peak <= planned_peak + BUCKET_BYTES, (peak, planned_peak)
        received = {"planned": self.planned_bytes, "counted": traffic.recv_bytes}
        return received | {"planned_peak": planned_peak, "peak": peak}


class _Cut:
    """What follows where a rank gathers whole parameters: its generation shard is cut from them, and they are freed."""

    def __init__(self, whole: dict[str, list[torch.Tensor]], boxes: Any) -> None:
        self._whole = whole
        self._boxes = boxes
        self.shard = _tensors(boxes)
        self._bytes = {id(tensor): tensor.nbytes for tensor in self._all()}

    def take(self) -> None:
        """Memory for the whole model."""
        for (tensor,) in self._whole.values():
            tensor.untyped_storage().resize_(self._bytes[id(tensor)])

    def run(self) -> None:
        for name, (tensor,) in self._whole.items():
            for part, box in zip(self.shard.get(name, ()), self._boxes.get(name, ()), strict=True):
                part.untyped_storage().resize_(self._bytes[id(part)])
                part.copy_(tensor[box.slices_in(Box.whole(tuple(tensor.shape)))])
            tensor.untyped_storage().resize_(0)

    def free(self) -> None:
        for tensor in self._all():
            tensor.untyped_storage().resize_(0)

    def _all(self) -> list[torch.Tensor]:
        return [tensor for side in (self._whole, self.shard) for parts in side.values() for tensor in parts]


class _Gather:
    """A bare all-gather that brings this rank exactly as many bytes in the same group."""

    def __init__(self, transition: _Transition) -> None:
        self._group, self._planned_bytes = transition.group, transition.planned_bytes
        size, own = dist.get_world_size(self._group), dist.get_rank(self._group)
        planned: list[Any] = [None] * size
        dist.all_gather_object(planned, transition.planned_bytes, group=self._group)
        total, rest = divmod(sum(planned), size - 1)
        # Everybody receives what all give but itself.
        gifts = [total - received for received in planned]
        assert rest == 0 <= min(gifts), "no all-gather brings these bytes"
        self._outgoing = torch.ones(min(gifts), dtype=torch.uint8)
        self._incoming = torch.empty(min(gifts) * size, dtype=torch.uint8)
        rests = [torch.ones(gift - min(gifts), dtype=torch.uint8) for gift in gifts]
        peers = [peer for peer in range(size) if peer != own]
        self._messages = [(dist.isend, rests[own], peer) for peer in peers if len(rests[own])]
        self._messages += [(dist.irecv, rests[peer], peer) for peer in peers if len(rests[peer])]

    def run(self) -> None:
        dist.all_gather_single(self._incoming, self._outgoing, group=self._group)
        operations = [dist.P2POp(way, part, group=self._group, group_peer=peer) for way, part, peer in self._messages]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def restore(self) -> None:
        """Nothing was moved."""

    def count(self) -> dict[str, float]:
        """One more run under counters."""
        with count_traffic() as traffic:
            self.run()
        assert traffic.recv_bytes == self._planned_bytes, (traffic, self._planned_bytes)
        return {}


def _own_group(planned: TransitionPlan) -> tuple[Any, tuple[int, ...]]:
    """The group of ranks that this rank exchanges weights with."""
    own: tuple[Any, tuple[int, ...]] | None = None
    for exchange in planned.exchanges:
        group = dist.new_group(list(exchange.ranks))
        if dist.get_rank() in exchange.ranks:
            own = group, exchange.ranks
    assert own is not None, "every rank receives something in these cases"
    return own


def _tensors(boxes: Any) -> dict[str, list[torch.Tensor]]:
    return {name: [torch.ones(box.shape) for box in parts] for name, parts in boxes.items()}


if __name__ == "__main__":
    sys.exit(main())
