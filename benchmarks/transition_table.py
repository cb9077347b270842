"""The table of docs/concepts/transition.md: formula, plan and measured bytes of ten layouts, side by side.

Runs every layout for real, on up to eight gloo processes, with a model of 1 MiB that has tensor-parallel matrices
only. Bytes are counted by wrappers around torch.distributed that know no plan; peaks are read off the storages of the
training and generation tensors before every collective and at the end. hybridflow moves the training shard, the other
methods keep it. Writes the table into the page, or with
--check compares it with the page and exits with 1 where they differ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_engine import ReshardExecutor, plan_transition
from hf_engine.resharding.moving import ShardMover, storage_bytes
from hf_engine.testing import LocalRanks
from hf_protocols import GenerationSpec, ParallelSpec, ReshardError, Topology, TopologyError, compute_transition_cost
from hf_protocols.transition import Method

sys.path.append(str(Path(__file__).parents[1] / "integration-tests"))

from engine_testing.shapes import uniform_shape
from engine_testing.traffic import count_traffic
from engine_testing.weights import empty_weights

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "transition.md"
BEGIN, END = "<!-- transition_table.py writes from here -->\n", "<!-- to here -->\n"
MODEL = uniform_shape(num_layers=32)
BUCKET_BYTES = 16 << 10
LAYOUTS = (
    ("1-4-1", "1-2", "megatron"),
    ("1-4-1", "1-1", "megatron"),
    ("2-2-1", "1-2", "megatron"),
    ("4-1-1", "2-1", "megatron"),
    ("2-2-1", "2-2", "megatron"),
    ("1-1-4", "1-2", "fsdp"),
    ("1-4-2", "1-2", "megatron"),
    ("1-8-1", "1-2", "megatron"),
    ("2-4-1", "2-2", "megatron"),
    ("2-2-2", "1-1", "megatron"),
)
METHODS: tuple[Method, ...] = ("hybridflow", "hybridflow-v", "ds-chat")
HEADER = (
    "| training -> generation | method | received: formula | plan | counted "
    "| peak: formula | plan | second copy | measured |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
)


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One layout by one method; bytes of the rank with the most."""

    train: str
    generation: str
    sharding: Any
    method: Method
    formula: tuple[float, float] | None
    """Received and peak by Table 2; None where the sizes do not nest."""
    planned: tuple[int, int]
    """Received and peak by the plan."""
    beside: int
    """Of the training shard where it is kept: what lies inside the gathered model too, which formula and plan count
    once."""

    @property
    def num_ranks(self) -> int:
        return ParallelSpec.parse(self.train).world_size

    def render(self, counted: int, peak: int) -> str:
        """A line of the table."""
        formula = ["-", "-"] if self.formula is None else [_kib(value) for value in self.formula]
        layout = f"{self.train} {'FSDP ' if self.sharding == 'fsdp' else ''}-> {self.generation}"
        received = [formula[0], _kib(self.planned[0]), _kib(counted)]
        peaks = [formula[1], _kib(self.planned[1]), _kib(self.beside), _kib(peak)]
        return f"| {' | '.join([layout, self.method, *received, *peaks])} |\n"


def main() -> int:
    """Measure all rows; write the page, or compare with it."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    lines = [line for size, rows in groupby(build_rows(), lambda row: row.num_ranks) for line in measure(size, [*rows])]
    written = before + BEGIN + HEADER + "".join(lines) + END + after
    if "--check" in sys.argv:
        print("the page says what was measured" if written == text else "the page differs from what was measured")
        return int(written != text)
    PAGE.write_text(written)
    print("".join(lines))
    return 0


def build_rows() -> list[LayoutRow]:
    """Every layout by every method that it defines, with formula and plan."""
    rows = []
    for train, generation, sharding in LAYOUTS:
        topology = _topology(train, generation)
        for method in METHODS:
            try:
                planned = plan_transition(MODEL, topology, method, dtype_bytes=4, sharding=sharding)
            except ReshardError:
                continue
            try:
                cost = compute_transition_cost(planned.parameter_bytes, topology, method)
            except TopologyError:
                formula = None
            else:
                formula = (cost.recv_bytes, cost.peak_param_bytes)
            rows.append(
                LayoutRow(
                    train=train,
                    generation=generation,
                    sharding=sharding,
                    method=method,
                    formula=formula,
                    planned=(max(planned.recv_bytes.values()), max(planned.peak_param_bytes.values())),
                    beside=0 if method == "hybridflow" else max(planned.kept_bytes.values()),
                )
            )
    return rows


def measure(num_ranks: int, rows: list[LayoutRow]) -> list[str]:
    """Run rows of one number of ranks; their lines."""
    lines = []
    with LocalRanks(num_ranks) as ranks:
        for row in rows:
            found = ranks.run(run_row, row.train, row.generation, row.sharding, row.method)
            lines.append(row.render(max(counted for counted, _ in found), max(peak for _, peak in found)))
    return lines


def run_row(train: str, generation: str, sharding: Any, method: Method) -> tuple[int, int]:
    """On every rank: bytes of weights received, without their checksums, and most bytes of weights live."""
    planned = plan_transition(MODEL, _topology(train, generation), method, dtype_bytes=4, sharding=sharding)
    plan, rank = planned.plan, dist.get_rank()
    source, target = empty_weights(plan.source, rank), empty_weights(plan.target, rank)
    tensors = [tensor for side in (source, target) for parts in side.values() for tensor in parts]
    group, members = None, tuple(range(dist.get_world_size()))
    for exchange in planned.exchanges:
        found = dist.new_group(list(exchange.ranks))
        if rank in exchange.ranks:
            group, members = found, exchange.ranks
    executor = ReshardExecutor(plan, group=group, ranks=members, bucket_bytes=BUCKET_BYTES)
    mover = ShardMover(plan, rank, source, target) if method == "hybridflow" else None
    if mover is not None:
        mover.restore()
    seen: list[int] = []
    with count_traffic(lambda: seen.append(storage_bytes(tensors))) as traffic:
        executor.run(source, target, version=1, mover=mover)
    seen.append(storage_bytes(tensors))
    return traffic.recv_bytes - traffic.checksum_bytes, max(seen)


def _topology(train: str, generation: str) -> Topology:
    return Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))


def _kib(num_bytes: float) -> str:
    """Kibibytes: whole for every figure that is a multiple of one."""
    return f"{num_bytes / 1024:.10g}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
