from __future__ import annotations

import json
import os
import sys
from math import prod

import pytest

from hf_engine.cli import main
from hf_engine.testing import write_tiny_model
from hf_protocols.models import ModelShape

LLAMA = ["plan", "--model", "llama-2-7b", "--train", "1-8-2", "--gen", "1-2"]


def test_the_table_has_the_papers_figures(capsys):
    main(LLAMA)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    # Section 8.4 of the paper: M/2 - M/8 of 13.48 GB, and 7/8 of it for the vanilla groups.
    assert "5.05 GB" in rows["hybridflow"]
    assert "11.79 GB" in rows["hybridflow-v"]
    assert "12.63 GB" in rows["ds-chat"]
    assert "all-gather in 4 groups of 4 ranks" in rows["hybridflow"]
    main(["plan", "--model", "llama-2-7b", "--train", "1-2-1", "--gen", "1-1"])
    assert "all-gather in 1 group of 2 ranks" in capsys.readouterr().out


def test_json_has_every_rank(capsys):
    main([*LLAMA, "--json", "--method", "hybridflow"])
    found = json.loads(capsys.readouterr().out)
    assert found["parameter_bytes"] == 2 * ModelShape.preset("llama-2-7b").num_parameters
    (row,) = found["methods"].values()
    assert len(row["by_rank"]["recv_bytes"]) == found["ranks"] == 16
    assert row["redundant_bytes"] == 0
    assert sum(row["by_rank"]["recv_bytes"]) / 16 == row["recv_bytes"]["mean"]
    assert [exchange["ranks"] for exchange in row["exchanges"]][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_adapter_is_planned_and_checked_as_its_base(tmp_path, capsys):
    base, adapter = write_tiny_model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    (adapter / "adapter_model.safetensors").touch()
    found = []
    for command in ("plan", "check"):
        for model in (base, adapter):
            main([command, "--model", str(model), "--train", "1-2-1", "--gen", "1-1"])
            found.append(capsys.readouterr().out)
    assert found[0] == found[1] and found[2] == found[3] and "bit-exact" in found[3]


def test_experts_context_and_machines_are_planned(capsys):
    mixture = ["plan", "--model", "mixtral-8x7b", "--train", "1-2-4", "--gen", "1-2", "--json"]
    mixture += ["--ranks-per-machine", "4"]
    received = {}
    for name, more in {"dense": [], "ep": ["--ep-size", "4"], "cp": ["--cp-size", "2"]}.items():
        main([*mixture, *more])
        found = json.loads(capsys.readouterr().out)
        assert found["ranks"] == (16 if name == "cp" else 8)
        received[name] = found["methods"]["hybridflow"]["recv_bytes"]["mean"]
        assert ("refused" in found["methods"]["hybridflow-v"]) == (name == "ep")
    # Sizes that are equal in training and generation move nothing; experts come from the other three of four ranks.
    assert received["dense"] == received["cp"] == 0
    shape = ModelShape.preset("mixtral-8x7b")
    experts = sum(prod(size) for name, size in shape.parameters().items() if ".experts." in name)
    assert received["ep"] == pytest.approx(2 * experts / 2 * 3 / 4)


def test_a_reader_that_has_enough_is_not_an_error(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        main([*LLAMA, "--json"])
    assert capsys.readouterr().err == ""


def test_a_method_that_is_not_defined_is_a_row_that_says_so(capsys):
    main(["plan", "--model", "llama-2-7b", "--train", "1-1-4", "--gen", "1-2", "--sharding", "fsdp"])
    out = capsys.readouterr().out
    assert "hybridflow-v  not defined here" in out


def test_a_layout_for_which_no_method_is_defined_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "llama-2-7b", "--train", "1-7-2", "--gen", "1-7"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "32 heads do not divide evenly by gen_tp_size=7 in generation" in error
    assert error.count("heads") == 1, "one reason for all methods"


def test_check_proves_a_model(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=2)
    main(["check", "--model", str(model), "--train", "2-2-1", "--gen", "1-2"])
    assert "bit-exact on all 4 ranks" in capsys.readouterr().out
    main(["check", "--model", str(model), "--train", "1-1-4", "--gen", "1-2", "--sharding", "fsdp", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["digests"]) == set(ModelShape.from_config(model).parameters())


@pytest.mark.parametrize("command", ["plan", "check"])
def test_fsdp_under_tensor_parallelism_is_refused(tmp_path, command, capsys):
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=2)
    with pytest.raises(SystemExit) as ended:
        main([command, "--model", str(model), "--train", "1-2-1", "--gen", "1-1", "--sharding", "fsdp"])
    assert ended.value.code == 2
    assert "tp_size=2. Use 1-1-2, or sharding=megatron" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "lama-2-7b", "--train", "1-8-2", "--gen", "1-2"], "llama-2-7b"),
        (["plan", "--model", "", "--train", "1-8-2", "--gen", "1-2"], "--model = ''"),
        (["plan", "--model", "llama-2-7b", "--train", "1-8", "--gen", "1-2"], "pp-tp-dp"),
        (["plan", "--model", "llama-2-7b", "--train", "1-8-2", "--gen", "1-3"], "divides 16"),
        (
            ["plan", "--model", "llama-2-70b", "--train", "1-12-1", "--gen", "1-2", "--method", "hybridflow"],
            "num_kv_heads=8",
        ),
        (
            ["plan", "--model", "llama-2-7b", "--train", "64-1-1", "--gen", "1-1"],
            "pp_size=64 pipeline stages in training",
        ),
        (["plan", "--model", "llama-2-7b", "--train", "1-1-3", "--gen", "1-3"], "by gen_tp_size=3 in generation"),
        (["plan", "--model", "llama-2-7b", "--train", "1-1-3", "--gen", "1-3"], "; hybridflow-v: hybridflow-v gathers"),
        (["plan", "--model", "llama-2-7b", "--train", "1-1-1000000", "--gen", "1-1"], "up to 16384"),
        (["check", "--model", "nowhere", "--train", "1-2-1", "--gen", "1-1"], "nowhere"),
        (["plan", "--model", "llama-2-7b", "--train=-1-2-1", "--gen", "1-1"], "pp-tp-dp"),
        (["plan", "--model", "llama-2-7b", "--train", "-1-2-1", "--gen", "1-1"], "--train: expected one argument"),
        (["plan", "--model", "llama-2-7b", "--train", "1-0-2", "--gen", "1-1"], "tp_size=0"),
        (["plan", "--model", "llama-2-7b", "--train", "1-2-1", "--gen", "0-1"], "gen_pp_size=0"),
        (["plan", "--model", "llama-2-7b", "--train", "1-2-1", "--gen", "two"], "pp-tp, such as"),
        ([*LLAMA, "--method", "magic"], "invalid choice: 'magic'"),
        ([*LLAMA, "--dtype-bytes", "3"], "invalid choice: 3"),
        ([*LLAMA, "--ep-size", "2", "--method", "hybridflow"], "num_experts=0 do not divide evenly by ep_size=2"),
        ([*LLAMA, "--ep-size", "2"], "llama-2-7b: num_experts=0 do not divide evenly by ep_size=2"),
        ([*LLAMA, "--ep-size", "2", "--method", "ds-chat"], "1 for a dense model"),
        ([*LLAMA, "--ep-size", "0"], "ep_size=0"),
        ([*LLAMA, "--cp-size", "-1"], "cp_size=-1"),
        ([*LLAMA, "--cp-size", "x"], "argument --cp-size: invalid int value: 'x'"),
        ([*LLAMA, "--ranks-per-machine", "0"], "ranks_per_machine=0 must be"),
        (["plan", "--train", "1-2-1", "--gen", "1-1"], "required: --model"),
        (["prove"], "invalid choice: 'prove'"),
        ([], "required: command"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def cut_off(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def rename_weights(directory):
    (directory / "model.safetensors").rename(directory / "weights.bin")


DAMAGES = {
    "cut off": (cut_off, "model.safetensors cannot be read"),
    "no weights": (rename_weights, "holds no safetensors files"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json"),
    "not JSON": (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
    "a list": (lambda directory: (directory / "config.json").write_text("[]"), "config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_one_line_and_exit_code_2(tmp_path, damage, capsys):
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=2)
    hurt, message = DAMAGES[damage]
    hurt(model)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(model), "--train", "1-2-1", "--gen", "1-1"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./absent", "--model './absent': no such file or directory"),
        ("~/absent", "--model '~/absent': no such file or directory"),
        ("", "--model = '': a path cannot be empty or blank"),
        (" llama-2-7b", "--model = ' llama-2-7b': the path begins with a blank"),
        ("lama-2-7b", "as a preset: "),
        ("x" * 10_000, "a path of 10000 bytes"),
    ],
)
def test_a_model_path_that_cannot_be_used_is_named(capsys, model: str, message: str):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", model, "--train", "1-1-2", "--gen", "1-1"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert len(told) < 300


def test_a_model_path_begins_at_the_home_directory(capsys, tmp_path, monkeypatch):
    write_tiny_model(tmp_path / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in ("plan", "check"):
        main([command, "--model", "~/tiny", "--train", "1-1-2", "--gen", "1-1"])
        assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        (None, "received worst peak redundant exchanges"),
        ("120", "received worst peak redundant exchanges"),
        ("80", "received worst peak redundant"),
        ("60", "received worst peak"),
        ("40", "received worst"),
        ("20", "received"),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(capsys, monkeypatch, columns, kept):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    main(LLAMA)
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("per rank")).split()[2:] == kept.split()
    left_out = [name for name in ("worst", "peak", "redundant", "exchanges") if name not in kept]
    assert [line.partition(": ")[2] for line in lines if line.startswith("left out")] == (
        [", ".join(left_out)] if left_out else []
    )
