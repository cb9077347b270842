"""The file of `hybridflow doctor --calibrate`: times of an iteration with one rank and with two on this host."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hf_algorithms.atomic_files import write_text
from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = [
    "ARRANGEMENTS",
    "HostTiming",
    "check_writable",
    "choose_ranks",
    "find_calibration",
    "read_calibration",
    "write_calibration",
]

ARRANGEMENTS = (1, 2)
"""Numbers of ranks that are compared; together they have all cores."""
_MOST = 1e30
"""Above any number of parameters, and of seconds."""
_REPEAT = "Run hybridflow doctor --calibrate again, or remove the file"


@dataclass(frozen=True, kw_only=True)
class HostTiming:
    """The time of an iteration of GRPO on this host.

    Attributes:
        parameters: of the model that was trained.
        ranks: that shared the cores.
        seconds: of an iteration, the median.
    """

    parameters: int
    ranks: int
    seconds: float


def find_calibration() -> Path:
    """The file, which may not be there: `hybridflow/calibration.json` in the user's folder of caches.

    Raises:
        ConfigError: for a user without a home, and without `XDG_CACHE_HOME`.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise ConfigError("this user has no home folder. Set XDG_CACHE_HOME to a folder that can be written") from None
    return caches / "hybridflow" / "calibration.json"


def check_writable() -> None:
    """Refuses a place in which the file cannot be written, before minutes go into measuring.

    Raises:
        ConfigError: as `write_calibration` does.
    """
    path = find_calibration()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    except OSError as error:
        raise _describe_unwritable(path, error) from None


def write_calibration(timings: Iterable[HostTiming], *, num_cores: int) -> Path:
    """Writes what was measured on a host with that many cores; returns the file.

    Raises:
        ConfigError: if the file cannot be written, or has no place.
    """
    path = find_calibration()
    text = json.dumps({"num_cores": num_cores, "timings": [asdict(each) for each in timings]}, indent=2)
    try:
        return write_text(path, f"{text}\n")
    except OSError as error:
        raise _describe_unwritable(path, error) from None


def read_calibration(*, num_cores: int) -> list[HostTiming]:
    """Returns the measurements of this host; an empty list without a file, or if its number of cores is another one.

    Raises:
        ConfigError: if the file cannot be read, or is not one that `write_calibration` wrote.
    """
    try:
        path = find_calibration()
    except ConfigError:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        timings = [_check(HostTiming(**each)) for each in found["timings"]]
        return timings if found["num_cores"] == num_cores else []
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Remove it, or set XDG_CACHE_HOME") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path}: is not a calibration of a host. {_REPEAT}") from None


def choose_ranks(timings: Iterable[HostTiming], parameters: int) -> int | None:
    """The number of ranks with the shortest iteration, by the model of the nearest size; None without measurements."""

    def by_distance(timing: HostTiming) -> tuple[float, float]:
        return abs(math.log(timing.parameters / max(1, parameters))), timing.seconds

    nearest = min(timings, key=by_distance, default=None)
    return None if nearest is None else nearest.ranks


def _describe_unwritable(path: Path, error: OSError) -> ConfigError:
    remedy = "Set XDG_CACHE_HOME to a folder that can be written"
    return ConfigError(f"{path}: cannot be written: {error.strerror}. {remedy}")


def _check(timing: HostTiming) -> HostTiming:
    values: dict[str, Any] = asdict(timing)
    for name, value in values.items():
        is_number = type(value) is int or (name == "seconds" and type(value) is float)
        if not is_number or not 0 < value < _MOST:
            raise ValueError(f"{name} = {show(value)}")
    if timing.ranks not in ARRANGEMENTS:
        raise ValueError(f"ranks = {timing.ranks}")
    return timing
