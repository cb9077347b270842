"""Ray without processes, to measure the controller's cost: actors that return at once, and a dict of objects.

Each message from the controller to an actor is recorded: its bytes, and the number of different messages.
All answers are there once somebody waits for one, so that calls that are made one after another are in flight together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray

from hf_controller.data.results import Metrics
from hf_controller.data.transport import Column, Shard
from hf_controller.executors.ray import actor_group as actor_group_module
from hf_controller.executors.ray import executor as executor_module
from hf_controller.executors.ray.actor_ref import Location
from hf_controller.executors.ray.cluster import Cluster
from hf_controller.executors.ray.wire import pack_answer, unpack_call
from hf_controller.groups.call import BatchArgument, Call
from hf_controller.trace import CallReport, Span

__all__ = ["RecordedRay", "recorded_ray"]

REFERENCE_BYTES = 28
NUM_COLUMNS_ANSWERED = 4


class RecordedRay:
    """The messages sent so far, and the stored objects.

    Attributes:
        sent_bytes: bytes of all messages to ranks, references in them included, and of what was put for them.
        num_messages: messages to ranks.
        num_pickled: different pickled messages.
        own_s: CPU seconds that reading the messages took, which ranks do. The rest of the record's own cost counts
            as the controller's.
    """

    def __init__(self) -> None:
        self.forget()
        self._values: dict[Any, Any] = {}
        self._pending: set[Any] = set()
        self._answers: dict[int, tuple[Any, Any]] = {}

    def forget(self) -> None:
        """Count from nothing."""
        self.sent_bytes = self.num_messages = self.num_pickled = 0
        self.own_s = 0.0

    def store(self, value: Any, *, done: bool) -> Any:
        """A new reference of a value."""
        reference = ray.ObjectRef.from_random()
        self._values[reference] = value
        if not done:
            self._pending.add(reference)
        return reference

    def put(self, value: Any) -> Any:
        """`ray.put`."""
        if isinstance(value, bytes):
            self.sent_bytes += len(value)
        elif isinstance(value, list):
            self.sent_bytes += REFERENCE_BYTES * len(value)
        reference = self.store(value, done=True)
        return reference

    def get(self, references: Any, timeout: float | None = None) -> Any:
        """`ray.get`; what is asked for is there."""
        if not isinstance(references, list):
            return self.get([references])[0]
        self._pending.clear()
        values = [self._values[each] for each in references]
        return values

    def wait(
        self, references: Sequence[Any], *, num_returns: int, timeout: float, fetch_local: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """`ray.wait`; what is waited for is there."""
        if timeout > 0:
            self._pending.clear()
        ready = [each for each in references if each not in self._pending] if self._pending else list(references)
        pending = [each for each in references if each in self._pending]
        return ready, pending

    def call(self, rank: int, method: str, message: Sequence[Any]) -> Any:
        """An actor is given a message."""
        if method == "locate":
            return self.store(Location(1, "127.0.0.1", "recorded", ""), done=True)
        if method not in ("run", "run_apart"):
            return self.store(None, done=True)
        packed, *beside = message
        references = beside[0] if beside else ()
        self.num_messages += 1
        self.sent_bytes += len(packed) if isinstance(packed, bytes) else REFERENCE_BYTES
        self.sent_bytes += REFERENCE_BYTES * (len(references) if isinstance(references, list | tuple) else 1)
        self.sent_bytes += REFERENCE_BYTES * len(beside[1:])
        answer = self._answer(method, packed, references, beside[1:])
        if method == "run":
            return self.store(answer, done=False)
        return [self.store(answer, done=False), self.store(None, done=False)]

    def _answer(self, method: str, packed: Any, references: Any, batches: Sequence[Any]) -> Any:
        """The ranks' answer to a message, made once for all that get the very same."""
        if id(packed) not in self._answers:
            start_s = time.thread_time()
            self.num_pickled += 1
            content = packed if isinstance(packed, bytes) else self._values[packed]
            found = references if isinstance(references, list | tuple) else self._values[references]
            report = _report(unpack_call(content, found, *batches))
            metrics = Metrics({"loss": (1.0, 1.0), "tokens": (9.0, 1.0)})
            answer = pack_answer(metrics if method == "run" else _shard(report.num_rows), report)
            self._answers[id(packed)] = packed, answer
            self.own_s += time.thread_time() - start_s
        return self._answers[id(packed)][1]


def _report(call: Call) -> CallReport:
    now_s = time.time()
    span = Span(
        call_id=call.call_id,
        pool="recorded",
        host=call.role,
        role=call.role,
        method=call.method,
        rank=0,
        submit_s=call.submit_s,
        ready_s=now_s,
        fetched_s=now_s,
        computed_s=now_s,
        end_s=now_s,
        bytes_read=0,
        bytes_written=0,
        labels=call.labels,
    )
    is_fed = any(isinstance(value, BatchArgument) for value in (*call.args, *call.kwargs.values()))
    return CallReport(span=span, num_rows=4 if is_fed else 0)


def _shard(num_rows: int) -> Shard:
    columns = {
        f"column_{number}": Column(position=number, dtype="float32", row_shape=(), lengths=None, num_bytes=4 * num_rows)
        for number in range(NUM_COLUMNS_ANSWERED)
    }
    return Shard(num_rows=num_rows, columns=columns, arrays=None)


class _RecordedActor:
    """An actor without a process."""

    def __init__(self, recorded: RecordedRay, rank: int) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: f"{id(self):x}")
        self._recorded = recorded
        self._rank = rank

    def __getattr__(self, method: str) -> Any:
        recorded, rank = self._recorded, self._rank
        found = SimpleNamespace(remote=lambda *message: recorded.call(rank, method, message))
        self.__dict__[method] = found
        return found


class _RecordedCluster(Cluster):
    """A cluster without processes of its own, that is always there."""

    def __init__(self, **_: Any) -> None:
        self.is_lost = False
        self._services = {}
        self._gcs = self._spilling = self._watchdog = None

    def stop(self, *, keeps_logs: bool = False) -> None:
        pass


@contextmanager
def recorded_ray() -> Iterator[RecordedRay]:
    """Within it, a `RayExecutor` with an address starts no process and reaches none."""
    recorded = RecordedRay()

    def start_host(name: str, role: str, rank: int, *_: Any, **__: Any) -> _RecordedActor:
        return _RecordedActor(recorded, rank)

    def place(pool: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            pool=pool, nodes={"recorded"}, on_one_machine=False, options=lambda rank: {}, remove=lambda: None
        )

    context = SimpleNamespace(get_node_id=lambda: "recorded", get_actor_id=lambda: None)
    with ExitStack() as stack:
        for name in ("put", "get", "wait"):
            stack.enter_context(mock.patch.object(ray, name, getattr(recorded, name)))
        for name, value in {"kill": None, "is_initialized": True, "get_runtime_context": context}.items():
            stack.enter_context(mock.patch.object(ray, name, return_value=value))
        stack.enter_context(mock.patch.object(executor_module, "Cluster", _RecordedCluster))
        stack.enter_context(mock.patch.object(executor_module, "place", place))
        stack.enter_context(mock.patch.object(executor_module, "_start_slicer", return_value=(None, "recorded")))
        stack.enter_context(mock.patch.object(actor_group_module, "_start_actor", start_host))
        yield recorded
