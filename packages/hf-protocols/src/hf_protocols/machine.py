"""Memory, cores, threads and open files that this process may use: those of its container, not of the machine.

A container limits its processes by control groups. Groups are nested, and the smallest limit of a group and its
ancestors counts. Version 1 mounts one tree per resource, version 2 one tree for all; a machine may have both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MachineLimits", "read_machine_limits"]

_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USES = ("memory.current", "memory.usage_in_bytes")
_EXEMPT_CAPABILITIES = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: the kernel does not count their owners' threads."""


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """Limits of this process and its children together; None where there is no limit.

    Attributes:
        memory_bytes: memory of the machine, or the smallest limit of the container.
        available_memory_bytes: memory that is still free. Caches that the kernel can drop count as
            free.
        num_cpus: whole cores, at least 1: the smallest of the allowed cores and the container's quota.
        max_threads: threads, of the container or of the user (`ulimit -u`).
        available_threads: threads that can still be started.
        max_open_files: open files of each process, as far as it may raise its own limit (`ulimit -Hn`).
    """

    memory_bytes: int
    available_memory_bytes: int
    num_cpus: int
    max_threads: int | None
    available_threads: int | None
    max_open_files: int | None


def read_machine_limits(root: str | Path = "/") -> MachineLimits:
    """Returns the limits of this process.

    Args:
        root: folder that holds `proc` and the mounted control groups.
    """
    machine = Path(root)
    groups = list(_control_groups(machine))
    memory, available = _read_memory(machine, groups)
    threads = list(_read_thread_limits(machine, groups))
    return MachineLimits(
        memory_bytes=memory,
        available_memory_bytes=max(0, available),
        num_cpus=_count_cpus(machine, groups),
        max_threads=min((limit for limit, _ in threads), default=None),
        available_threads=max(0, min(limit - used for limit, used in threads)) if threads else None,
        max_open_files=_read_resource_limit(machine, "Max open files", hard=True),
    )


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups and of their ancestors, as far as they are mounted."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))  # version 2 has no names of controllers
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, described = mount.split(), kind.split()
        if len(fields) < 5 or not described or described[0] not in ("cgroup", "cgroup2"):
            continue
        limited = [""] if described[0] == "cgroup2" else described[-1].split(",")
        path = next((paths[each] for each in limited if each in paths), "/")
        top = root / _unescape(fields[4]).lstrip("/")
        yield from _descend(top, path, _unescape(fields[3]))


def _descend(top: Path, path: str, mounted: str) -> Iterator[Path]:
    """The folders from `top`, where the group `mounted` is, to the group at `path`."""
    yield top
    group = PurePosixPath(path)
    # A container may see its own group at `top`, and read its path outside.
    if ".." in group.parts or not group.is_relative_to(mounted):
        return
    for part in group.relative_to(mounted).parts:
        top = top / part
        yield top


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _read_memory(root: Path, groups: list[Path]) -> tuple[int, int]:
    """Bytes in all, and bytes that are free."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    total = int(fields["MemTotal"]) * 1024 if "MemTotal" in fields else _installed_bytes()
    free = int(fields["MemAvailable"]) * 1024 if "MemAvailable" in fields else total
    memory, available = total, min(free, total)
    for group in groups:
        limit = _read_first(group, _MEMORY_LIMITS)
        if limit is None or limit >= total:  # version 1 has a huge number for none
            continue
        memory = min(memory, limit)
        used = _read_first(group, _MEMORY_USES) or 0
        caches = re.findall(r"^(?:total_)?inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        available = min(available, limit - max(0, used - int(max(caches, key=int, default=0))))
    return memory, available


def _installed_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _count_cpus(root: Path, groups: list[Path]) -> int:
    allowed = _find(root / "proc/self/status", r"^Cpus_allowed_list:\s*(\S+)$")
    cpus = float(_count_listed(allowed) if allowed else os.cpu_count() or 1)
    for group in groups:
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        quota = quota or _read(group / "cpu.cfs_quota_us").strip()
        period = period or _read(group / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            cpus = min(cpus, int(quota) / int(period))
    return max(1, int(cpus))


def _count_listed(cpus: str) -> int:
    """Cores of a list such as `0-3,8`."""
    ranges = [each.partition("-") for each in cpus.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _read_thread_limits(root: Path, groups: list[Path]) -> Iterator[tuple[int, int]]:
    """Every limit of threads, with the threads that count against it now."""
    for group in groups:
        limit = _read_first(group, ("pids.max",))
        if limit is not None:
            yield limit, _read_first(group, ("pids.current",)) or 0
    limit = _read_resource_limit(root, "Max processes")
    user = _find(root / "proc/self/status", r"^Uid:\s*(\d+)")
    capabilities = int(_find(root / "proc/self/status", r"^CapEff:\s*([0-9a-f]+)$") or "0", 16)
    if limit is not None and user not in ("", "0") and not capabilities & _EXEMPT_CAPABILITIES:
        yield limit, _count_threads(root, user)


def _count_threads(root: Path, user: str) -> int:
    """Threads of a user's processes, as far as they can be seen."""
    statuses = [_read(folder / "status") for folder in (root / "proc").glob("[0-9]*")]
    own = [status for status in statuses if re.search(rf"^Uid:\s*{user}\s", status, re.MULTILINE)]
    return sum(int(count) for status in own for count in re.findall(r"^Threads:\s*(\d+)$", status, re.MULTILINE))


def _read_resource_limit(root: Path, name: str, *, hard: bool = False) -> int | None:
    """The soft or the hard limit, where there is one."""
    before = r"\S+\s+" if hard else ""
    limit = _find(root / "proc/self/limits", rf"^{name}\s+{before}(\d+)\s")
    return int(limit) if limit else None


def _read_first(group: Path, names: tuple[str, ...]) -> int | None:
    """The number in the first file that has one; a group without a limit says `max`."""
    texts = (_read(group / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _find(file: Path, pattern: str) -> str:
    found = re.search(pattern, _read(file), re.MULTILINE)
    return found[1] if found else ""


def _read(file: Path) -> str:
    """The text of a file of the kernel; empty if the file is absent or cannot be read by this process."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
