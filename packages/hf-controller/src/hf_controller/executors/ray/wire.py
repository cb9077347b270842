"""Calls and reports as bytes: Ray carries bytes several times faster than objects, and a call is packed once for all
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

if TYPE_CHECKING:
    from hf_controller.dispatch import Call
    from hf_controller.trace import CallReport

__all__ = ["pack_call", "pack_report", "unpack_call", "unpack_report"]


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


def pack_report(report: CallReport) -> bytes:
    """The report's bytes."""
    return pickle.dumps(report, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_report(packed: bytes) -> CallReport:
    """The report."""
    report: CallReport = pickle.loads(packed)
    return report
