"""Small tables whose errors are known, and the measured ones, if they lie next to the repository."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_mapper import build_report, estimate_memory, validate_folder
from hf_mapper.cli import main
from hf_mapper.measurements.cases import find_gpu
from hf_mapper.measurements.tables import SkipRow, read_tables
from hf_mapper.measurements.validation import build_cases

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT.parent / "shared" / "perf-data"
RUN = {
    "source": "a bench",
    "framework": "Megatron-LM",
    "gpu": "A100",
    "model": "GPT",
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "n_gpus": 8,
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "micro_batch": 1,
    "global_batch": 16,
    "seq_len": 1024,
    "precision": "fp16",
    "recompute": "full",
    "step_time_s": 1.0,
}
SERVED = {
    "source": "a server", "framework": "vLLM", "gpu": "H100", "model": "llama2-7b", "tp": 1, "batch": 4,
    "input_len": 128, "output_len": 64, "latency_s": 0.6,
}  # fmt: skip
Write = Callable[..., Path]


def predict(folder: Path) -> list[float]:
    """Returns the simulators' result for every usable row."""
    found = [cases for table in read_tables(folder) for _, cases in build_cases(table)]
    return [case.predict() for cases in found if not isinstance(cases, Exception) for case in cases]


def test_known_errors_are_found(write: Write) -> None:
    """Four layouts, predicted 10 % above, 20 % below, exactly as and 50 % above what was measured."""
    rows = [RUN | {"tp": tp, "pp": pp, "dp": 8 // (tp * pp)} for tp, pp in ((1, 1), (2, 1), (4, 2), (8, 1))]
    predicted = predict(write(rows))
    measured = [value / (1 + error) for value, error in zip(predicted, (0.1, -0.2, 0.0, 0.5), strict=True)]
    [errors] = validate_folder(write([row | {"step_time_s": value} for row, value in zip(rows, measured, strict=True)]))
    assert (errors.source, errors.file, errors.phase, errors.gpu) == ("a bench", "table.csv", "training", "A100")
    assert (errors.rows_used, errors.rows_skipped) == (4, {})
    assert errors.mape == pytest.approx(0.2)
    assert errors.bias == pytest.approx(0.1)
    [sweep] = errors.sweeps
    chosen = measured[predicted.index(min(predicted))]
    assert sweep.rows == 4
    assert sweep.regret == pytest.approx(chosen / min(measured) - 1)
    assert sweep.spearman == errors.spearman
    assert "GPT on 8 A100" in sweep.name


def test_a_table_goes_by_its_columns(write: Write) -> None:
    """Sizes by params_b or a known name, tp, pp and dp by default; the file's name and the columns' order are free."""
    plain = {key: RUN[key] for key in ("gpu", "n_gpus", "global_batch", "seq_len", "step_time_s")}
    write([plain | {"params_b": 7, "model": "Llama2-7B"}], "x.csv")
    write([{"params_b": 6.7} | plain], "y.csv")
    folder = write([{"seq_len": 512, "params_b": 6.7} | {k: v for k, v in plain.items() if k != "seq_len"}], "z.csv")
    errors = validate_folder(folder)
    assert [entry.rows_used for entry in errors] == [1, 1, 1]
    known, guessed, _ = predict(folder)
    assert known == pytest.approx(guessed, rel=0.1), "7B by name and 6.7B by size are about as large"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"suspect": "1 (faster than peak)"}, "marked suspect"),
        ({"step_time_s": ""}, "step_time_s is blank"),
        ({"step_time_s": "-3"}, "step_time_s is not above 0"),
        ({"step_time_s": "nan"}, "step_time_s is not above 0"),
        ({"n_gpus": "eight"}, "n_gpus is not a number"),
        ({"global_batch": "16.5"}, "global_batch is not a whole number"),
        ({"dp": 3}, "pp x tp x dp is not n_gpus"),
        ({"global_batch": 15}, "dp does not divide global_batch"),
        ({"gpu": "TPU v5"}, "gpu TPU v5 is not in the catalogue"),
        ({"precision": "fp8"}, "8-bit and 4-bit precision are not simulated"),
        ({"precision": "int8"}, "8-bit and 4-bit precision are not simulated"),
        ({"precision": "FP32"}, "precision FP32 is not simulated"),
        ({"precision": "tf32"}, "precision tf32 is not simulated"),
        ({"recompute": "sometimes"}, "recompute sometimes is not known"),
        ({"cp": 2}, "cp above 1 is not simulated"),
        ({"heads": "", "model": "unheard of"}, "params_b is blank"),
    ],
)
def test_rows_that_cannot_be_compared_are_skipped_and_said(write: Write, changed: dict, reason: str) -> None:
    good = RUN | dict.fromkeys(changed, "") | {key: RUN.get(key, "") for key in changed}
    errors = validate_folder(write([good, RUN | changed]))
    assert {text: count for entry in errors for text, count in entry.rows_skipped.items()} == {reason: 1}
    assert sum(entry.rows_used for entry in errors) == 1


@pytest.mark.parametrize("mark", ["", "0", "False", "no", "N", "none", "off", "-", "n/a", "NaN"])
def test_a_mark_that_says_no_is_none(write: Write, mark: str) -> None:
    server = SERVED | {"suspect": mark, "n_gpus": ""}
    write([RUN | {"suspect": mark, "cpu_offload": mark}], "training.csv")
    errors = validate_folder(write([server], "generation.csv"))
    assert [(entry.rows_used, entry.rows_skipped) for entry in errors] == [(1, {}), (1, {})]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", "none"), ("none", "none"), ("No", "none"), ("false", "none"), ("0", "none"),
        ("selective", "selective"), ("selective+sequence-parallel", "selective"),
        ("full", "full"), ("full/selective (True)", "full"), ("True", "full"), ("yes", "full"), ("1", "full"),
    ],
)  # fmt: skip
def test_the_usual_words_for_recompute_are_known(write: Write, written: str, meant: str) -> None:
    [table] = read_tables(write([RUN | {"recompute": written}]))
    [(_, [case])] = build_cases(table)
    assert case.workload.recompute == meant


@pytest.mark.parametrize("precision", ["", "fp16", "BF16", "amp_bf16", "mixed fp16", "bfloat16", "torch.float16", "16"])
def test_figures_of_16_bits_are_simulated_however_written(write: Write, precision: str) -> None:
    write([RUN | {"precision": precision}], "training.csv")
    errors = validate_folder(write([SERVED | {"precision": precision}], "generation.csv"))
    assert [entry.rows_used for entry in errors] == [1, 1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *(
            ({"precision": precision}, "8-bit and 4-bit precision are not simulated")
            for precision in ("nvfp4", "fp4", "mxfp4", "w4a16", "W8A8", "fp8", "int4", "AWQ")
        ),
        ({"precision": "fp32"}, "precision fp32 is not simulated"),
        ({"precision": "tf32"}, "precision tf32 is not simulated"),
        ({"n_gpus": 8}, "n_gpus is not tp x pp"),
        ({"suspect": "1 (faster than peak)"}, "marked suspect"),
    ],
)
def test_generation_that_is_not_simulated_is_skipped_and_said(write: Write, changed: dict, reason: str) -> None:
    [errors] = validate_folder(write([SERVED | dict.fromkeys(changed, ""), SERVED | changed]))
    assert (errors.rows_used, errors.rows_skipped) == (1, {reason: 1})


def test_a_row_counts_once_however_much_it_measured(write: Write) -> None:
    """Memory in two parts; times and bytes; a skipped row is not skipped once for each phase of its source."""
    parts = {key: value for key, value in RUN.items() if key != "step_time_s"} | {
        "param_opt_gib": 9,
        "activation_gib": 5,
    }
    marks = {"suspect": "1"}, {"suspect": ""}
    [memory] = validate_folder(write([parts | mark for mark in marks]))
    assert (memory.rows_used, memory.rows_skipped) == (1, {"marked suspect": 1})
    rows = [RUN | marks[0] | {"mem_gb": 20}, RUN | marks[1] | {"mem_gb": 20}, RUN | marks[1] | {"mem_gb": ""}]
    assert [(entry.phase, entry.rows_used, entry.rows_skipped) for entry in validate_folder(write(rows))] == [
        ("training", 2, {"marked suspect": 1}),
        ("memory", 1, {}),
    ]


def test_a_table_that_a_spreadsheet_wrote_is_read(write: Write) -> None:
    """With a mark of its encoding before the first column, and its name's end in capitals."""
    path = write([{"gpu": "A100"} | RUN], "TABLE.CSV") / "TABLE.CSV"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    [errors] = validate_folder(path.parent)
    assert (errors.file, errors.rows_used) == ("TABLE.CSV", 1)


def test_software_follows_from_the_source_by_default(write: Write) -> None:
    plain = {key: value for key, value in RUN.items() if key != "framework"}
    folder = write([plain | {"source": source} for source in ("vTrain (MICRO24)", "a bench")])
    [table] = read_tables(folder)
    cases = [case for _, [case] in build_cases(table)]
    assert [(case.stack, case.software) for case in cases] == [
        ("megatron-2021", "megatron-deepspeed"),
        ("pytorch", "hf-engine"),
    ]
    shown = CliRunner().invoke(main, ["validate", "--data", str(folder)], env={"COLUMNS": "160"}).output
    assert "software" in shown
    assert "megatron-deepspeed" in shown


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("A100", "a100-80"),
        ("a100_40gb", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("GH200", "gh200"),
        ("RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX4090", "rtx-4090"),
        ("a100-40", "a100-40"),
        ("A100-40G", "a100-40"),
        ("A100 40 GB", "a100-40"),
        ("A100 (40GB)", "a100-40"),
        ("A100-SXM4-40GB", "a100-40"),
        ("a100-80", "a100-80"),
        ("A100 80 GiB", "a100-80"),
        ("A100 400W", "a100-80"),
    ],
)
def test_gpus_are_known_as_tables_write_them(written: str, kind: str) -> None:
    assert find_gpu(written) == kind


@pytest.mark.parametrize("written", ["A800", "GB200", "B300", "h100-80gb-pcap", "RTX 4090D", ""])
def test_other_gpus_are_not_mistaken(written: str) -> None:
    with pytest.raises(SkipRow):
        find_gpu(written)


def test_a_boards_memory_and_power_are_read_from_its_name(write: Write) -> None:
    """Six stacks of HBM2e, 1,024 pins of 3.2 Gbit/s each; 500 W instead of 700 leave 89 % of the clock."""
    names = ("H100", "H100-96GB-HBM2e (500W)", "H100 (700W)")
    tables = read_tables(write([RUN | {"gpu": name} for name in names]))
    plain, limited, full = (cases[0].cluster.machine.gpu for table in tables for _, cases in build_cases(table))
    assert plain == full
    assert limited.memory_bytes == 96 * 2**30
    assert limited.memory_bandwidth_bytes_per_s == pytest.approx(2.4576e12)
    assert limited.peak("bfloat16") / plain.peak("bfloat16") == pytest.approx(0.894, abs=0.001)


def test_deepspeed_sums_gradients_in_16_bits_and_megatron_in_32(write: Write) -> None:
    frameworks = ("Megatron-LM", "Megatron-DeepSpeed")
    tables = read_tables(write([RUN | {"framework": framework} for framework in frameworks]))
    megatron, deepspeed = (cases[0] for table in tables for _, cases in build_cases(table))
    assert (megatron.stack, deepspeed.stack) == ("megatron-2021", "megatron-2021")
    assert megatron.workload.software == dataclasses.replace(
        deepspeed.workload.software, name="megatron-2021", gradient_bytes=4
    )
    assert deepspeed.workload.software.gradient_bytes == 2


@pytest.mark.parametrize(("framework", "one_shot"), [("vLLM", True), ("vLLM fork", False), ("DeepSpeed-MII", False)])
def test_engines_of_2023_sum_around_a_ring(write: Write, framework: str, one_shot: bool) -> None:
    run = {
        "source": "a server", "framework": framework, "gpu": "A100", "model": "llama2-7b", "tp": 4, "batch": 4,
        "input_len": 128, "output_len": 128, "latency_s": 1.0,
    }  # fmt: skip
    [table] = read_tables(write([run]))
    [(_, [case])] = build_cases(table)
    assert case.engine.one_shot_reduce == one_shot


def test_an_engine_that_evicts_nothing_goes_in_whole_rounds(write: Write) -> None:
    """70B in 16 bits on 4 x 40 GiB: 0.9 of each, less 1 GiB and the weights, holds 18 whole sequences."""
    free = 0.9 * 40 * 2**30 - 2**30 - 2 * 68.98e9 / 4
    token = 2 * 80 * 8 * 128 * 2 / 4
    assert int(free / token / 2048) == 18
    run = {
        "source": "LLM-Inference-Bench", "gpu": "A100", "model": "llama2-70b", "tp": 4, "input_len": 1024,
        "output_len": 1024, "latency_s": 1.0,
    }  # fmt: skip
    whole = predict(write([run | {"framework": "TensorRT-LLM", "batch": batch} for batch in (18, 19, 36, 37)]))
    assert whole[2] == pytest.approx(2 * whole[0], rel=1e-3)
    assert [bool(after > 1.4 * before) for before, after in itertools.pairwise(whole)] == [True, False, True]
    freed = predict(write([run | {"framework": "vLLM", "batch": batch} for batch in range(16, 40)]))
    assert all(before < after < 1.1 * before for before, after in itertools.pairwise(freed))


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie next to the repository")
def test_no_measured_run_is_called_out_of_memory() -> None:
    found = [cases for table in read_tables(MEASURED) for _, cases in build_cases(table)]
    runs = [case for cases in found if not isinstance(cases, Exception) for case in cases if case.phase == "training"]
    assert len(runs) > 1800
    for run in runs:
        need = estimate_memory(
            run.model, run.cluster, run.parallel, run.workload, calls=("training",), backend=run.backend
        )
        assert need.memory_bytes <= run.cluster.machine.gpu.usable_bytes, run.sweep


def test_repeats_of_one_layout_are_not_a_sweep(write: Write) -> None:
    [errors] = validate_folder(write([RUN, RUN, RUN]))
    assert errors.sweeps == ()


def test_prefill_and_decode_are_scored_apart(write: Write) -> None:
    row = {
        "source": "a server", "framework": "vLLM", "gpu": "H100", "model": "llama2-7b", "tp": 1, "batch": 4,
        "input_len": 128, "output_len": 64, "prompt_time_ms_median": 20, "token_time_ms_median": 8, "latency_s": 0.6,
    }  # fmt: skip
    errors = validate_folder(write([row]))
    assert [(entry.phase, entry.rows_used) for entry in errors] == [("prefill", 1), ("decode", 1), ("generation", 1)]
    prefill_s, decode_s, whole_s = predict(write([row]))
    assert whole_s == pytest.approx(prefill_s + 64 * decode_s)


def test_json_is_one_object_of_sources(write: Write) -> None:
    folder = write([RUN | {"tp": tp, "dp": 4 // tp} for tp in (1, 2, 4)])
    result = CliRunner().invoke(main, ["validate", "--data", str(folder), "--json"])
    assert result.exit_code == 0
    body = json.loads(result.output)
    assert body == json.loads(json.dumps(build_report(validate_folder(folder))))
    [source] = body["sources"]
    assert set(source) == {
        "source", "file", "phase", "gpu", "rows_used", "rows_skipped", "mape", "bias", "spearman", "sweeps",
    }  # fmt: skip
    assert set(source["sweeps"][0]) == {"name", "rows", "spearman", "regret"}


def test_the_table_shows_percent(write: Write) -> None:
    [value] = predict(write([RUN]))
    folder = write([RUN | {"step_time_s": value / 1.25}, RUN | {"step_time_s": ""}])
    result = CliRunner().invoke(main, ["validate", "--data", str(folder)])
    assert result.exit_code == 0
    for expected in ("table.csv", "a bench", "25.0", "1 rows skipped: step_time_s is blank"):
        assert expected in result.output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": 1, "b": 2}], "no measured time among its columns"),
        ([{key: value for key, value in RUN.items() if key != "gpu"}], "this training table lacks gpu"),
        ([{"gpu": "A100", "latency_s": 1.0, "batch": 1}], "this generation table lacks input_len, output_len"),
    ],
)
def test_table_without_columns_is_one_line_and_exit_code_2(write: Write, rows: list, message: str) -> None:
    result = CliRunner().invoke(main, ["validate", "--data", str(write(rows))])
    assert result.exit_code == 2
    assert message in result.output
    assert "table.csv" in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(("name", "message"), [("absent", "is not a folder"), ("empty", "holds no measured table")])
def test_a_folder_without_tables_is_one_line_and_exit_code_2(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("validate", "calibrate"):
        result = CliRunner().invoke(main, [command, "--data", str(tmp_path / name)])
        assert result.exit_code == 2
        assert message in result.output
        assert len(result.output.splitlines()) == 1


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie next to the repository")
def test_every_measured_row_is_used_or_skipped_for_a_reason() -> None:
    for table in read_tables(MEASURED):
        found = [cases for _, cases in build_cases(table)]
        assert len(found) == len(table.rows)
        assert all(str(cases) if isinstance(cases, Exception) else cases for cases in found), table.file
