"""Counter of the payload bytes that pass through this process, where Ray packs and unpacks them.

Every value that a process gives to Ray (an actor call's argument, an object that it puts) goes through
`SerializationContext.serialize`, and every value that it gets back through `deserialize_objects`. Both are wrapped
while the counter is open, and the sizes of what they produce and are given are added: what Ray then really writes or
reads. Nothing here knows what the controller says of itself. Rows that only pass by, as references do, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray._private.serialization import SerializationContext

__all__ = ["Payload", "count_payload"]


@dataclass
class Payload:
    """Bytes that this process packed for others, and bytes that it unpacked."""

    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Both ways together."""
        return self.sent_bytes + self.received_bytes


@contextmanager
def count_payload() -> Iterator[Payload]:
    """Count inside the block; every thread of this process counts."""
    payload = Payload()
    serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

    def count_sent(self: SerializationContext, value: Any) -> Any:
        packed = serialize(self, value)
        payload.sent_bytes += packed.total_bytes
        return packed

    def count_received(self: SerializationContext, packed: list[Any], *args: Any) -> Any:
        payload.received_bytes += sum(len(part) for data, metadata, *_ in packed for part in (data, metadata) if part)
        return deserialize(self, packed, *args)

    SerializationContext.serialize, SerializationContext.deserialize_objects = count_sent, count_received
    try:
        yield payload
    finally:
        SerializationContext.serialize, SerializationContext.deserialize_objects = serialize, deserialize
