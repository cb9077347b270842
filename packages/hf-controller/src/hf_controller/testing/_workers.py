"""The suite's workers and the groups made of them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from hf_controller.executors.base import Executor
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import Worker, WorkerContext, WorkerSpec, as_pieces
from hf_protocols import (
    ALL_TO_ALL,
    DP,
    FROM_ARGUMENT,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D,
    THREE_D_PP_ONLY,
    BatchError,
    Collection,
    ParallelSpec,
    RewardError,
    RowSelection,
    Topology,
    TransferProtocol,
    register,
    split_rows,
)

__all__ = ["ProbeWorker", "SoloWorker", "StageWorker", "Total"]


def _every_other_row(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    size = topology.world_size
    return [RowSelection.from_rows(range(rank, num_rows, size)) for rank in range(size)]


def _last_rank_first(topology: Topology) -> Collection:
    return Collection(tuple(reversed(range(topology.world_size))))


ROUND_ROBIN = TransferProtocol("round robin", _every_other_row, _last_rank_first)
"""A protocol as a user would write it."""


def _blocks_of_four(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    starts = [min(num_rows, 4 * rank) for rank in range(topology.world_size)]
    ends = [*starts[1:], num_rows]
    return [RowSelection.range(start, end) for start, end in zip(starts, ends, strict=True)]


def _two_chunks_each(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    size = topology.world_size
    chunks = split_rows(num_rows, 2 * size)
    return [chunks[rank] + chunks[rank + size] for rank in range(size)]


def _one_row_too_many(topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
    return split_rows(num_rows + 1, topology.world_size)


BEYOND = TransferProtocol("one row too many", _one_row_too_many, DP.collect)
"""A mistake."""

BLOCKS = TransferProtocol("blocks of four", _blocks_of_four, RANK_ZERO.collect)
"""With few rows the last ranks get empty batches, and are not collected."""

TWO_CHUNKS = TransferProtocol("two chunks each", _two_chunks_each, DP.collect)
"""As many rows as ranks are too few."""


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@dataclass(frozen=True)
class Total:
    """Adds up the columns that it reads; what it writes is named by its user."""

    reads: Any
    writes: Any = ("total",)
    returned: tuple[str, ...] | None = None
    """Columns that it returns, if they differ from those it declares."""

    def __call__(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Returns the sum [B] under each name."""
        wanted = [name.removesuffix("?") for name in self.reads]
        columns = [batch[name] for name in wanted if name in batch.keys()]  # noqa: SIM118 - it iterates its rows
        total = sum(columns, torch.zeros(len(batch)))
        return {name: total.clone() for name in self.returned or self.writes}


class DeclaringWorker(Worker):
    """Knows one column, `row`; its arguments know others."""

    @register(protocol=DP, reads=("row",), writes=FROM_ARGUMENT)
    def apply(self, batch: TensorDict, total: Total) -> TensorDict:
        """Returns the result of `total` on the batch."""
        return TensorDict(total(batch), batch_size=batch.batch_size)

    @register(protocol=ALL_TO_ALL, reads=("row",), writes=FROM_ARGUMENT)
    def apply_own(self, batch: TensorDict, total: Total) -> TensorDict:
        """Returns the result of this rank's `total` on this rank's batch."""
        return self.apply(batch, total)

    @register(protocol=DP, returns="metrics", reads=("row",))
    def list_columns(self, batch: TensorDict, *totals: Total) -> dict[str, tuple[float, float]]:
        """The columns that arrived."""
        return {str(name): (1.0, 1.0) for name, _ in batch.items()}


class ProbeWorker(DeclaringWorker):
    """Answers what it was given, so that a check sees where rows went."""

    def __init__(self, context: WorkerContext, *, scale: float = 1.0) -> None:
        super().__init__(context)
        self.seen = 0
        self.words: list[str] = []
        self.scale = scale
        self.buffer = torch.zeros(2)
        self.drawn = float(torch.rand(()))

    @register(protocol=DP)
    def echo(self, batch: TensorDict) -> TensorDict:
        """The batch, and the rank that had each row."""
        return batch.clone().set("rank", torch.full(batch.batch_size, self.context.rank))

    @register(protocol=ROUND_ROBIN)
    def echo_round_robin(self, batch: TensorDict) -> TensorDict:
        """The same, by a protocol that is none of the eight."""
        return self.echo(batch)

    @register(protocol=TWO_CHUNKS)
    def echo_two_chunks(self, batch: TensorDict) -> TensorDict:
        """The same, of two chunks."""
        return self.echo(batch)

    @register(protocol=BLOCKS, returns="metrics")
    def see_block(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        """Remembers how many rows this rank had."""
        self.seen = len(batch)
        return {"rows": (len(batch), 1)}

    @register(protocol=ONE_TO_ALL, returns="object")
    def saw(self) -> int:
        """Rows of the last block."""
        return self.seen

    @register(protocol=DP, reads=["x", "missing?"], writes=["y"])
    def add(self, batch: TensorDict, amount: float = 0.0) -> TensorDict:
        """Y = scale * x + amount, from x alone."""
        if list(batch.keys()) != ["x"]:
            raise BatchError(f"the columns {list(batch.keys())} travelled, only x was asked for")
        return TensorDict({"y": batch["x"] * self.scale + amount}, batch_size=batch.batch_size)

    @register(protocol=DP)
    def join(self, left: TensorDict, right: TensorDict) -> TensorDict:
        """Two batches side by side."""
        return TensorDict({"a": left["x"], "b": right["x"]}, batch_size=left.batch_size)

    @register(protocol=DP, rows="times")
    def sample(self, batch: TensorDict, n: int) -> TensorDict:
        """N rows of each row."""
        number = torch.arange(n).repeat(len(batch))
        return TensorDict({"row": batch["row"].repeat_interleave(n), "sample": number}, batch_size=[len(batch) * n])

    @register(protocol=DP, rows="unknown")
    def keep_even(self, batch: TensorDict) -> TensorDict:
        """The rows whose number is even."""
        even: TensorDict = batch[batch["row"] % 2 == 0]
        return even

    @register(protocol=ONE_TO_ALL)
    def copy_all(self, batch: TensorDict) -> TensorDict:
        """Every row, from every rank."""
        return batch.clone().set("rank", torch.full(batch.batch_size, self.context.rank))

    @register(protocol=ALL_TO_ALL)
    def take_own(self, batch: TensorDict, factor: int) -> TensorDict:
        """This rank's item."""
        return TensorDict({"row": batch["row"] * factor}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO)
    def center(self, batch: TensorDict) -> TensorDict:
        """X less its mean over the whole batch."""
        return TensorDict({"centered": batch["x"] - batch["x"].mean()}, batch_size=batch.batch_size)

    @register(protocol=THREE_D_PP_ONLY)
    def per_stage(self, batch: TensorDict) -> TensorDict:
        """Every row, from every stage."""
        return TensorDict({"row": batch["row"]}, batch_size=batch.batch_size)

    @as_pieces
    @register(protocol=ONE_TO_ALL, returns="object")
    def see_pieces(self, batch: list[TensorDict]) -> list[tuple[list[int], list[int]]]:
        """Row numbers and numbers of tokens of every piece."""
        return [(each["row"].tolist(), each["tokens"].offsets().diff().tolist()) for each in batch]

    @register(protocol=DP, returns="metrics")
    def count(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        """Mean and largest of row numbers, rows per rank, and a metric without data."""
        largest = float(batch["row"].max()) if len(batch) else 0.0
        metrics = {"row": (float(batch["row"].sum()), len(batch)), "row_max": (largest, 1.0 if len(batch) else 0.0)}
        return metrics | {"rows": (len(batch), 1), "none": (0.0, 0.0)}

    @register(protocol=DP, returns="metrics")
    def count_tokens(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        """The most tokens that a rank has, as the sum over ranks of the square root of squares."""
        tokens = float(batch["tokens"].offsets()[-1])
        return {f"rank {self.context.rank}": (tokens, 1)}

    @register(protocol=RANK_ZERO, returns="object")
    def answer(self, value: Any) -> Any:
        """Returns its argument, with the worker's own settings."""
        known = (self.context.device, self.context.seed, self.context.pool, self.context.coordinate)
        return {"value": value, "scale": self.scale, "drawn": self.drawn, "known": known}

    @register(protocol=RANK_ZERO, returns="object")
    def make_unpicklable(self) -> Any:
        """A mistake: a lock cannot travel."""
        return threading.Lock()

    @register(protocol=ONE_TO_ALL, returns="object")
    def where(self) -> tuple[int, int, str]:
        """Rank, world size and role."""
        return self.context.rank, self.context.world_size, self.context.role

    @register(protocol=ONE_TO_ALL, returns="object")
    def draw(self, count: int) -> tuple[list[float], float, float]:
        """Random numbers of the three global generators."""
        return torch.rand(count).tolist(), random.random(), float(np.random.rand())

    @register(protocol=ONE_TO_ALL, returns="object")
    def draw_normal(self, seed: int | None = None) -> float:
        """One of numpy's normal numbers, which it draws in pairs."""
        if seed is not None:
            np.random.seed(seed)
        return float(np.random.randn())

    @register(protocol=ONE_TO_ALL, returns="object")
    def append_rank(self, given: dict[str, list[int]]) -> list[int]:
        """Writes into an argument."""
        given["seen"].append(self.context.rank)
        return given["seen"]

    @register(protocol=ONE_TO_ALL, returns="object")
    def remember(self, word: str) -> list[str]:
        """The worker's own list."""
        self.words.append(word)
        return self.words

    @register(protocol=ALL_TO_ALL, returns="object")
    def hear(self, value: Any) -> tuple[int, Any]:
        """Returns this rank's item, of any kind."""
        return self.context.rank, value

    @register(protocol=DP)
    def lend_buffer(self, batch: TensorDict) -> TensorDict:
        """A view of memory that the worker goes on writing into."""
        self.buffer = torch.zeros(len(batch))
        return TensorDict({"lent": self.buffer}, batch_size=batch.batch_size)

    @register(protocol=ONE_TO_ALL, returns="object")
    def write_buffer(self) -> None:
        """Writes into what was lent."""
        self.buffer.fill_(7.0)

    @register(protocol=DP)
    def write_in_place(self, batch: TensorDict) -> TensorDict:
        """A mistake: the rows belong to everybody."""
        batch["x"].add_(1.0)
        return TensorDict({"x": batch["x"].clone()}, batch_size=batch.batch_size)

    @register(protocol=DP)
    def lose_a_row(self, batch: TensorDict) -> TensorDict:
        """A mistake: rows='same' promises one row for each."""
        return batch[1:]

    @register(protocol=DP, writes=["promised"])
    def write_other(self, batch: TensorDict) -> TensorDict:
        """A mistake: another column than promised."""
        return TensorDict({"other": batch["x"]}, batch_size=batch.batch_size)

    @register(protocol=BEYOND)
    def echo_beyond(self, batch: TensorDict) -> TensorDict:
        """A mistake of the protocol."""
        return self.echo(batch)

    @register(protocol=DP, returns="metrics")
    def count_in_words(self, batch: TensorDict) -> dict[str, str]:
        """A mistake: two characters are not a sum and a count."""
        return {"rows": "12"}

    @register(protocol=DP)
    def return_dict(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """A mistake: no TensorDict."""
        return {"x": batch["x"]}

    @register(protocol=DP)
    def fail(self, batch: TensorDict, kind: str) -> TensorDict:
        """Raises on the highest rank: an exception of ours, another, or one that ends programs."""
        errors = {
            "ours": RewardError("no reward today"),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
            "mute": _MuteError(),
        }
        if self.context.rank == self.context.world_size - 1:
            raise errors.get(kind, KeyError("lost"))
        return batch.clone()

    @register(protocol=DP, returns="metrics")
    def timed(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        """Has a sub-span."""
        with self.context.span("inner"):
            return {"rows": (len(batch), 1)}

    @register(protocol=DP, reads=["x"], writes=["x", "start", "end"])
    def step(self, batch: TensorDict, seconds: float = 0.0, until: str = "") -> TensorDict:
        """X + 1, and when it was made: after some seconds, or as soon as there is a file `until`."""
        start = torch.full(batch.batch_size, time.time(), dtype=torch.float64)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0 and not (until and Path(until).exists()):
            time.sleep(min(left_s, 0.05) if until else left_s)
        end = torch.full(batch.batch_size, time.time(), dtype=torch.float64)
        return TensorDict({"x": batch["x"] + 1, "start": start, "end": end}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO)
    def step_on_rank_zero(self, batch: TensorDict, seconds: float) -> TensorDict:
        """The same, while the other ranks have nothing to do."""
        return self.step(batch, seconds)

    @register(protocol=ALL_TO_ALL, returns="object")
    def say(self, text: str) -> None:
        """Prints this rank's text."""
        print(text)  # noqa: T201 - what is printed is what is looked at

    @register(protocol=ONE_TO_ALL, returns="object")
    def now(self) -> float:
        """When it was called, in wall-clock seconds."""
        return time.time()

    @register(protocol=ONE_TO_ALL, returns="object")
    def sum_of_ranks(self) -> float:
        """A collective: the sum of all ranks' numbers."""
        total = torch.tensor(float(self.context.rank))
        torch.distributed.all_reduce(total)
        return total.item()

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self, connection: str) -> tuple[int, float, float]:
        """A collective over two groups: joint rank, the sum of joint ranks, and what the last one broadcasts."""
        joint = self.context.connections[connection]
        total = torch.tensor(float(joint.rank))
        torch.distributed.all_reduce(total, group=joint.group)
        sent = torch.tensor(100.0 + joint.rank)
        torch.distributed.broadcast(sent, src=joint.world_size - 1, group=joint.group)
        return joint.rank, total.item(), sent.item()

    @register(protocol=ONE_TO_ALL, returns="object")
    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set, the GPUs that are seen, and the probe's own."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "PROBE")
        return {name: os.environ[name] for name in names if name in os.environ}

    @register(protocol=THREE_D, returns="metrics")
    def sum_over_skew(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        """A collective in a method whose ranks have very different numbers of tokens."""
        total = torch.zeros(())
        for row in batch["tokens"].unbind():
            total += row.sum()
        torch.distributed.all_reduce(total)
        return {"total": (total.item(), 1)}


class SoloWorker(ProbeWorker):
    """The probe for groups that need no process group."""

    needs_process_group = False


class StageWorker:
    """The groups that the checks share: building them takes longer than any check.

    `three` and `two` have three and two data-parallel ranks on pools of their own; `sharded` shares the processes
    of `two` with another layout (tp_size=2), `colocated`, laid out like that too, their slots alone; `solo` has
    one rank. `free` has two ranks that never meet: what one of them raises leaves the group as it is.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        two, three, solo, free = (
            ResourcePool([count], device="cpu", name=f"stage-{name}")
            for name, count in (("two", 2), ("three", 3), ("solo", 1), ("free", 2))
        )
        self.pools = (two, three, solo, free)
        specs = {"two": _spec(ParallelSpec(dp_size=2), scale=2.0), "sharded": _spec(ParallelSpec(tp_size=2))}
        shared = executor.build_groups(two, specs, fused=True, wait=False)
        self.two, self.sharded = shared["two"], shared["sharded"]
        for pool, role, spec in (
            (two, "colocated", _spec(ParallelSpec(tp_size=2))),
            (three, "three", _spec(ParallelSpec(dp_size=3), balance=True)),
            (solo, "solo", _spec(ParallelSpec(), worker=SoloWorker)),
            (free, "free", _spec(ParallelSpec(dp_size=2), worker=SoloWorker)),
        ):
            shared |= executor.build_groups(pool, {role: spec}, wait=False)
        self.colocated, self.three = shared["colocated"], shared["three"]
        self.solo, self.free = shared["solo"], shared["free"]
        executor.wait_until_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self.pools:
            self.executor.release(pool)


def _spec(
    train: ParallelSpec, *, scale: float = 1.0, balance: bool = False, worker: type[Worker] = ProbeWorker
) -> WorkerSpec:
    kwargs = {"scale": scale}
    return WorkerSpec(
        worker=worker,
        topology=Topology(train),
        kwargs=kwargs,
        seed=11,
        environment={"PROBE": "set"},
        balance_tokens=balance,
    )
