"""Headers of safetensors files, read without the library: names, dtypes, shapes and places of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_protocols.errors import ModelError
from hf_protocols.outer_files import HEAD_BYTES, describe_stand_in
from hf_protocols.validation import shorten, show

__all__ = ["StoredTensor", "read_header"]

_BITS = {
    **dict.fromkeys(("F4", "F4_E2M1"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_MOST_HEADER_BYTES = 100_000_000
"""The library's own bound."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file, as the header describes it."""

    path: Path
    dtype: str
    """In the format's words, such as `"BF16"`."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    stop: int

    def chunks(self, size: int = 1 << 24) -> Iterator[bytes]:
        """The tensor's bytes, a few megabytes at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for offset in range(self.start, self.stop, size):
                yield file.read(min(size, self.stop - offset))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file by name.

    Raises:
        ModelError: with the file's name in front, for a file that is absent, a stand-in, cut short, or another format.
    """
    try:
        if not path.is_file():
            what = "is a link to a file that does not exist. Fetch it again" if path.is_symlink() else "does not exist"
            raise ModelError(f"{path.name} {what if not path.exists() else 'is not a file'}")
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            head = file.read(HEAD_BYTES)
            header_bytes = _check_length(path.name, head, file_bytes)
            file.seek(_LENGTH_BYTES)
            text = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from None
    entries = _parse(path.name, text)
    first = _LENGTH_BYTES + header_bytes
    tensors = {name: _read_entry(path, name, entry, first) for name, entry in entries.items()}
    _check_places(path.name, tensors, first, file_bytes)
    return tensors


def _check_length(name: str, head: bytes, file_bytes: int) -> int:
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    # A header of 640 bytes makes a file begin as a pickle does.
    is_header = head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and length + _LENGTH_BYTES <= file_bytes
    if not is_header and (stand_in := describe_stand_in(head)) is not None:
        raise ModelError(f"{name} {stand_in}")
    if file_bytes < _LENGTH_BYTES or (length + _LENGTH_BYTES > file_bytes and length <= _MOST_HEADER_BYTES):
        raise ModelError(
            f"{name} cannot be read: it ends after {file_bytes} bytes, inside its header. Fetch it again if it was cut "
            "short"
        )
    if length > _MOST_HEADER_BYTES:
        raise ModelError(
            f"{name} cannot be read: its header would have {length} bytes, above the format's {_MOST_HEADER_BYTES}: it "
            "is not a safetensors file. Fetch it again"
        )
    return length


def _parse(name: str, text: bytes) -> dict[str, Mapping[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        body = dict(pairs)
        if len(body) < len(pairs):
            twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
            raise ModelError(f"{name} cannot be read: its header names {show(twice)} twice. Fetch it again")
        return body

    try:
        body = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except ModelError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{name} cannot be read: its header is not JSON ({shorten(str(error))}): it is not a safetensors file"
        ) from None
    if not isinstance(body, dict):
        raise ModelError(f"{name} cannot be read: its header is not a JSON object: it is not a safetensors file")
    notes = body.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ModelError(
            f"{name} cannot be read: its header has __metadata__={show(notes)}, which is not an object of strings. "
            "Save the model again with save_pretrained()"
        )
    return {key: entry for key, entry in body.items() if key != "__metadata__"}


def _read_entry(path: Path, name: str, entry: object, first: int) -> StoredTensor:
    wrong = f"{path.name} cannot be read: its header describes {show(name)} with"
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelError(f"{wrong} dtype={show(dtype)}, which is not known")
    if not _are_counts(shape):
        raise ModelError(f"{wrong} shape={show(shape)}, which is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{wrong} data_offsets={show(offsets)}, which is not a range of bytes")
    needed = -(-math.prod(shape) * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != needed:
        raise ModelError(
            f"{wrong} {offsets[1] - offsets[0]} bytes for {dtype} of shape {show(shape)}, which takes {show(needed)}"
        )
    return StoredTensor(path=path, dtype=dtype, shape=tuple(shape), start=first + offsets[0], stop=first + offsets[1])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_places(name: str, tensors: Mapping[str, StoredTensor], first: int, file_bytes: int) -> None:
    reached = first
    for tensor in sorted(tensors.values(), key=lambda each: (each.start, each.stop)):
        if tensor.start != reached:
            raise ModelError(f"{name} cannot be read: its header leaves bytes between tensors or shares them")
        reached = tensor.stop
    if reached != file_bytes:
        how = "Fetch it again if it was cut short" if file_bytes < reached else "Fetch it again"
        raise ModelError(f"{name} cannot be read: it has {file_bytes} bytes, its header describes {reached}. {how}")
