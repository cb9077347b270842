"""Checks of this machine before Ray starts a local cluster. Nothing of Ray is imported."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hf_protocols import ConfigError, MachineLimits, read_machine_limits
from hf_protocols.arguments import shorten, show

__all__ = ["LocalCheck", "check_local_start", "find_temp_dir", "list_local_checks"]

_LONGEST_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes that the kernel takes as the path of a socket."""

_SOCKET_IN_SESSION = "/ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
_CLUSTER_THREADS, _RANK_THREADS = 160, 30
"""Threads of Ray's processes and of the program, and of each rank before it has a model; measured with Ray 2.60."""

_CLUSTER_FILES, _RANK_FILES = 52, 4
"""Open files of the process of Ray that has most, and what each rank adds; measured alike."""

_SMALL_SHM_BYTES = 1 << 30


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
    """Refuse to start a local Ray cluster that would end in a crash or a hang. Takes milliseconds, changes nothing.

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
    """Look at the temporary folder, the home, threads, open files and shared memory.

    Args:
        num_ranks: processes that are to run on the cluster.
    """
    limits = read_machine_limits()
    checks = [_check_temp_dir(), _check_home(), _check_threads(limits, num_ranks), _check_files(limits, num_ranks)]
    return [*checks, _check_shared_memory()]


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
    folder = "/dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return LocalCheck(name=folder, found=_reason(error), remedy="Ray keeps batches in files instead, which is slow")
    found = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB free"
    remedy = "Ray keeps batches there: give a container --shm-size=2g" if usage.free < _SMALL_SHM_BYTES else ""
    return LocalCheck(name=folder, found=found, remedy=remedy)


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
