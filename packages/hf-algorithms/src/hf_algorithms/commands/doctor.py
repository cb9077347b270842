"""Report on the installation and the machine, with a command that repairs each part that is missing."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

from hf_protocols import BackendError, ConfigError, MachineLimits, read_machine_limits

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Check", "collect_checks", "format_checks", "render_checks"]

Status = Literal["ok", "note", "problem"]

_OUR_PACKAGES = ("hf-protocols", "hf-mapper", "hf-engine", "hf-controller", "hf-algorithms")
_LIBRARIES = ("torch", "tensordict", "transformers", "ray")
_OLDEST_PYTHON = (3, 11)
_USUAL_RANKS = 4
"""Processes of a run on two devices: two of models, one each for rewards and advantages."""
_GIB = 1 << 30
_SMALLEST_MEMORY_BYTES = 4 * _GIB


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        section: heading it belongs under.
        name: what was looked at.
        status: `ok`; `note`, worth knowing; `problem`, keeps a run from working.
        found: what is there.
        remedy: what to do about it; empty when nothing needs doing.
    """

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def collect_checks() -> list[Check]:
    """Look at packages, libraries, the machine and the backends. This imports torch and every installed backend."""
    machine = [*_check_machine(), *_check_devices(), *_check_local_cluster()]
    return [*_check_packages(), *_check_libraries(), *machine, *_check_backends()]


def format_checks(checks: Sequence[Check]) -> str:
    """Returns the checks as a list in JSON, one object each, with the attributes of `Check`."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def render_checks(checks: Sequence[Check], console: Console) -> int:
    """Print the checks by section.

    Returns:
        the command's exit status: 1 if there is a problem, else 0.
    """
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for section in dict.fromkeys(check.section for check in checks):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=len("  problem"))
        table.add_column(min_width=max(len(check.name) for check in checks))
        table.add_column()
        for check in (check for check in checks if check.section == section):
            words = f"{check.found}. {check.remedy}" if check.remedy else check.found
            table.add_row(Text(f"  {check.status}", styles[check.status]), Text(check.name), Text(words))
        console.print(Text(section, "bold"))
        console.print(table)
    num_problems = sum(check.status == "problem" for check in checks)
    verdict = f"{num_problems} problem{'s' if num_problems > 1 else ''}" if num_problems else "ready: no problems"
    console.print(Text(verdict, "bold red" if num_problems else "bold green"))
    return min(num_problems, 1)


def _check_packages() -> Iterator[Check]:
    section = "HybridFlow"
    versions = {name: _version(name) for name in _OUR_PACKAGES}
    ours = versions["hf-algorithms"]
    for name, found in versions.items():
        if found is None:
            yield Check(section=section, name=name, status="problem", found="not installed", remedy=_install(name))
        elif found != ours:
            remedy = f"The five packages share one version. Install {name}=={ours}"
            yield Check(section=section, name=name, status="problem", found=found, remedy=remedy)
        else:
            yield Check(section=section, name=name, status="ok", found=found)


def _check_libraries() -> Iterator[Check]:
    section = "Libraries"
    old = sys.version_info[:2] < _OLDEST_PYTHON
    remedy = f"Use Python {'.'.join(map(str, _OLDEST_PYTHON))} or later" if old else ""
    found = platform.python_version()
    yield Check(section=section, name="python", status="problem" if old else "ok", found=found, remedy=remedy)
    for name in _LIBRARIES:
        installed = _version(name)
        if installed is None:
            yield Check(section=section, name=name, status="problem", found="not installed", remedy=_install(name))
        else:
            yield Check(section=section, name=name, status="ok", found=installed)


def _check_machine() -> Iterator[Check]:
    section = "Machine"
    limits = read_machine_limits()
    few = "" if limits.num_cpus > 1 else "Two ranks share one core; everything works, slowly"
    yield Check(section=section, name="cores", status="note" if few else "ok", found=str(limits.num_cpus), remedy=few)
    yield _check_memory(section, limits)
    yield _check_calibration(section, limits.num_cpus)


def _check_calibration(section: str, num_cores: int) -> Check:
    from hf_algorithms.preflight.calibration import choose_ranks, read_calibration

    try:
        timings = read_calibration(num_cores=num_cores)
    except ConfigError as error:
        found, _, remedy = str(error).rpartition(". ")
        return Check(section=section, name="calibration", status="problem", found=found, remedy=remedy)
    faster = {each.parameters: choose_ranks(timings, each.parameters) for each in timings}
    sizes = ", ".join(f"{size / 1e6:.1f}M parameters: {ranks}" for size, ranks in sorted(faster.items()))
    found = f"faster number of ranks with {sizes}" if faster else "none for these cores"
    return Check(section=section, name="calibration", status="ok", found=found)


def _check_memory(section: str, limits: MachineLimits) -> Check:
    found = f"{_gib(limits.available_memory_bytes)} of {_gib(limits.memory_bytes)} free"
    small = limits.available_memory_bytes < _SMALLEST_MEMORY_BYTES
    remedy = f"Two ranks and Ray want {_gib(_SMALLEST_MEMORY_BYTES)}" if small else ""
    return Check(section=section, name="memory", status="note" if small else "ok", found=found, remedy=remedy)


def _check_local_cluster() -> Iterator[Check]:
    try:
        from hf_controller import list_local_checks
    except ImportError:  # a missing package is a problem of its own
        return
    for check in list_local_checks(_USUAL_RANKS):
        status: Status = "problem" if check.is_fatal else "note" if check.remedy else "ok"
        yield Check(section="Local Ray cluster", name=check.name, status=status, found=check.found, remedy=check.remedy)


def _check_devices() -> Iterator[Check]:
    section = "Machine"
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "Install torch again for this platform"
        yield Check(section=section, name="torch", status="problem", found=f"cannot be loaded: {error}", remedy=remedy)
        return
    if not torch.cuda.is_available():
        yield Check(section=section, name="accelerators", status="ok", found="none: models run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found = f"{device.name}, {_gib(device.total_memory)}"
        yield Check(section=section, name=f"cuda:{index}", status="ok", found=found)


def _check_backends() -> Iterator[Check]:
    try:
        import hf_engine
    except (ImportError, OSError) as error:
        yield Check(section="Backends", name="hf-engine", status="problem", found=f"cannot be loaded: {error}")
        return
    yield from _check_kind("Training backends", hf_engine.available_train_backends(), hf_engine.load_train_backend)
    yield from _check_kind(
        "Generation backends", hf_engine.available_rollout_backends(), hf_engine.load_rollout_backend
    )


def _check_kind(section: str, names: Sequence[str], load: Callable[[str], object]) -> list[Check]:
    """One check per backend; one that is missing is a problem only where no other is there."""
    failures = {name: _load_failure(load, name) for name in names}
    if not names:
        found = "none is installed"
        return [Check(section=section, name="any", status="problem", found=found, remedy=_install("hf-engine"))]
    missing: Status = "problem" if all(failures.values()) else "note"
    return [
        Check(section=section, name=name, status=missing if failure else "ok", found=failure or "available")
        for name, failure in failures.items()
    ]


def _load_failure(load: Callable[[str], object], name: str) -> str:
    try:
        load(name)
    except (BackendError, ImportError, OSError) as error:
        return str(error)
    return ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _install(distribution: str) -> str:
    return f'pip install "{distribution}"'


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
