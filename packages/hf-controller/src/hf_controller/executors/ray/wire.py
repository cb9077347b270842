"""Calls and answers as bytes: Ray carries bytes several times faster than objects, and a call is packed once for all
ranks.

Object references travel next to the bytes, where Ray sees them and counts them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import cloudpickle

from hf_controller.data.results import Metrics
from hf_controller.data.transport import Shard
from hf_controller.executors.ray.handles import Delivered, LocalBatchHandle, Sealed
from hf_controller.executors.ray.shipping import find_unpicklable
from hf_controller.groups.call import Call
from hf_controller.trace import CallReport, Span
from hf_protocols import ProtocolError
from hf_protocols.foreign_code import Caught

if TYPE_CHECKING:
    from hf_controller.data.results import Outcome

__all__ = ["PackedCall", "pack_answer", "pack_call", "pack_once", "unpack_answer", "unpack_call"]


_MAX_SENT_BYTES = 8 * 1024
_MAX_SENT_REFERENCES = 64
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

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, LocalBatchHandle):
            return "batch", self.batches.setdefault(value.contents, len(self.batches))
        if isinstance(value, ray.ObjectRef | Sealed):
            return "reference", self.references.setdefault(value, len(self.references))
        return None


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, references: Sequence[Any], batches: Sequence[Any]) -> None:
        super().__init__(source)
        self._found = {"reference": references, "batch": [Delivered(contents) for contents in batches]}

    def persistent_load(self, key: tuple[str, int]) -> Any:
        kind, number = key
        return self._found[kind][number]


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

    Many rows, and many references such as those to every rank's part of a batch, are stored once for all ranks rather
    than sent to each: a message to each of n ranks with n references would cost time in proportion to n * n.
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


def unpack_answer(answer: Any) -> tuple[Outcome, CallReport]:
    """Returns the outcome and the report."""
    packed, reference = answer if isinstance(answer, tuple) else (answer, None)
    outcome, span, *rest = pickle.loads(packed)
    if isinstance(outcome, Shard):
        outcome = replace(outcome, arrays=reference)
    elif isinstance(outcome, dict):
        outcome = Metrics(outcome)
    return outcome, CallReport(Span._make(span), *rest)
