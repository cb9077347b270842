"""Files under gzip: unpacked once, on disk, so that rows are read at their places."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from hf_protocols.errors import DataError

__all__ = ["is_gzip", "unpack"]

_MAGIC = b"\x1f\x8b"
_SUFFIX = ".gz"
_CHUNK_BYTES = 1 << 20


def is_gzip(head: bytes) -> bool:
    """True for a file that begins with these bytes."""
    return head.startswith(_MAGIC)


@contextmanager
def unpack(place: Path, shown: str) -> Iterator[Path]:
    """Yields the content of a gzip file as a file under its name without `.gz`.

    That file is in the folder for temporary files. Its name is there as long as the block lasts, its content as long as
    it is open.

    Args:
        place: of the gzip file.
        shown: name of the file in messages.

    Raises:
        DataError: for a gzip file that is damaged or cut short, and without space for its content.
    """
    with TemporaryDirectory(prefix="hybridflow-data-") as folder:
        path = Path(folder) / place.name.removesuffix(_SUFFIX)
        try:
            with path.open("wb") as unpacked:
                for chunk in _read_chunks(place, shown):
                    unpacked.write(chunk)
        except OSError as error:
            raise DataError(
                f"{shown}: cannot be unpacked into {gettempdir()}: {(error.strerror or str(error)).lower()}. Set "
                "TMPDIR to a folder with more space, or unpack it yourself"
            ) from error
        yield path


def _read_chunks(place: Path, shown: str) -> Iterator[bytes]:
    with gzip.open(place) as file:
        while True:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except EOFError as error:
                raise DataError(f"{shown}: the gzip file is cut short. Fetch it again") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{shown}: the gzip file is damaged: {error}. Fetch it again") from error
            if not chunk:
                return
            yield chunk
