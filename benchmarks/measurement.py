"""The form of a benchmark's result: what was measured, when, in which unit, on which hardware, with which versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
VERSIONS_OF = ("hf-protocols", "numpy", "ray", "tensordict", "torch", "transformers")


def record(
    subject: str,
    metrics: dict[str, tuple[float, str]],
    *,
    device: str | None = None,
    versions: dict[str, str] | None = None,
) -> None:
    """Print one JSON object and keep it as results/<subject>.json; a metric is (value, unit).

    `device` names the accelerator that it ran on, `versions` those of libraries in other environments.
    """
    result = {
        "subject": subject,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()},
        "hardware": {"cpu": describe_processor(), "num_cores": os.cpu_count(), "system": platform.system()}
        | ({"device": device} if device else {}),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in VERSIONS_OF if _is_installed(name)}
        | (versions or {}),
    }
    text = json.dumps(result, indent=2)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{subject}.json").write_text(text + "\n")
    print(text)


def _is_installed(name: str) -> bool:
    return any(metadata.distributions(name=name))


def write_table(page: Path, name: str, table: str, *, hardware: str | None = None) -> None:
    """Replace what stands between the page's comments `<name>` and `end of <name>`, with the hardware below it.

    `hardware` names where the figures were measured; None: on this machine, now.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found_start, rest = page.read_text().partition(start)
    _, found_end, after = rest.partition(end)
    assert found_start and found_end, f"{page} has lost its comments"
    where = f"On {hardware or f'{os.cpu_count()} cores of: {describe_processor()}'}; no GPU is used."
    page.write_text(f"{before}{start}\n{table}\n\n{where}\n\n{end}{after}")


def describe_processor() -> str:
    """The processor's name where the system has it, else its architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
