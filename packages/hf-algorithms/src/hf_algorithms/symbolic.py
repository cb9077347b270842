"""Calls that are written down instead of made: worker groups without workers, for reading a recipe's dataflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from hf_controller import BatchFuture, Executor, ResourcePool, Trace, Worker, WorkerGroup, WorkerSpec
from hf_controller.dispatch import BatchArgument, Call, StoredArgument
from hf_controller.executors.base import check_specs
from hf_controller.expressions import Expression, Extent, Leaf, Segment, Source, choose_columns
from hf_protocols import ConfigError, GenerationSpec, MethodSpec, ParallelSpec, RowSelection, Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.transport import ObjectStore

__all__ = ["SymbolicCall", "SymbolicExecutor", "SymbolicResult"]


@dataclass(frozen=True, eq=False)
class SymbolicResult:
    """Stands for what a call returns, or for a batch that was put (``call`` None): rows and columns by name."""

    call: SymbolicCall | None
    num_rows: int
    columns: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class SymbolicCall:
    """A call that was written down.

    Attributes:
        role: whose worker.
        method: its registered method.
        spec: the registration.
        reads: where the rows of each column that it reads come from; of the batches it is given, by name.
        objects: the calls whose objects it is given.
        num_rows: rows of its batches together.
    """

    role: str
    method: str
    spec: MethodSpec
    reads: Mapping[str, Sequence[Segment]]
    objects: Sequence[SymbolicCall]
    num_rows: int


class SymbolicExecutor(Executor):
    """Writes down every call of its groups and makes none. One rank stands for all.

    A method's rows follow from its registration: ``"times"`` is the ``n`` of an argument that has one (SamplingParams),
    ``"unknown"`` is taken for ``"same"``.

    Attributes:
        calls: what was called, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SymbolicCall] = []
        self._store = _NO_STORE
        self.trace = Trace()
        self.call_timeout_s = 0.0

    def build_group(self, role: str, worker: type[Worker]) -> WorkerGroup:
        """A group of ``worker`` on one imagined slot."""
        spec = WorkerSpec(worker=worker, topology=Topology(ParallelSpec(), GenerationSpec()))
        return WorkerGroup(role, spec, ResourcePool([1], device="cpu", name=role), self)

    def put_columns(self, columns: Sequence[str], num_rows: int) -> BatchFuture:
        """A batch of which only the column names and the number of rows are known."""
        result = SymbolicResult(None, num_rows, tuple(columns))
        # As if a call had made it: too few rows for the ranks are written down, not refused.
        return self._batch_future(Source([result], _Answer(result, "a batch"), result.columns))

    def put(self, batch: TensorDict) -> BatchFuture:
        return self.put_columns(tuple(map(str, batch.keys())), len(batch))

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        check_specs(pool, specs, fused=fused)
        return {role: WorkerGroup(role, spec, pool, self) for role, spec in specs.items()}

    def wait_until_ready(self) -> None:
        """Nothing is built."""

    def release(self, pool: ResourcePool) -> None:
        """Nothing is held."""

    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        return []

    def close(self) -> None:
        """Nothing is held."""

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> _Answer:
        call = next(iter(calls.values()))
        what = f"{call.role}.{call.method}"
        values = (*call.args, *call.kwargs.values())
        reads, num_rows = _locate(
            what, spec, [value.expression for value in values if isinstance(value, BatchArgument)]
        )
        objects = [value.handle.call for value in values if isinstance(value, StoredArgument)]
        made = SymbolicCall(
            role=call.role, method=call.method, spec=spec, reads=reads, objects=objects, num_rows=num_rows
        )
        self.calls.append(made)
        if spec.returns == "batch" and spec.writes is None:
            raise ConfigError(f"{what} does not say which columns it returns: register it with writes=[...]")
        times = next((value.n for value in values if type(getattr(value, "n", None)) is int), 1)
        rows = num_rows * times if spec.rows == "times" else num_rows
        return _Answer(SymbolicResult(made, rows, spec.writes or ()), what)

    def _batch_future(self, source: Source) -> BatchFuture:
        return _SymbolicBatch(Leaf(source), _NO_STORE, 0.0)


class _SymbolicBatch(BatchFuture):
    """A batch without values."""

    def result(self, timeout_s: float | None = None) -> NoReturn:
        _refuse("a batch")

    def _with(self, expression: Expression) -> BatchFuture:
        return _SymbolicBatch(expression, self._store, self._timeout_s)


class _Answer:
    """A call that was written down, as futures see it: its rows are known, its values are not."""

    def __init__(self, result: SymbolicResult, what: str) -> None:
        self.handles = (result,)
        self._what = what

    def wait(self, timeout_s: float | None) -> list[int]:
        return [self.handles[0].num_rows]

    def outcomes(self, timeout_s: float | None) -> NoReturn:
        _refuse(self._what)

    def explain_loss(self, error: Exception) -> None:
        """Nothing is there that could be lost."""


_NO_STORE: ObjectStore = None  # type: ignore[assignment] # what is never read needs no store


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"the step asks for the result of {what}, which a run over symbolic futures does not have: a step that "
        "branches on data gives its dataflow itself, Recipe(dataflow=Dataflow(...))"
    )


def _locate(what: str, spec: MethodSpec, expressions: Sequence[Expression]) -> tuple[dict[str, Sequence[Segment]], int]:
    """Where each column that a method reads comes from, and the rows of its first batch."""
    found: dict[str, Sequence[Segment]] = {}
    num_rows = 0
    for number, expression in enumerate(expressions):
        extents = {
            source: Extent(source.shards[0].num_rows, source.shards[0].columns) for source in expression.sources()
        }
        count, columns = expression.num_rows(extents), expression.columns(extents)
        wanted = columns if spec.reads is None else choose_columns(spec.reads, columns, what)
        located = expression.locate(RowSelection.range(0, count), wanted, extents)
        found.update(located if number == 0 else {f"{name}.{number}": rows for name, rows in located.items()})
        num_rows = num_rows or count
    return found, num_rows
