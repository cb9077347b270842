from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hf_mapper
from hf_mapper import Explanation, build_page, explain_plan, map_dataflow, read_config
from hf_mapper.cli import main
from hf_protocols import ConfigError, MappingPlan, ModelShape

CONFIG = """
dataflow = "ppo"
[models]
actor = "qwen2.5-0.5b"
critic = "qwen2.5-0.5b"
reference = "qwen2.5-0.5b"
[cluster]
[[cluster.machines]]
gpu = "l40s"
num_gpus = 4
[workload]
global_batch = 64
prompt_tokens = 256
response_tokens = 256
mini_batches = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "problem.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """All that is said of the problem."""
    path = tmp_path_factory.mktemp("explained") / "problem.toml"
    path.write_text(CONFIG)
    return explain_plan(read_config(path))


def test_json_is_the_plan(config: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(config), "--json"])
    problem = read_config(config)
    assert result.exit_code == 0
    assert MappingPlan.from_json(result.output) == map_dataflow(
        problem.dataflow, problem.models, problem.cluster, problem.workload
    )


def test_the_table_names_what_was_chosen(config: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(config)], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for expected in ("actor", "critic", "reference", "reward", "l40s", "fsdp", "update_actor", "iteration"):
        assert expected in result.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"l40s"', '"l40"', "gpu 'l40' is unknown. Did you mean l40s?"),
        ("num_gpus = 4", "num_gpus = -4", "num_gpus=-4"),
        ("num_gpus = 4", "num_gpus = 0", "num_gpus=0 must be a whole number of at least 1"),
        ("global_batch = 64", "global_batch = -64", "global_batch=-64 must be a whole number of at least 1"),
        ("response_tokens = 256", "response_tokens = 0", "response_tokens=0 must be a whole number of at least 1"),
        ("mini_batches = 4", "mini_batches = 5", "mini_batches=5 does not divide the 64 sequences"),
        ('actor = "qwen2.5-0.5b"', 'actor = "qwen2.5-0.6b"', "'qwen2.5-0.6b' is unknown. Did you mean qwen2.5-0.5b"),
        ('actor = "qwen2.5-0.5b"', "actor = { params_b = 0 }", "models.actor: params_b=0 must be above 0"),
        (
            'actor = "qwen2.5-0.5b"',
            "actor = { layers = 2, hidden = 100, heads = 3 }",
            "heads=3 does not divide hidden=100",
        ),
        (
            "[cluster]",
            "[cluster]\ninter_bandwidth_bytes_per_s = -1.0",
            "inter_bandwidth_bytes_per_s=-1.0 must be above 0",
        ),
        ("prompt_tokens = 256", "prompt_tokens = 99999", "exceeds the 32768 positions of qwen2.5-0.5b"),
        ('actor = "qwen2.5-0.5b"', 'actor = "llama-2-13b"', "smallest cluster that would do"),
        ('actor = "qwen2.5-0.5b"', 'actor = "llama-3-405b"', "largest_generation above 1-64"),
        ('dataflow = "ppo"', 'dataflow = "dpo"', "dataflow preset 'dpo' is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_bad_input_is_one_line_and_exit_code_2(config: Path, command: str, old: str, new: str, message: str) -> None:
    config.write_text(CONFIG.replace(old, new))
    result = CliRunner().invoke(main, [command, str(config)])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_a_time_limit_is_a_stop_sign(config: Path) -> None:
    """No time at all still gives the first plan; enough time gives the plan of an unlimited search."""
    runner = CliRunner()
    none, plenty = (
        json.loads(runner.invoke(main, ["plan", str(config), "--json", "--time-limit", limit]).output)["estimates"]
        for limit in ("0", "1e6")
    )
    assert not none["search"]["complete"]
    assert none["search"]["gap"] > 0
    assert plenty == json.loads(runner.invoke(main, ["plan", str(config), "--json"]).output)["estimates"]


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time-limit", "-1"], "--time-limit: -1 must be at least 0 seconds"),
        (["--time-limit", "nan"], "--time-limit: nan must be at least 0 seconds"),
        (["--time-limit", "soon"], "'soon' is not a valid float"),
        (["--time-limit"], "'--time-limit' requires an argument"),
        (["--jsn"], "No such option"),
        (["other.toml"], "unexpected extra argument (other.toml)"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_line(
    config: Path, command: str, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(main, [command, str(config), *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_a_command_that_there_is_not_is_one_line() -> None:
    result = CliRunner().invoke(main, ["pln"])
    assert result.exit_code == 2
    assert result.output.startswith("Error: No such command 'pln'")
    assert len(result.output.splitlines()) == 1


def test_explaining_stops_with_the_first_plan_and_what_bounds_it(config: Path, explained: Explanation) -> None:
    runner = CliRunner()
    found = json.loads(runner.invoke(main, ["explain", str(config), "--json", "--time-limit", "0"]).output)
    assert not found["complete"]
    assert not found["plan"]["estimates"]["search"]["complete"]
    assert [entry["reason"] for entry in found["alternatives"]] == ["the best so far"]
    assert found["bottleneck"]["latency_s"] > 0
    assert found["extensions"] == found["tolerances"] == []
    table = runner.invoke(main, ["explain", str(config), "--time-limit", "0"], env={"COLUMNS": "120"})
    assert table.exit_code == 0
    assert "Stopped by the time limit" in table.output
    assert explained.complete
    plenty = runner.invoke(main, ["explain", str(config), "--json", "--time-limit", "1e6"])
    assert plenty.output == explained.to_json()


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(tmp_path / "absent.toml")])
    assert result.exit_code == 2
    assert "absent.toml cannot be read: No such file or directory. Give the path of a TOML file" in result.output
    assert len(result.output.splitlines()) == 1


def test_explain_prints_what_the_function_finds(config: Path, tmp_path: Path, explained: Explanation) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["explain", str(config), "--json", "--html", str(page)])
    assert result.exit_code == 0
    assert result.output == explained.to_json()
    assert page.read_text() == build_page(explained.plan, explained)
    quick = CliRunner().invoke(main, ["explain", str(config), "--quick"], env={"COLUMNS": "120"})
    assert quick.exit_code == 0
    assert "Placements: the best plan of each" in quick.output
    assert "Sensitivity" not in quick.output


def test_plan_writes_its_page(config: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["plan", str(config), "--json", "--html", str(page)])
    assert result.exit_code == 0
    assert page.read_text() == build_page(MappingPlan.from_json(result.output))


def test_unwritable_page_is_one_line_and_exit_code_2(config: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(config), "--html", str(tmp_path / "absent" / "page.html")])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"Error: --html = '{tmp_path}/absent/page.html' cannot be written: {tmp_path}/absent is not a directory"
    ]


def test_the_smallest_cluster_that_an_error_names_would_do(config: Path) -> None:
    """Four l40s are too few for an 8B model; the number of machines in the error is enough, and one less is not."""
    problem = CONFIG.replace("qwen2.5-0.5b", "llama-3-8b")
    config.write_text(problem)
    refused = CliRunner().invoke(main, ["plan", str(config)])
    assert refused.exit_code == 2
    found = re.search(r"The smallest cluster that would do is (\d+) machines of 4 x l40s", refused.output)
    assert found, refused.output
    for count, code in ((int(found.group(1)), 0), (int(found.group(1)) - 1, 2)):
        more = f"num_gpus = 4\nnum_machines = {count}"
        network = "[cluster]\ninter_bandwidth_bytes_per_s = 25e9"
        config.write_text(problem.replace("num_gpus = 4", more).replace("[cluster]", network, 1))
        assert CliRunner().invoke(main, ["plan", str(config)]).exit_code == code


def test_importing_it_loads_neither_torch_nor_ray() -> None:
    program = "import sys, hf_mapper.cli; sys.exit(bool({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_all_is_sorted_and_importable() -> None:
    names = hf_mapper.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(getattr(hf_mapper, name).__doc__ for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", " problem.toml"], "CONFIG = ' problem.toml': the path begins with a blank"),
        (["plan", "~/absent.toml"], "/ada/absent.toml cannot be read: No such file or directory"),
        (["plan", "."], "the configuration . cannot be read: Is a directory. Give the path of a TOML file"),
        (["plan", "~no-such-user/x"], "CONFIG = '~no-such-user/x': `~` cannot be expanded: there is no user"),
        (["plan", "absent", "--html", "."], "--html = '.' is a directory. Give the path of a file"),
        (["explain", "absent", "--html", "no/x"], "--html = 'no/x' cannot be written: no is not a directory"),
        (["calibrate", "--trace", "x", "--output", "no/x"], "--output = 'no/x' cannot be written: no is not a dir"),
        (["calibrate", "--data", "~/tables"], "/ada/tables is not a folder"),
        (["validate", "--trace", "a\0b"], "--trace = 'a\\x00b': the path contains a NUL"),
        (["validate", "--trace", "x", "--constants", "."], "--constants . cannot be read: Is a directory"),
    ],
)
def test_a_path_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/ada")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert message in result.output


def test_a_models_path_begins_at_the_home_directory(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(config.parent))
    sizes = ModelShape.preset("qwen2.5-0.5b")
    (config.parent / "config.json").write_text(json.dumps(_as_config(sizes)))
    named = config.with_name("named.toml")
    named.write_text(CONFIG.replace('actor = "qwen2.5-0.5b"', 'actor = "~/config.json"'))
    assert read_config(named).models["actor"].num_parameters == sizes.num_parameters
    named.write_text(CONFIG.replace('actor = "qwen2.5-0.5b"', 'actor = " ~/config.json"'))
    with pytest.raises(ConfigError, match=r"^models\.actor = ' ~/config\.json': the path begins with a blank"):
        read_config(named)


def _as_config(shape: ModelShape) -> dict[str, object]:
    return {
        "model_type": "qwen2",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "max_position_embeddings": shape.max_positions,
    }


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "{0}", "--html", "{0}"),
        ("explain", "{0}", "--html", "{1}"),
        ("calibrate", "--trace", "{0}", "--output", "{0}"),
    ],
)
def test_an_input_is_not_written_over(tmp_path, words):
    given = tmp_path / "given"
    given.write_text("precious")
    (tmp_path / "link").symlink_to(given)
    result = CliRunner().invoke(main, [word.format(given, tmp_path / "link") for word in words])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2
    assert "is a file that the command reads. Give another path" in result.output
    assert given.read_text() == "precious"
