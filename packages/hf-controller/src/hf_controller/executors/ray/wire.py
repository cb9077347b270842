"""A call on its way: packed, run in a rank's process, and answered.

Calls and answers are bytes: Ray carries bytes several times faster than objects, and a call is packed once for all
ranks.

Object references travel next to the bytes, where Ray sees them and counts them.
"""

from __future__ import annotations

import gc
import io
import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import cloudpickle

from hf_controller.data.expressions import Source
from hf_controller.data.results import Metrics, Value
from hf_controller.data.transport import Shard
from hf_controller.executors.ray.handles import LocalBatchHandle, Sealed, SplitBatchHandle, attach
from hf_controller.executors.ray.shipping import find_unpicklable
from hf_controller.groups.call import Call
from hf_controller.trace import CallReport, Span, refuse
from hf_protocols import ProtocolError
from hf_protocols.foreign_code import Caught

if TYPE_CHECKING:
    from hf_controller.data.results import Outcome
    from hf_controller.failures import Failure

__all__ = ["CallServer", "PackedCall", "pack_answer", "pack_call", "pack_once", "unpack_answer", "unpack_call"]

_MAX_SENT_BYTES = 8 * 1024
_MAX_SENT_REFERENCES = 64
# Ray hands smaller results around through the caller, and the controller touches no tensor.
_MIN_RETURNED_BYTES = 128 * 1024
_OWN = ("hf_controller", "hf_protocols")
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


class PackedCall(NamedTuple):
    """A call on its way: bytes, the references in it, and those of batches on this machine.

    Bytes and the list of references may each be in the object store instead: Ray hands over what is there.
    """

    packed: Any
    references: Any
    batches: list[Any]

    @property
    def message(self) -> tuple[Any, ...]:
        """The arguments of the actor's method. Ray waits for the batches and hands over their contents; references
        stay as they are inside their list. An empty list costs Ray as much as the call's bytes.
        """
        is_alone = isinstance(self.references, list) and not self.references and not self.batches
        return (self.packed,) if is_alone else (self.packed, self.references, *self.batches)


class _CallPickler(cloudpickle.CloudPickler):
    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        self.references: dict[Any, int] = {}
        self.batches: dict[Any, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """Returns how a value is rebuilt. Unlike `persistent_id` it is not asked about numbers and plain containers."""
        kind = type(value)
        if kind is ray.ObjectRef or kind is Sealed:
            return _take, ("reference", self._number(value))
        if kind is Source and all(type(each) is SplitBatchHandle for each in value.shards):
            # Two numbers for each of a thousand ranks: objects would take most of the time of a call.
            metadata = array("I", [self._number(each.metadata) for each in value.shards])
            contents = array("I", [self._number(each.contents) for each in value.shards])
            return _take_source, (value.maker, metadata, contents)
        if kind is LocalBatchHandle:
            return _take, ("batch", self.batches.setdefault(value.contents, len(self.batches)))
        if not isinstance(value, type | FunctionType) or _is_own(value):
            return NotImplemented
        return super().reducer_override(value)  # type: ignore[no-untyped-call]

    def _number(self, reference: Any) -> int:
        return self.references.setdefault(reference, len(self.references))


def _take_source(maker: str, metadata: Sequence[int], contents: Sequence[int]) -> Any:
    """Stands for a batch whose shards are `SplitBatchHandle`s of references that travel next to the call."""
    raise AssertionError(f"{len(metadata)} and {len(contents)} references of {maker} are next to the call")


def _is_own(value: type | FunctionType) -> bool:
    """True for a class or a function that every rank can import: cloudpickle makes many checks for each."""
    return "<locals>" not in value.__qualname__ and str(value.__module__).partition(".")[0] in _OWN


class _CallUnpickler(pickle.Unpickler):
    """Creates no reference cycle: its memo holds all that it reads, and a cycle would live until a garbage collection.

    Until then a rank would hold the batches of calls that are long over.
    """

    def __init__(self, source: io.BytesIO, references: Sequence[Any], batches: Sequence[Any]) -> None:
        super().__init__(source)
        found = {"reference": references, "batch": [attach(contents) for contents in batches]}
        self._takers: dict[Any, Any] = {
            _take: partial(_take_from, found),
            _take_source: partial(_take_source_from, references),
        }

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._takers.get(found, found) if isinstance(found, FunctionType) else found


def _take_from(found: Mapping[str, Sequence[Any]], kind: str, number: int) -> Any:
    return found[kind][number]


def _take_source_from(
    references: Sequence[Any], maker: str, metadata: Sequence[int], contents: Sequence[int]
) -> Source:
    pairs = zip(metadata, contents, strict=True)
    handles = [SplitBatchHandle(metadata=references[a], contents=references[b]) for a, b in pairs]
    return Source(handles, maker=maker)


def _take(kind: str, number: int) -> Any:
    """Stands in a packed call for what travels next to it; `_CallUnpickler` has its own."""
    raise AssertionError(f"{kind} {number} is next to the call")


def pack_call(call: Call) -> PackedCall:
    """The call, ready to travel.

    Raises:
        ProtocolError: for an argument that cannot be pickled.
    """
    if _is_plain(call):
        return PackedCall(pickle.dumps(tuple(call), protocol=pickle.HIGHEST_PROTOCOL), [], [])
    target = io.BytesIO()
    pickler = _CallPickler(target)
    with Caught() as caught:
        pickler.dump(tuple(call))  # type: ignore[no-untyped-call]
    if caught.error is not None:
        named = {f"number {number + 1}": value for number, value in enumerate(call.args)} | dict(call.kwargs)
        found = find_unpicklable(named, _CallPickler(io.BytesIO()).dump)
        if found is None:
            raise caught.error
        raise ProtocolError(
            f"{call.role}.{call.method}: the argument {found} cannot travel to another process ({caught.error})"
        ) from caught.error
    return PackedCall(target.getvalue(), list(pickler.references), list(pickler.batches))


def pack_once(call: Call) -> tuple[tuple[Any, ...], list[Any]]:
    """A rank's message, and what it refers to.

    Many rows, and many references such as those to every rank's part of a batch, are stored once for all ranks and not
    sent to each. A message to each of n ranks with n references would cost time in proportion to n * n.
    """
    packed = pack_call(call)
    inputs = [*packed.references, *packed.batches]
    if len(packed.packed) > _MAX_SENT_BYTES:
        packed = packed._replace(packed=ray.put(packed.packed))
    if len(packed.references) > _MAX_SENT_REFERENCES:
        packed = packed._replace(references=ray.put(packed.references))
    return packed.message, inputs


def _is_plain(call: Call) -> bool:
    """Returns True if all arguments are numbers and words: Python's own pickler is several times faster then."""
    given = (*call.args, *call.kwargs.values(), *call.labels.values())
    return not call.after and all(type(value) in _PLAIN_TYPES for value in given)


class CallServer:
    """Runs the calls of one rank's process, one after another.

    Args:
        name: the actor group's name: its roles.
        rank: this rank.
        slicer: the name under which other machines ask this process for slices; None where there are none.
    """

    def __init__(self, name: str, rank: int, slicer: str | None) -> None:
        self._name = name
        self._rank = rank
        self._slicer = slicer
        self._runtime: Any = None
        self._pool = ""
        self._unbuilt: Failure | None = None
        self._role = name

    # One variable argument, which Ray binds in half the time of three, for every rank of every call.
    def run(self, *message: Any) -> Any:
        """Runs one call that returns metrics: its answer."""
        return pack_answer(*self._run(message))

    @ray.method(num_returns=2)
    def run_apart(self, *message: Any) -> tuple[Any, Any]:
        """Runs one call that returns a batch or an object. Returns the answer and the contents. The answer includes the
        metadata if there may be readers on other machines. The contents are the shard for readers on this machine, or
        the object.
        """
        outcome, report = self._run(message)
        if isinstance(outcome, Value):
            return pack_answer(None, report), outcome
        metadata, contents = _pack_shard(outcome) if isinstance(outcome, Shard) else (outcome, outcome)
        return pack_answer(metadata if self._slicer is not None else None, report), contents

    def _run(self, message: tuple[Any, ...]) -> tuple[Outcome, CallReport]:
        call = unpack_call(*message)
        if self._runtime is None:
            assert self._unbuilt is not None
            return self._unbuilt, refuse(call, self._unbuilt, pool=self._pool, host=self._name, rank=self._rank)
        self._role = call.role
        try:
            outcome, report = self._runtime.run(call)
        finally:
            self._role = self._name
        if report.failure is None or report.failure.exception is None:
            return outcome, report
        # The frames of the exception hold the method's data in cycles: activations, after an out-of-memory error.
        failure = replace(report.failure, exception=None)
        del outcome
        report = report._replace(failure=failure)
        gc.collect()
        return failure, report


def unpack_call(packed: bytes, references: Sequence[Any] = (), *batches: Any) -> Call:
    """The call, from `PackedCall.message`."""
    if not references and not batches:
        return Call._make(pickle.loads(packed))
    return Call._make(_CallUnpickler(io.BytesIO(packed), references, batches).load())


def pack_answer(outcome: Outcome, report: CallReport) -> Any:
    """Returns a rank's answer: bytes, and next to them a reference that Ray must see."""
    reference: Any = None
    if isinstance(outcome, Shard):
        outcome, reference = replace(outcome, arrays=None), outcome.arrays
    # Plain tuples and dicts: a class is looked up by name on both sides.
    left = outcome.sums if isinstance(outcome, Metrics) else outcome
    packed = pickle.dumps((left, tuple(report.span), *report[1:]), protocol=pickle.HIGHEST_PROTOCOL)
    return packed if reference is None else (packed, reference)


def _pack_shard(shard: Shard) -> tuple[Shard, tuple[Shard, Any]]:
    """Returns metadata for readers on other machines, and metadata with arrays for those on its own.

    A large shard is one object with its metadata, as fast as a bare result; of a small one the arrays are put apart.
    """
    arrays = shard.arrays.arrays
    if sum(array.nbytes for array in arrays) < _MIN_RETURNED_BYTES:
        stored = replace(shard, arrays=Sealed(ray.put(arrays)))
        return stored, (stored, None)
    bare = replace(shard, arrays=None)
    return bare, (bare, arrays)


def unpack_answer(answer: Any) -> tuple[Outcome, CallReport]:
    """Returns the outcome and the report."""
    packed, reference = answer if isinstance(answer, tuple) else (answer, None)
    outcome, span, *rest = pickle.loads(packed)
    if isinstance(outcome, Shard):
        outcome = replace(outcome, arrays=reference)
    elif isinstance(outcome, dict):
        outcome = Metrics(outcome)
    return outcome, CallReport(Span._make(span), *rest)
