"""Calls and answers as bytes: Ray carries bytes several times faster than objects, and a call is packed once for all
ranks.

Object references stay beside the bytes, where Ray sees them and counts them.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from hf_controller.executors.ray.store import Sealed
from hf_controller.results import Value

if TYPE_CHECKING:
    from hf_controller.dispatch import Call
    from hf_controller.results import Outcome
    from hf_controller.trace import CallReport

__all__ = ["pack_answer", "pack_call", "unpack_answer", "unpack_call"]


class _CallPickler(cloudpickle.CloudPickler):
    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        self.references: dict[Any, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, ray.ObjectRef | Sealed):
            return self.references.setdefault(value, len(self.references))
        return None


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, references: list[Any]) -> None:
        super().__init__(source)
        self._references = references

    def persistent_load(self, number: int) -> Any:
        return self._references[number]


def pack_call(call: Call) -> tuple[bytes, list[Any]]:
    """The call's bytes, and the references in it."""
    target = io.BytesIO()
    pickler = _CallPickler(target)
    pickler.dump(call)  # type: ignore[no-untyped-call]
    return target.getvalue(), list(pickler.references)


def unpack_call(packed: bytes, references: list[Any]) -> Call:
    """The call."""
    call: Call = _CallUnpickler(io.BytesIO(packed), references).load()
    return call


def pack_answer(outcome: Outcome, report: CallReport) -> Any:
    """A rank's answer to the controller: bytes, and beside them the object that the method returned, if it did."""
    value = outcome if isinstance(outcome, Value) else None
    packed = pickle.dumps((None if value else outcome, report), protocol=pickle.HIGHEST_PROTOCOL)
    return packed if value is None else (packed, value)


def unpack_answer(answer: Any) -> tuple[Outcome, CallReport]:
    """The outcome, None where it is a batch, and the report."""
    packed, value = answer if isinstance(answer, tuple) else (answer, None)
    outcome, report = pickle.loads(packed)
    return value or outcome, report
