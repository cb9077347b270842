"""Checks and sizes of this machine before Ray starts a local cluster. Nothing of Ray is imported."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hf_protocols import ConfigError, MachineLimits, read_machine_limits
from hf_protocols.validation import Checks, shorten, show

__all__ = ["LocalCheck", "check_local_start", "choose_store_bytes", "find_temp_dir", "list_local_checks"]

_check = Checks(ConfigError)

_LONGEST_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes that the kernel takes as the path of a socket."""

_SOCKET_IN_SESSION = "/ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
_CLUSTER_THREADS, _RANK_THREADS = 160, 30
"""Threads of Ray's processes and of the program, and of each rank before it has a model; measured with Ray 2.60."""

_CLUSTER_FILES, _RANK_FILES = 52, 4
"""Open files of the process of Ray that has most, and what each rank adds; measured alike."""

_SHM = "/dev/shm"
_SMALL_SHM_BYTES = 1 << 30

_STORE_SHARE = 0.3
"""Share of the memory that the object store gets, as in Ray."""
_SHM_SHARE = 0.95
"""Share of the free shared memory that is counted on: other programs use some of it before Ray looks."""
_LEAST_STORE_BYTES = 75 << 20
"""Ray's own bound."""
_STORE_IN_FILES_BYTES = 512 << 20
"""Size of a store in a file of the temporary folder, as Ray makes it where shared memory is smaller."""
_MOST_STORE_BYTES = (2 << 30) if sys.platform == "darwin" else 200 * 10**9
"""Ray's own bounds for a size that nobody set."""


@dataclass(frozen=True, kw_only=True)
class LocalCheck:
    """One thing that a local Ray cluster needs.

    Attributes:
        name: what was looked at, as a user calls it.
        found: what is there.
        remedy: what to do about it; empty if it is enough.
        is_fatal: whether the cluster cannot start as it is.
    """

    name: str
    found: str
    remedy: str = ""
    is_fatal: bool = False


def check_local_start(num_ranks: int = 1) -> None:
    """Refuses to start a local Ray cluster that would end in a crash or a hang. Takes milliseconds, changes nothing.

    Args:
        num_ranks: processes that are to run on it.

    Raises:
        ConfigError: naming the variable or the limit, what is there, and what to set.
    """
    fatal = [check for check in list_local_checks(num_ranks) if check.is_fatal]
    if fatal:
        reasons = "\n".join(f"{check.name}: {check.found}. {check.remedy}" for check in fatal)
        raise ConfigError(f"a local Ray cluster cannot start here: {reasons}")


def list_local_checks(num_ranks: int = 1) -> list[LocalCheck]:
    """Looks at the temporary folder, the home, threads, open files and shared memory.

    Args:
        num_ranks: processes that are to run on the cluster.
    """
    limits = read_machine_limits()
    checks = [_check_temp_dir(), _check_home(), _check_threads(limits, num_ranks), _check_files(limits, num_ranks)]
    return [*checks, _check_shared_memory()]


def choose_store_bytes(given: int | None = None, *, key: str = "object_store_bytes") -> int:
    """Returns the size of a local cluster's object store in bytes.

    The default is 30 % of the memory that this process may use, at most what is free in `/dev/shm`. Where that is below
    512 MiB, the store has at most 512 MiB and is in a file. Memory is taken as it is used.

    Args:
        given: the size that the user set; None: the default.
        key: the user's name of the size, for messages.

    Raises:
        ConfigError: if `given` is not a whole number of at least 75 MiB, or does not fit in memory or `/dev/shm`.
    """
    memory_bytes = read_machine_limits().memory_bytes
    free_bytes = _find_free_shm_bytes()
    if given is None:
        room_bytes = max(int(free_bytes * _SHM_SHARE), _STORE_IN_FILES_BYTES)
        return max(min(int(memory_bytes * _STORE_SHARE), room_bytes, _MOST_STORE_BYTES), _LEAST_STORE_BYTES)
    _check.count(key, given, least=_LEAST_STORE_BYTES)
    if given > memory_bytes:
        raise ConfigError(f"{key}={given}: this machine has {memory_bytes} bytes of memory. Lower it")
    if given > max(free_bytes, _STORE_IN_FILES_BYTES):
        raise ConfigError(
            f"{key}={given}: {_SHM} has {int(free_bytes)} bytes free. Lower it, or give a container a larger --shm-size"
        )
    return given


def find_temp_dir() -> tuple[str, str]:
    """The folder that Ray makes its own folder in, and the variable that says so; empty if none does."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if given := os.environ.get(name):
            return os.path.abspath(os.path.expanduser(given)), name
    return "/tmp", ""


def _check_temp_dir() -> LocalCheck:
    folder, variable = find_temp_dir()
    name = f"{variable}={show(folder)}" if variable else folder
    longest = _LONGEST_SOCKET_PATH - len(_SOCKET_IN_SESSION.format(pid=os.getpid()))
    if (length := len(os.fsencode(folder))) > longest:
        found = f"{length} bytes long, Ray's sockets leave at most {longest}"
        return _refusal(name, found, "Set RAY_TMPDIR to a shorter folder, such as /tmp")
    if reason := _find_why_not_writable(Path(folder, "ray")):
        return _refusal(name, f"Ray keeps its sockets and logs there, {reason}", "Set RAY_TMPDIR to a folder of yours")
    return LocalCheck(name="temporary folder", found=f"{folder}, from {variable}" if variable else folder)


def _check_home() -> LocalCheck:
    """Ray keeps the token of its clusters in the home folder, and makes one for its first."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return LocalCheck(name="home folder", found="not needed: RAY_AUTH_* says how clusters are entered")
    remedy = "Set HOME to a folder of yours, or RAY_AUTH_TOKEN to a word of your choice"
    try:
        home = Path.home()
    except RuntimeError:
        return _refusal("HOME", "not set, and this user has no home: Ray keeps its token there", remedy)
    name, token = f"HOME={show(str(home))}", home / ".ray" / "auth_token"
    try:
        is_made = bool(token.read_text().strip())
    except FileNotFoundError:
        is_made = False
    except (OSError, UnicodeError) as error:
        return _refusal(name, f"Ray keeps its token there, and {token} cannot be read: {_reason(error)}", remedy)
    if not is_made and (reason := _find_why_not_writable(token.parent)):
        return _refusal(name, f"Ray keeps its token there, {reason}", remedy)
    return LocalCheck(name="home folder", found=str(home))


def _check_threads(limits: MachineLimits, num_ranks: int) -> LocalCheck:
    free, wanted = limits.available_threads, _CLUSTER_THREADS + _RANK_THREADS * num_ranks
    if free is None:
        return LocalCheck(name="threads", found="no limit")
    found = f"{free} more of {limits.max_threads} may start here"
    if free >= wanted:
        return LocalCheck(name="threads", found=found)
    needed = f"{found}, Ray and {num_ranks} rank{'s' if num_ranks > 1 else ''} start about {wanted}"
    return _refusal("threads", needed, "Raise ulimit -u, or the limit of the container (docker run --pids-limit)")


def _check_files(limits: MachineLimits, num_ranks: int) -> LocalCheck:
    most, wanted = limits.max_open_files, _CLUSTER_FILES + _RANK_FILES * num_ranks
    if most is None:
        return LocalCheck(name="open files", found="no limit")
    found = f"at most {most} of each process"
    if most >= wanted:
        return LocalCheck(name="open files", found=found)
    return _refusal("open files", f"{found}, a process of Ray opens about {wanted}", "Raise ulimit -n")


def _check_shared_memory() -> LocalCheck:
    """Ray keeps batches elsewhere if they do not fit here, which is slow."""
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return LocalCheck(name=_SHM, found=_reason(error), remedy="Ray keeps batches in files instead, which is slow")
    found = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB free"
    remedy = "Ray keeps batches there. Give the container --shm-size=2g" if usage.free < _SMALL_SHM_BYTES else ""
    return LocalCheck(name=_SHM, found=found, remedy=remedy)


def _find_free_shm_bytes() -> float:
    """Returns the free bytes of shared memory; infinity where the system has no folder for it, as macOS."""
    if sys.platform != "linux":
        return math.inf
    try:
        return shutil.disk_usage(_SHM).free
    except OSError:
        return 0


def _find_why_not_writable(folder: Path) -> str:
    """Returns why a folder cannot be made or written to; empty if it can."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"and {shorten(str(there))} is not a folder"
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        return f"and {shorten(str(there))} cannot be written to: {_reason(error)}"
    return ""


def _refusal(name: str, found: str, remedy: str) -> LocalCheck:
    return LocalCheck(name=name, found=found, remedy=remedy, is_fatal=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
