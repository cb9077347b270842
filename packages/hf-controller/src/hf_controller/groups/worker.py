"""A worker: one rank of one role. Its registered methods are what a group can call."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from hf_controller.trace import SubSpan
from hf_protocols import Coordinate, ProtocolError, Topology, registered_methods
from hf_protocols.validation import Checks, show

__all__ = ["Connection", "Worker", "WorkerContext", "WorkerSpec", "as_pieces", "construct_worker", "takes_pieces"]

_check = Checks(ProtocolError)

_PIECES = "__hybridflow_pieces__"
_SET_FOR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One rank's end of a connection.

    Attributes:
        name: the connection's name.
        group: the joint `torch.distributed.ProcessGroup`; ranks in its collectives are joint ranks.
        rank: this rank in it.
        world_size: ranks of both worker groups.
        ranks: the joint ranks of each role, in the role's own order.
    """

    name: str
    group: Any
    rank: int
    world_size: int
    ranks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A rank's view of itself.

    Attributes:
        role: the role's name, such as `"actor"`.
        rank: this rank, 0 ... world_size - 1, sorted by (machine, device).
        world_size: ranks of the group.
        topology: the role's layout.
        device: where its tensors live, such as `"cpu"` or `"cuda:0"`; arguments always arrive on the host.
        seed: the group's seed, equal on all ranks. Python's, numpy's and torch's global generators were seeded with
            it before the worker was constructed.
        pool: name of the resource pool.
        connections: joint process groups with other groups, by name; see `hf_controller.connect`.
        sub_spans: what `span` timed in the running call.
        labels: of the running call, as `Trace.label` sets them, such as `iteration` in a run.
    """

    role: str
    rank: int
    world_size: int
    topology: Topology
    device: str = "cpu"
    seed: int = 0
    pool: str = "pool"
    connections: dict[str, Connection] = field(default_factory=dict, repr=False, compare=False)
    sub_spans: list[SubSpan] = field(default_factory=list, repr=False, compare=False)
    labels: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def coordinate(self) -> Coordinate:
        """This rank's position on every axis."""
        return self.topology.coordinate(self.rank)

    @contextmanager
    def span(self, name: str, kind: str | None = None) -> Iterator[None]:
        """Measures the time of a part of a method; the trace shows the part inside the call's span.

        `kind` names the work for readers of the trace that do not know `name`: `"transition"` for weights on their way
        into the generation layout, `"generation"` for drawing responses.
        """
        start_s = time.time()
        try:
            yield
        finally:
            self.sub_spans.append(SubSpan(name, start_s, time.time(), kind))


class Worker:
    """Base class of workers. Methods marked with `hf_protocols.register` can be called through the group.

    A method gets its batch arguments as TensorDicts of its own rows, on the host. They are views of memory that all
    readers of the batch share: read them, or clone before writing in place. A write reaches every reader at once. After
    a write by torch's own operations (`add_`, `x[...] =`) the call fails; writes through `.numpy()` or `.data` go
    unnoticed.

    When the constructor runs, the default process group of `torch.distributed` already joins the group's ranks (gloo on
    CPU, nccl on GPU).
    """

    needs_process_group: ClassVar[bool] = True
    """Set to False in a worker that calls no collective: no default process group is then made for it."""

    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} takes no arguments, got {', '.join(sorted(kwargs))}")
        self.context = context

    @classmethod
    def one_layout_per_process(cls, kwargs: Mapping[str, Any]) -> bool:
        """Returns True if a worker with these arguments uses a library that keeps its training layout in globals.

        `fused=True` with a role of another training layout is then refused, before any process starts.
        """
        return False

    def close(self) -> None:
        """Frees what the worker holds; called when its group is closed in order."""


def construct_worker(spec: WorkerSpec, context: WorkerContext) -> Worker:
    """The worker of one rank.

    Raises:
        ProtocolError: if its constructor does not call Worker's.
    """
    worker = spec.worker(context, **spec.kwargs)
    if getattr(worker, "context", None) is not context:
        raise ProtocolError(
            f"{type(worker).__name__}.__init__ leaves the worker without its context. Call super().__init__(context)"
        )
    return worker


def as_pieces(method: Method) -> Method:
    """Gives a registered method each batch argument as a list of TensorDicts, none of them a copy.

    Without this mark, a batch whose rows come from several producers is copied into one TensorDict. A method that works
    through its rows piece by piece does not need this copy. Together the pieces have the batch's rows, in order; there
    is at least one piece.
    """
    setattr(method, _PIECES, True)
    return method


def takes_pieces(method: Callable[..., Any]) -> bool:
    """Returns True if `method` is marked with `as_pieces`."""
    return bool(getattr(method, _PIECES, False))


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification of the ranks of one role.

    Attributes:
        worker: the class; it is constructed on every rank as `worker(context, **kwargs)`.
        topology: the role's layout; its world size is the number of slots of the pool.
        kwargs: the constructor's arguments. They travel, so they are picklable.
        seed: seed of the global generators, equal on all ranks.
        environment: variables of the ranks' processes, set before anything heavy is imported there. Roles that share
            processes share them. `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and
            `MASTER_PORT` are set there as torchrun does, and refused here. `OMP_NUM_THREADS`, here or in the program's
            environment, is the number of torch's threads in a rank. By default ranks on CPUs divide the cores of their
            machine among those of their pool, and ranks with a GPU or without a process group have one thread.
            Ranks on CPUs that have a process group see no GPU, unless `CUDA_VISIBLE_DEVICES` is set here.
        balance_tokens: give ranks rows of equal token sums, where a protocol splits rows. The number of rows per rank
            still differs by at most one, and results come back in their logical order.

    Raises:
        ProtocolError: if `worker` is not a subclass of Worker, or has no registered method; for a value of another
            kind, and for arguments that its constructor does not take.
    """

    worker: type[Worker]
    topology: Topology
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    balance_tokens: bool = False

    def __post_init__(self) -> None:
        worker: Any = self.worker
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ProtocolError(f"worker={show(worker)} is not a subclass of hf_controller.Worker")
        if not registered_methods(worker):
            raise ProtocolError(f"{worker.__name__} has no method marked with hf_protocols.register")
        what = f"WorkerSpec of {worker.__name__}: "
        _check.kind(f"{what}topology", self.topology, Topology, "a Topology(ParallelSpec(...))")
        _check.kind(f"{what}kwargs", self.kwargs, Mapping, "a mapping of names to values")
        if problem := _find_misfit(worker, self.kwargs):
            raise ProtocolError(f"{what}kwargs do not fit its constructor: {problem}")
        _check.kind(f"{what}environment", self.environment, Mapping, "a mapping of names to strings")
        _check.count(f"{what}seed", self.seed, least=0)
        if self.seed >= 2**64:
            raise ProtocolError(f"{what}seed={self.seed} must be below 2**64")
        _check.kind(f"{what}balance_tokens", self.balance_tokens, bool, "True or False")
        for name, value in self.environment.items():
            _check.kind(f"{what}environment[{show(name)}]", value, str, "a string")
            _check.kind(f"{what}environment: name", name or None, str, "a string")
            if name in _SET_FOR_RANKS or "=" in name or "\0" in name + value:
                why = "it is set for every rank" if name in _SET_FOR_RANKS else "no variable can hold that"
                raise ProtocolError(f"{what}environment has {show(name)}={show(value)}: {why}. Leave it out")


def _find_misfit(worker: type[Worker], kwargs: Mapping[str, Any]) -> str:
    """The reason for which `worker(context, **kwargs)` cannot be called, absent arguments apart; empty if it can."""
    if worker.__init__ is Worker.__init__:
        taken = ", ".join(map(str, kwargs))
        return f"it has none of its own that takes {taken}. Define __init__(self, context, {taken})" if kwargs else ""
    signature = inspect.signature(worker)
    try:
        signature.bind_partial(None)
    except TypeError as error:
        return f"it does not take a context: {error}. Define __init__(self, context, ...)"
    try:
        signature.bind_partial(None, **kwargs)
    except TypeError as error:
        return f"{error}. Pass what __init__ takes after its context"
    return ""
