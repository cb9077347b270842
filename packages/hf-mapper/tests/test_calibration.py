"""Constants are found again in tables made with them; the left-out model is scored with the others' constants."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_mapper import calibrate_folder
from hf_mapper.cli import main
from hf_mapper.constants import find_efficiency, find_links, find_plan_efficiency, read_fits
from hf_mapper.measurements.calibration import apply_constants, cross_validate, fit_constants, group_cases
from hf_mapper.measurements.cases import TrainingCase
from hf_mapper.measurements.tables import read_tables
from hf_protocols import ConfigError

TRUE = {"training_flops": 0.55, "half_size": 150.0, "training_bandwidth": 0.7, "training_latency_s": 4e-4}
MODELS = {"small": (8, 512, 8), "middle": (24, 2048, 16), "large": (40, 5120, 40)}


def write_table(
    folder: Path, *, noise: float = 0.0, constants: dict | None = None, micro_batches: tuple[int, ...] = (1, 2, 8)
) -> Path:
    """Four runs of each micro-batch of each of three models on 8 A100, as simulated with `TRUE`."""
    chance = random.Random(0)
    rows = [
        {
            "source": "made", "framework": "Megatron-LM", "gpu": "A100", "model": model, "layers": layers,
            "hidden": hidden, "heads": heads, "n_gpus": 8, "tp": tp, "pp": pp, "dp": 8 // (tp * pp),
            "micro_batch": micro, "global_batch": 64, "seq_len": 1024, "recompute": "full", "step_time_s": 1.0,
        }
        for model, (layers, hidden, heads) in MODELS.items()
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 4))
        for micro in micro_batches
    ]  # fmt: skip
    path = folder / "made.csv"
    _write(path, rows)
    [cases] = group_cases(read_tables(folder)).values()
    for row, case in zip(rows, cases, strict=True):
        row["step_time_s"] = apply_constants(case, constants or TRUE).predict() * (1 + chance.uniform(-noise, noise))
    _write(path, rows)
    return folder


def _write(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_constants_are_found_again(tmp_path: Path) -> None:
    [cases] = group_cases(read_tables(write_table(tmp_path, micro_batches=(1, 8)))).values()
    found = fit_constants(cases, tuple(TRUE), steps=400)
    errors = [abs(apply_constants(case, found).predict() / case.measured - 1) for case in cases]
    assert sum(errors) / len(errors) < 0.005
    assert found["training_latency_s"] == pytest.approx(4e-4, rel=0.02)
    assert found["training_flops"] == pytest.approx(0.55, rel=0.05)


def test_noise_is_not_followed(tmp_path: Path) -> None:
    """Uniform noise of 10 % has a mean of 5 %; a model that the fit never saw is met about as well."""
    [found] = calibrate_folder(write_table(tmp_path, noise=0.1))
    assert (found.gpu, found.stack, found.rows) == ("a100", "megatron-2021", 36)
    assert 0.03 < found.mape < 0.07
    assert [error.group for error in found.left_out] == sorted(MODELS)
    assert all(error.rows == 12 and error.mape < 0.12 for error in found.left_out)


def test_of_one_model_each_sweep_is_left_out(tmp_path: Path) -> None:
    """Rows of one model, half of them with another batch: two sweeps, and each is scored by the other's constants."""
    [cases] = group_cases(read_tables(write_table(tmp_path))).values()
    own = [case for case in cases if case.fit_group == min(MODELS)]
    assert all(isinstance(case, TrainingCase) for case in own)
    sweeps = [dataclasses.replace(case, sweep=f"batch {index % 2}") for index, case in enumerate(own)]  # type: ignore[type-var]
    found = cross_validate(sweeps, tuple(TRUE), steps=400)
    assert [(error.group, error.rows) for error in found] == [("batch 0", 6), ("batch 1", 6)]
    assert all(error.mape < 0.05 for error in found)


def test_parts_of_peaks_stay_below_what_hardware_reaches(tmp_path: Path) -> None:
    """Runs twice as fast as any kernel: the fit stops at 0.95 and says so by its error."""
    impossible = {**TRUE, "training_flops": 1.0, "half_size": 0.0, "training_bandwidth": 1.0, "training_latency_s": 0.0}
    folder = write_table(tmp_path, constants=impossible)
    [cases] = group_cases(read_tables(folder)).values()
    halved = [dataclasses.replace(case, measured=case.measured / 2) for case in cases]
    assert fit_constants(halved, tuple(TRUE))["training_flops"] <= 0.95


def test_the_command_prints_constants_and_left_out_models(tmp_path: Path) -> None:
    folder = write_table(tmp_path, micro_batches=(2,))
    arguments = ["calibrate", "--data", str(folder), "--stack", "megatron-2021"]
    shown = CliRunner().invoke(main, arguments, env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    for expected in ("a100, megatron-2021: 12 rows", "half_size", "left out large, 4 rows"):
        assert expected in shown.output
    [calibration] = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)["calibrations"]
    assert set(calibration) == {"gpu", "stack", "rows", "constants", "mape", "left_out"}
    assert len(calibration["constants"]) <= 6


def test_a_stack_without_rows_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    folder = write_table(tmp_path)
    result = CliRunner().invoke(main, ["calibrate", "--data", str(folder), "--stack", "vllm"])
    assert result.exit_code == 2
    assert "no usable row of stack 'vllm'; stacks there: megatron-2021" in result.output
    with pytest.raises(ConfigError, match="no row to calibrate on"):
        fit_constants([], ("training_flops",))


def test_gpus_without_measurements_take_those_of_a_similar_one() -> None:
    assert find_efficiency("h200", "pytorch") == find_efficiency("h100", "pytorch")
    assert find_links("gh200") == find_links("h100")
    assert find_links("mi300x") == {}
    plan = find_plan_efficiency("a100-80")
    values = {(fit.gpu, fit.stack): fit.values for fit in read_fits()}
    assert plan.half_size == values["a100", "pytorch"]["half_size"]
    assert plan.sequence_latency_s == values["a100", "vllm"]["sequence_latency_s"]
