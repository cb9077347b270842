from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys

from rich.console import Console

from hf_algorithms.commands import doctor
from hf_algorithms.commands.doctor import Check, collect_checks, format_checks, render_checks
from hf_protocols import BackendUnavailableError, MachineLimits


def _render(checks, width=100):
    console = Console(file=io.StringIO(), width=width)
    status = render_checks(checks, console)
    return status, console.file.getvalue()


def test_this_machine_is_described():
    checks = {(check.section, check.name): check for check in collect_checks()}
    names = {name for _, name in checks}
    assert {"hf-protocols", "hf-algorithms", "python", "torch", "ray", "transformers"} <= names
    assert {"cores", "memory", "threads"} <= names
    assert checks["Libraries", "torch"].found == importlib.metadata.version("torch")
    assert checks["HybridFlow", "hf-engine"].status == "ok"
    assert "Training backends" in {section for section, _ in checks}


def test_checks_are_printed_as_json():
    checks = [Check(section="Machine", name="cores", status="note", found="1", remedy="Use more")]
    expected = {"section": "Machine", "name": "cores", "status": "note", "found": "1", "remedy": "Use more"}
    assert json.loads(format_checks(checks)) == [expected]


def test_a_missing_or_older_package_is_a_problem_with_its_line(monkeypatch):
    real = importlib.metadata.version

    def fake(name):
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.9" if name == "hf-mapper" else real(name)

    monkeypatch.setattr(doctor, "version", fake)
    checks = {check.name: check for check in [*doctor._check_packages(), *doctor._check_libraries()]}
    assert checks["ray"] == Check(
        section="Libraries", name="ray", status="problem", found="not installed", remedy='pip install "ray"'
    )
    assert checks["hf-mapper"].status == "problem"
    assert f"Install hf-mapper=={real('hf-algorithms')}" in checks["hf-mapper"].remedy
    status, text = _render(list(checks.values()))
    assert status == 1
    assert "2 problems" in text
    assert 'pip install "ray"' in text


def test_a_missing_backend_is_a_problem_only_without_another():
    def load(name):
        if name != "fsdp":
            raise BackendUnavailableError(f'backend {name!r} needs it: pip install "{name}"')
        return object

    some = doctor._check_kind("Training backends", ["fsdp", "megatron"], load)
    assert [check.status for check in some] == ["ok", "note"]
    assert 'pip install "megatron"' in some[1].found
    assert _render(some)[0] == 0
    assert [check.status for check in doctor._check_kind("Training backends", ["megatron"], load)] == ["problem"]
    assert [check.status for check in doctor._check_kind("Training backends", [], load)] == ["problem"]


def test_limits_of_the_container_are_shown(monkeypatch):
    limits = MachineLimits(
        memory_bytes=3 << 30,
        available_memory_bytes=2 << 30,
        num_cpus=1,
        max_threads=150,
        available_threads=120,
        max_open_files=32,
    )
    monkeypatch.setattr(doctor, "read_machine_limits", lambda: limits)
    monkeypatch.setattr("hf_controller.local_start.read_machine_limits", lambda: limits)
    checks = {check.name: check for check in [*doctor._check_machine(), *doctor._check_local_cluster()]}
    assert (checks["memory"].status, checks["memory"].found) == ("note", "2.0 GiB of 3.0 GiB free")
    assert (checks["cores"].status, checks["cores"].found) == ("note", "1")
    assert (checks["threads"].status, checks["open files"].status) == ("problem", "problem")
    assert "120 more of 150" in checks["threads"].found
    assert {"temporary folder", "home folder", "/dev/shm"} <= checks.keys()
    assert _render(list(checks.values()))[0] == 1


def test_a_closed_temporary_folder_is_a_problem(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    (check,) = [check for check in doctor._check_local_cluster() if check.status == "problem"]
    assert check.name == "RAY_TMPDIR='/proc'"


def test_words_are_printed_as_they_are():
    check = Check(section="S", name="n", status="note", found="pip install 'hf-engine[vllm]'")
    status, text = _render([check])
    assert status == 0
    assert "hf-engine[vllm]" in text
    assert "ready: no problems" in text


def test_importing_the_doctor_loads_nothing_heavy():
    code = (
        "import hf_algorithms.commands.doctor, sys\n"
        "print(sorted({'torch', 'ray', 'transformers', 'psutil'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
