"""Files that are either complete or absent, whatever interrupts the writing."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_text"]


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8 beside ``path``, flush it to the disk and move it there in one step.

    A reader sees the old file or the new one; a crash or a full disk leaves the old one as it was.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
