"""Cost of a transition on real processes: gloo, a model of about 220 MB, four layouts on four and eight ranks.

For the methods that each layout defines: seconds of the slowest rank, bytes that the busiest rank received as counted
by wrappers around torch.distributed that know no plan, and most bytes of weights live on a rank, read off storages
(the paper's method moves the training shard; the others keep it). Every method starts with the training weights alone
and ends with generation weights in memory that it takes meanwhile: hybridflow-v and ds-chat gather the whole model, cut
their generation shard from it, parameter by parameter, and free it. Two bare transfers of the same bytes in the same
group, into memory that is there already, are next to each method: the floor, one all-gather, which gives every rank
the mean of what the ranks receive; and messages, which give each rank its own planned bytes from the planned ranks in
one batch. Gloo's all-gather copies more than its messages do, so the second is the harder one; it has no target.
hybridflow runs a second time with its all-gathers as gloo's own collective, which direct messages replace on the host
(ADR 15): that ratio has no target, either. Everything takes turns, each round, in one run; medians with the fastest
and the slowest.

A run in which the counted bytes are not the planned ones, or the peak is above the planned one by more than a bucket,
fails. The planned peak of the methods that keep the training shard is the plan's, which counts the shard inside the
gathered model, and what of the shard lies there twice.
"""

from __future__ import annotations

import statistics
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measurement import record

from hf_engine import Box, ReshardExecutor, TransitionPlan, plan_transition
from hf_engine.resharding import steps
from hf_engine.resharding.moving import ShardMover, storage_bytes
from hf_engine.testing import LocalRanks
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, Topology, TopologyError
from hf_protocols.errors import ReshardError

sys.path.append(str(Path(__file__).parents[1] / "integration-tests"))

from engine_testing.traffic import count_traffic

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
        if name not in METHODS:
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
    asides = (("hybridflow", "messages of hybridflow"), ("hybridflow by gloo's all-gather", "hybridflow"))
    for name, other in asides:
        print(f"        {case} {name} / {other}: {seconds[name] / seconds[other]:.2f}", flush=True)
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
        works[f"messages of {method}"] = _Messages(work)
        if method == "hybridflow":
            works["hybridflow by gloo's all-gather"] = _ByCollectives(work)
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
        plan = self.plan = planned.plan
        self.planned_bytes = plan.recv_bytes[rank]
        is_moved = planned.method == "hybridflow"
        self._planned_peak_bytes = planned.peak_param_bytes[rank] + (0 if is_moved else plan.kept_bytes[rank])
        self.group, self.ranks = _own_group(planned)
        self._source = _tensors(plan.source.boxes_of(rank))
        self._target = _tensors(plan.target.boxes_of(rank))
        self._executor = ReshardExecutor(plan, group=self.group, ranks=self.ranks, bucket_bytes=BUCKET_BYTES)
        self._mover = ShardMover(plan, rank, self._source, self._target) if is_moved else None
        self._cut = _SecondHalf(self._target, planned.generation.boxes_of(rank)) if self._mover is None else None
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
        """One more run under counters: weights received without their checksums, and the most bytes live."""
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


class _ByCollectives:
    """A transition whose all-gathers are torch.distributed's, as on GPUs."""

    def __init__(self, transition: _Transition) -> None:
        self._transition = transition

    def run(self) -> None:
        with mock.patch.object(steps, "gathers_by_messages", return_value=False):
            self._transition.run()

    def restore(self) -> None:
        self._transition.restore()

    def count(self) -> dict[str, float]:
        """Returns no figures of its own: the bytes that arrive are those of the transition."""
        return {}


class _SecondHalf:
    """Second half of a method that gathers whole parameters: cuts the generation shard from them and frees them."""

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


class _Bare(ABC):
    """A transfer of bytes that are nobody's weights."""

    received_bytes: int

    @abstractmethod
    def run(self) -> None:
        """Transfer them."""

    def restore(self) -> None:  # noqa: B027 - what is to do for a transition, and nothing here
        """Nothing was moved."""

    def count(self) -> dict[str, float]:
        """One more run under counters."""
        with count_traffic() as traffic:
            self.run()
        assert traffic.recv_bytes == self.received_bytes, (traffic, self.received_bytes)
        return {}


class _Gather(_Bare):
    """An all-gather of as many bytes in all as the plan's in the same group, as many for each rank."""

    def __init__(self, transition: _Transition) -> None:
        self._group = transition.group
        size = dist.get_world_size(self._group)
        planned: list[Any] = [None] * size
        dist.all_gather_object(planned, transition.planned_bytes, group=self._group)
        share = -(-sum(planned) // (size * (size - 1)))
        self.received_bytes = share * (size - 1)
        self._outgoing = torch.ones(share, dtype=torch.uint8)
        self._incoming = torch.empty(share * size, dtype=torch.uint8)

    def run(self) -> None:
        dist.all_gather_single(self._incoming, self._outgoing, group=self._group)


class _Messages(_Bare):
    """The planned bytes between each two ranks, one message each."""

    def __init__(self, transition: _Transition) -> None:
        self._group = transition.group
        self.received_bytes = transition.planned_bytes
        rank, members = dist.get_rank(), transition.ranks
        sent, received = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
        for message in transition.plan.messages:
            num_bytes = message.box.numel * transition.plan.target.element_bytes
            for destination in message.destinations:
                if message.source == rank:
                    sent[destination] += num_bytes
                elif destination == rank:
                    received[message.source] += num_bytes
        ways = ((dist.isend, sent), (dist.irecv, received))
        self._parts = [
            (way, torch.ones(num_bytes, dtype=torch.uint8), members.index(peer))
            for way, by_peer in ways
            for peer, num_bytes in by_peer.items()
            if num_bytes
        ]

    def run(self) -> None:
        operations = [dist.P2POp(way, part, group=self._group, group_peer=peer) for way, part, peer in self._parts]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


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
