"""Tables in the words of others: what columns, cells and missing names stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_mapper.measurements.tables import find_times, read_tables
from hf_mapper.measurements.validation import Case, build_cases, validate_folder
from hf_protocols import ConfigError

TRAINED = {"gpu": "A100", "n_gpus": 8, "global_batch": 64, "seq_len": 2048, "params_b": 7, "step_time_s": 10.0}
SERVED = {"gpu": "A100", "model": "llama-2-7b", "batch": 4, "input_len": 128, "output_len": 64, "latency_s": 0.6}
Write = Callable[..., Path]


def cases_of(folder: Path) -> list[Case]:
    found = [cases for table in read_tables(folder) for _, cases in build_cases(table)]
    return [case for cases in found if not isinstance(cases, Exception) for case in cases]


@pytest.mark.parametrize("framework", [None, "SGLang", "an engine"])
def test_unknown_engine_counts_as_the_one_of_plans(write: Write, framework: str | None) -> None:
    given = {} if framework is None else {"framework": framework}
    [vllm, other] = (cases_of(write([SERVED | row]))[0] for row in ({"framework": "vLLM"}, given))
    assert (other.stack, other.predict()) == ("vllm", vllm.predict())


@pytest.mark.parametrize("sizes", [("params_b",), ("layers", "hidden", "heads")])
def test_models_without_a_name_are_distinguished_by_their_sizes(write: Write, sizes: tuple[str, ...]) -> None:
    small, large = {"params_b": 7, "layers": 32, "hidden": 4096, "heads": 32}, {"params_b": 13, "layers": 40,
        "hidden": 5120, "heads": 40}  # fmt: skip
    nameless = {key: value for key, value in TRAINED.items() if key != "params_b"}
    rows = [
        nameless | {name: model[name] for name in sizes} | {"tp": tp, "dp": 8 // tp}
        for model in (small, large) for tp in (2, 4, 8)
    ]  # fmt: skip
    [errors] = validate_folder(write(rows))
    assert [sweep.rows for sweep in errors.sweeps] == [3, 3]
    assert len({case.fit_group for case in cases_of(write(rows))}) == 2


def test_one_sweep_is_of_one_software(write: Write) -> None:
    rows = [
        TRAINED | {"framework": name, "tp": tp, "dp": 8 // tp, "model": "GPT 7B"}
        for name in ("Megatron-LM", "NeMo") for tp in (2, 4, 8)
    ]  # fmt: skip
    [errors] = validate_folder(write(rows))
    assert [sweep.rows for sweep in errors.sweeps] == [3, 3]


def test_layouts_of_generation_are_a_sweep(write: Write) -> None:
    """The slowest is predicted as the fastest: its time over the best, less one."""
    layouts = [{"tp": 8, "pp": 1}, {"tp": 4, "pp": 2}, {"tp": 2, "pp": 4}]
    rows = [SERVED | layout | {"model": "llama-2-70b"} for layout in layouts]
    predicted = [case.predict() for case in cases_of(write(rows))]
    measured = [3.0 if value == min(predicted) else 2.0 for value in predicted]
    [errors] = validate_folder(write([row | {"latency_s": time} for row, time in zip(rows, measured, strict=True)]))
    [sweep] = errors.sweeps
    assert (sweep.rows, sweep.regret) == (3, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (TRAINED, {"suspect": "0.0", "cpu_offload": "0.0", "cp": "1.0", "tp": "1.0", "phase": ""}),
        (TRAINED, {"phase": "Pretrain", "recompute": "off"}),
        (SERVED, {"suspect": "0.0", "ep": "1.0", "tp": "", "pp": ""}),
    ],
)
def test_numbers_with_points_and_blanks_are_read_alike(
    write: Write, row: dict[str, Any], cells: dict[str, str]
) -> None:
    [plain], [written] = cases_of(write([row])), cases_of(write([row | cells]))
    assert written.predict() == plain.predict()


def test_columns_may_have_spaces_and_capitals(write: Write) -> None:
    [plain], [written] = (
        cases_of(write([row])) for row in (SERVED, {f" {key.upper()}": SERVED[key] for key in SERVED})
    )
    assert written.predict() == plain.predict()


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ("ttft_s", {"prefill": ("ttft_s", 1.0, False)}),
        ("ttft_avg_s ttft_min_s", {"prefill": ("ttft_min_s", 1.0, True)}),
        ("prompt_time_ms tpot_ms", {"prefill": ("prompt_time_ms", 1e-3, False), "decode": ("tpot_ms", 1e-3, False)}),
        ("itl_avg_s itl_p50_s", {"decode": ("itl_p50_s", 1.0, False)}),
        ("latency_ms", {"generation": ("latency_ms", 1e-3, False)}),
        ("e2e_time_ms_median", {"generation": ("e2e_time_ms_median", 1e-3, False)}),
        ("e2e_time_ms_median token_time_ms_median", {"decode": ("token_time_ms_median", 1e-3, False)}),
        ("itl_p99_s ttft output_len", {}),
    ],
)
def test_times_of_generation_go_by_quantity_and_unit(columns: str, found: dict[str, Any]) -> None:
    assert find_times(columns.split()) == found


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"global_batch": 1e300}, "beyond what can be measured"),
        ({"seq_len": 1e12}, "above a billion"),
        ({"step_time_s": 1e-308}, "beyond what can be measured"),
        ({"micro_batch": 3}, "micro_batch does not divide the sequences of a data-parallel rank"),
        ({"layers": 30, "hidden": 4096, "heads": 32, "pp": 4, "dp": 2}, "30 layers do not divide evenly by pp_size=4"),
        (
            {"layers": 32, "hidden": 4096, "heads": 4, "tp": 8, "dp": 1},
            "4 attention heads do not divide evenly",
        ),
        ({"gpu": "H100 PCIe"}, "whose boards have NVLink"),
    ],
)
def test_rows_that_no_run_can_have_are_skipped(write: Write, changed: dict[str, Any], reason: str) -> None:
    [errors] = validate_folder(write([TRAINED | changed]))
    assert errors.rows_used == 0
    [said] = errors.rows_skipped
    assert reason in said


@pytest.mark.parametrize("written", ["A100SXM", "8xA100", "8 x A100 80GB", "A100/80GB", "A100, 80GB", "A100-SXM4"])
def test_the_same_board_by_other_names(write: Write, written: str) -> None:
    [named] = cases_of(write([TRAINED | {"gpu": written}]))
    assert named.cluster.machine.gpu.kind == "a100-80"


def test_zero_3_is_known_however_written(write: Write) -> None:
    seconds = {
        cases_of(write([TRAINED | {"framework": "DeepSpeed", "sharding": sharding}]))[0].predict()
        for sharding in ("ZeRO-3", "zero3", "ZeRO 3", "zero_stage_3")
    }
    assert len(seconds) == 1


def test_memory_counts_where_the_time_is_blank(write: Write) -> None:
    [found] = cases_of(write([TRAINED | {"step_time_s": "", "mem_gb": 40}]))
    assert (found.phase, found.measured) == ("memory", 40 * 2**30)


def test_a_table_without_a_row_is_said(write: Write) -> None:
    folder = write([TRAINED])
    (folder / "table.csv").write_text(",".join(TRAINED) + "\n")
    with pytest.raises(ConfigError, match="has columns but no row"):
        validate_folder(folder)
