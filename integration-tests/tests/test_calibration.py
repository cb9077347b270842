"""`hybridflow doctor --calibrate`, and plans that follow from what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.commands import calibrate
from hf_algorithms.commands.doctor import Check, collect_checks
from hf_algorithms.preflight.calibration import (
    HostTiming,
    choose_ranks,
    find_calibration,
    read_calibration,
    write_calibration,
)
from hf_protocols import ConfigError, read_machine_limits
from small_runs import Outcome

SMALL_IS_FASTER_ON_TWO = [
    HostTiming(parameters=1_000_000, ranks=1, seconds=0.3),
    HostTiming(parameters=1_000_000, ranks=2, seconds=0.2),
    HostTiming(parameters=10_000_000, ranks=1, seconds=2.0),
    HostTiming(parameters=10_000_000, ranks=2, seconds=3.0),
]
TIMING = asdict(SMALL_IS_FASTER_ON_TWO[0])
CORES = read_machine_limits().num_cpus


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of caches without a calibration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.mark.parametrize(("parameters", "ranks"), [(1, 2), (1_000_000, 2), (3_000_000, 2), (3_400_000, 1), (10**9, 1)])
def test_the_nearest_size_decides(parameters: int, ranks: int) -> None:
    """The border is the geometric mean of the two sizes, 3.16 million."""
    assert choose_ranks(SMALL_IS_FASTER_ON_TWO, parameters) == ranks
    assert choose_ranks([], parameters) is None


def test_a_calibration_is_of_one_number_of_cores(caches: Path) -> None:
    assert read_calibration(num_cores=4) == []
    assert write_calibration(SMALL_IS_FASTER_ON_TWO, num_cores=4) == caches / "hybridflow" / "calibration.json"
    assert read_calibration(num_cores=4) == SMALL_IS_FASTER_ON_TWO
    assert read_calibration(num_cores=8) == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{}", b"[]", b"null", b"[" * 10**5,
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"ranks": 3}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"seconds": float("nan")}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"parameters": 0}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"parameters": "many"}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"parameters": 10**400}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [{}]}).encode(),
        json.dumps({"num_cores": CORES, "timings": [TIMING | {"more": 1}]}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_the_remedy(content: bytes) -> None:
    find_calibration().parent.mkdir(parents=True)
    find_calibration().write_bytes(content)
    with pytest.raises(ConfigError, match=r"calibration\.json: is not a calibration .* doctor --calibrate again"):
        read_calibration(num_cores=CORES)


def test_a_folder_of_caches_that_is_none_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert read_calibration(num_cores=CORES) == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert read_calibration(num_cores=CORES) == []
    with pytest.raises(ConfigError, match=r"this user has no home folder\. Set XDG_CACHE_HOME"):
        write_calibration(SMALL_IS_FASTER_ON_TWO, num_cores=CORES)


def test_a_place_that_cannot_be_written_is_refused_first(
    hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(calibrate, "_measure", lambda *each: measured.append(each))
    monkeypatch.setattr(calibrate, "ARRANGEMENTS", (1,))  # a host with one core is refused for that
    find_calibration().mkdir(parents=True)
    refused = hybridflow("doctor", "--calibrate")
    assert refused.exit_code == 2
    assert "calibration.json: cannot be written: Is a directory. Set XDG_CACHE_HOME to a folder" in refused.errors
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused = hybridflow("doctor", "--calibrate")
    assert refused.exit_code == 2
    assert "calibration.json: cannot be written: Not a directory. Set XDG_CACHE_HOME to a folder" in refused.errors
    assert measured == []


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_file_that_cannot_be_read_is_named(caches: Path) -> None:
    find_calibration().mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"calibration\.json: cannot be read: Is a directory\. Remove it, or set XDG"):
        read_calibration(num_cores=CORES)


def test_the_doctor_names_what_runs_follow() -> None:
    def find() -> Check:
        return next(check for check in collect_checks() if check.name == "calibration")

    assert find().found == "none for these cores"
    write_calibration(SMALL_IS_FASTER_ON_TWO[:2], num_cores=CORES)
    assert find().found == "faster number of ranks with 1.0M parameters: 2"
    write_calibration(SMALL_IS_FASTER_ON_TWO, num_cores=CORES)
    assert find().found == "faster number of ranks with 1.0M parameters: 2, 10.0M parameters: 1"
    find_calibration().write_text("[")
    damaged = find()
    assert damaged.status == "problem" and "calibration.json: is not a calibration" in damaged.found
    assert damaged.remedy.startswith("Run hybridflow doctor --calibrate again")


def test_a_damaged_file_is_read_where_it_decides(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    find_calibration().parent.mkdir(parents=True)
    find_calibration().write_text("{")
    without_slots(small_config)
    outcome = hybridflow("plan", small_config)
    assert outcome.exit_code == 2 and str(find_calibration()) in outcome.errors
    assert hybridflow("plan", small_config, "--set", "cluster.gpus_per_machine=2").exit_code == 0


def test_a_plan_has_the_faster_number_of_ranks(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    without_slots(small_config)
    assert count_slots(hybridflow, small_config) == 2
    for seconds, slots in ((0.1, 1), (0.3, 2)):
        timings = [HostTiming(parameters=1000, ranks=ranks, seconds=time) for ranks, time in ((1, seconds), (2, 0.2))]
        write_calibration(timings, num_cores=CORES)
        assert count_slots(hybridflow, small_config) == slots
    write_calibration(timings[:1], num_cores=CORES)
    for given in (1, 2):
        assert count_slots(hybridflow, small_config, "--set", f"cluster.gpus_per_machine={given}") == given
    assert count_slots(hybridflow, small_config, "--set", "cluster.gpu=h100") == 2
    write_calibration(timings[:1], num_cores=CORES + 1)
    assert count_slots(hybridflow, small_config) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_host_is_measured_and_a_resumed_run_keeps_its_ranks(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if CORES < 2:
        refused = hybridflow("doctor", "--calibrate")
        assert refused.exit_code == 2 and "--calibrate: this host has 1 core" in refused.errors
        return
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1}
    for name, value in {"_MODELS": (sizes,), "_WARM_UP": 1, "_MEASURED": 2}.items():
        monkeypatch.setattr(calibrate, name, value)
    outcome = hybridflow("doctor", "--calibrate")
    assert outcome.exit_code == 0, outcome.errors
    first, second = read_calibration(num_cores=CORES)
    assert (first.ranks, second.ranks) == (1, 2) and first.parameters == second.parameters > 1000
    lines = outcome.output.splitlines()
    assert lines[0].endswith(f"1 x {CORES} threads: {first.seconds:.3f} s an iteration")
    assert lines[-1].startswith(f"kept in {find_calibration()}: ")
    without_slots(small_config)
    write_calibration([first], num_cores=CORES)
    assert hybridflow("train", small_config, "--set", "run.executor=ray").exit_code == 0
    assert slots_of(json.loads((tmp_path / "run" / "plan.json").read_text())) == 1
    write_calibration([second], num_cores=CORES)
    assert hybridflow("train", "--resume", tmp_path / "run", "--set", "run.iterations=3").exit_code == 0
    assert slots_of(json.loads((tmp_path / "run" / "plan.json").read_text())) == 1


def without_slots(config: Path) -> None:
    """Removes the number of ranks from a configuration, and the executor that has one."""
    text = config.read_text()
    config.write_text(text.replace("gpus_per_machine = 1\n", "").replace('executor = "in_process"\n', ""))


def count_slots(hybridflow: Callable[..., Outcome], config: Path, *words: str) -> int:
    """The slots of the models in the plan of a configuration."""
    outcome = hybridflow("plan", config, "--json", *words)
    assert outcome.exit_code == 0, outcome.errors
    return slots_of(json.loads(outcome.output))


def slots_of(plan: dict[str, Any]) -> int:
    """The slots of all pools that hold a model."""
    names = {each["pool"] for each in plan["models"].values() if each["train"] is not None}
    return sum(machine["slots"] for pool in plan["pools"] if pool["name"] in names for machine in pool["machines"])
