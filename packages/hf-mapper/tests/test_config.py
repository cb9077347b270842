from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_mapper import MachineSpec, WorkloadSpec, gpu, host_gpu, read_config
from hf_protocols import ConfigError, Dataflow, ModelShape

VALID = """
dataflow = "ppo"

[models]
actor = "llama-2-13b"
critic = "llama-2-13b"
reference = "llama-2-13b"

[cluster]
inter_bandwidth_bytes_per_s = 25e9

[[cluster.machines]]
gpu = "a100-80"
num_gpus = 8
num_machines = 2

[workload]
global_batch = 1024
prompt_tokens = 1024
response_tokens = 1024
mini_batches = 8
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "problem.toml"
    path.write_text(text)
    return path


def test_a_valid_file_is_the_problem_it_says(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, VALID))
    assert config.dataflow == Dataflow.preset("ppo")
    assert config.models == dict.fromkeys(("actor", "critic", "reference"), ModelShape.preset("llama-2-13b"))
    assert config.cluster.machines == (MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=2),)
    assert config.workload == WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8)
    assert config.backends is None


@pytest.mark.parametrize("name", ["dapo", "online_dpo", "safe_rlhf", "safe_rlhf_one_critic"])
def test_a_dataflow_is_named_as_its_algorithm(tmp_path: Path, name: str) -> None:
    config = read_config(write(tmp_path, VALID.replace('"ppo"', f'"{name}"') + "[models.reward]\nparams_b = 7\n"))
    assert config.dataflow == Dataflow.preset(name).with_models(["reward"])
    (call,) = (call for call in config.dataflow.calls if call.role == "reward")
    assert call.kind == "inference"


def test_models_come_from_paths_and_sizes_as_well(tmp_path: Path, tiny: ModelShape) -> None:
    sizes = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "_name_or_path": "mine",
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(sizes))
    table = (
        "{ num_layers = 4, hidden_size = 128, intermediate_size = 384, num_heads = 4, num_kv_heads = 4, head_dim = 32, "
        'vocab_size = 32, max_positions = 64, name = "tiny" }'
    )
    text = VALID.replace('actor = "llama-2-13b"', 'actor = "mine/config.json"')
    text = text.replace('critic = "llama-2-13b"', 'critic = "./mine"')
    config = read_config(write(tmp_path, text.replace('reference = "llama-2-13b"', f"reference = {table}")))
    assert config.models["actor"] == config.models["critic"] == ModelShape.from_config(sizes)
    assert config.models["reference"] == tiny


@pytest.mark.parametrize(
    ("table", "parameters"),
    [
        ("{ params_b = 7 }", 7e9),
        ("{ params_b = 0.35 }", 0.35e9),
        ("{ params_b = 175 }", 175e9),
        # 12 l h^2 weights of the layers and an embedding for 51,200 tokens, in and out.
        ("{ layers = 24, hidden = 2048, heads = 16 }", 12 * 24 * 2048**2 + 2 * 51200 * 2048),
        ("{ layers = 24, hidden = 2048, heads = 16, vocab = 1000 }", 12 * 24 * 2048**2 + 2 * 1000 * 2048),
    ],
)
def test_plain_sizes_make_a_model_of_as_many_parameters(tmp_path: Path, table: str, parameters: float) -> None:
    text = VALID.replace('actor = "llama-2-13b"', f"actor = {table}").replace("_tokens = 1024", "_tokens = 8192")
    shape = read_config(write(tmp_path, text)).models["actor"]
    assert shape.num_parameters == pytest.approx(parameters, rel=0.02)
    assert shape.max_positions > 16384


def test_lengths_may_be_a_distribution(tmp_path: Path) -> None:
    text = VALID.replace("response_tokens = 1024", "response_tokens = [64, 1024, 256]")
    workload = read_config(write(tmp_path, text)).workload
    assert (workload.prompt_tokens, workload.prompt_lengths) == (1024, ())
    assert (workload.response_tokens, workload.response_lengths) == (1024, (64, 1024, 256))


def test_gpus_may_be_described(tmp_path: Path) -> None:
    own = (
        '{ kind = "mine", memory_bytes = 8000000000, peak_flops_per_s = { bfloat16 = 1e14 }, '
        "memory_bandwidth_bytes_per_s = 1e12, link_bandwidth_bytes_per_s = 1e10, "
        "efficiency = { training_flops = 0.4 } }"
    )
    machine = read_config(write(tmp_path, VALID.replace('"a100-80"', own))).cluster.machine
    assert (machine.gpu.kind, machine.gpu.efficiency.training_flops) == ("mine", 0.4)
    host = '{ kind = "cpu", memory_bytes = 2000000000, memory_bandwidth_bytes_per_s = 2e10 }'
    machine = read_config(write(tmp_path, VALID.replace('"a100-80"', host))).cluster.machine
    assert machine.gpu == host_gpu(memory_bytes=2_000_000_000, memory_bandwidth_bytes_per_s=2e10)


def test_backends_are_read(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, 'backends = ["fsdp"]' + VALID)).backends == ("fsdp",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('dataflow = "ppo"', "", "problem.toml: dataflow missing"),
        ('dataflow = "ppo"', 'dataflow = "ppoo"', "'ppoo' is unknown. Did you mean ppo"),
        ('dataflow = "ppo"', "dataflow = 3", "dataflow=3 must be the name of a preset"),
        ("[workload]", "[worklaod]", r"problem.toml: key 'worklaod' is unknown. Did you mean workload\?"),
        ("global_batch", "globalbatch", r"workload: key 'globalbatch' is unknown. Did you mean global_batch\?"),
        ("global_batch = 1024", "", "workload: global_batch missing"),
        ("global_batch = 1024", 'global_batch = "many"', "workload: global_batch='many' must be a whole number"),
        ("global_batch = 1024", "global_batch = true", "workload: global_batch=True must be a whole number"),
        ("global_batch = 1024", "global_batch = -4", "workload: global_batch=-4 must be a whole number of at least 1"),
        ("mini_batches = 8", "mini_batches = 7", "mini_batches=7 does not divide the 1024 sequences"),
        ('gpu = "a100-80"', 'gpu = "a100"', r"gpu 'a100' is unknown. Did you mean a100-40, a100-80 or h100\?"),
        ("mini_batches = 8", "recompute = 3", "workload: recompute=3 must be a text"),
        ("mini_batches = 8", 'recompute = "some"', "recompute 'some' is unknown. Use one of "),
        ("mini_batches = 8", "largest_generation = 4", "largest_generation=4. Use sizes as pp-tp, such as '1-4'"),
        (
            "mini_batches = 8",
            'largest_generation = "0-1"',
            "workload: largest_generation='0-1': gen_pp_size=0 must be a whole number of at least 1",
        ),
        ("num_gpus = 8", "num_gpus = 8\nintra_bandwidth_bytes_per_s = nan", "intra_bandwidth_bytes_per_s=nan must be"),
        ("mini_batches = 8", "software = { gradient_bytes = -8 }", "gradient_bytes=-8 must be a whole number of at"),
        ("mini_batches = 8", 'adapters = { rank = 4, targets = "q_proj" }', "targets='q_proj' must be a list of names"),
        ("mini_batches = 8", "adapters = { rank = 4, targets = [1] }", r"targets=\[1\] must be a list of names"),
        ("mini_batches = 8", "prompt_lengths = 5", "workload: key 'prompt_lengths' is unknown. Use prompt_tokens = "),
        ("mini_batches = 8", "dtype = 16", "workload: dtype=16 must be a text"),
        ('gpu = "a100-80"', 'gpu = { kind = "mine", peak_flops_per_s = 1 }', "cluster.machines.gpu: memory_bytes"),
        ('gpu = "a100-80"', "gpu = 8", "cluster.machines.gpu=8 must be the name of a GPU"),
        ('gpu = "a100-80"', 'gpu = { kind = "mine" }', "cluster.machines.gpu: memory_bytes, peak_flops_per_s"),
        ('gpu = "a100-80"', 'gpu = { kind = "cpu" }', "cluster.machines.gpu: memory_bytes missing"),
        ("num_gpus = 8", "num_gpus = 0", "num_gpus=0 must be a whole number of at least 1"),
        ("num_gpus = 8", "", "cluster.machines: num_gpus missing"),
        ("num_gpus = 8", "num_gpu = 8", r"key 'num_gpu' is unknown. Did you mean num_gpus\?"),
        ("inter_bandwidth_bytes_per_s = 25e9", "", "needs inter_bandwidth_bytes_per_s"),
        ("25e9", '"fast"', "cluster: inter_bandwidth_bytes_per_s='fast' must be a number"),
        ("25e9", "-1.0", "inter_bandwidth_bytes_per_s=-1.0 must be above 0"),
        ("[[cluster.machines]]", "[cluster.machines]", r"one \[\[cluster.machines\]\] table or more"),
        ('actor = "llama-2-13b"', 'actor = "llama-2-14b"', "'llama-2-14b' is unknown. Did you mean llama-2-13b"),
        ('actor = "llama-2-13b"', 'actor = "no/config.json"', "config.json does not exist"),
        ('actor = "llama-2-13b"', "actor = 13", "models.actor=13 must be a preset's name, a path or a table"),
        (
            'actor = "llama-2-13b"',
            "actor = { layers = 3 }",
            "models.actor: a table of sizes has params_b alone, or layers, hidden",
        ),
        ('actor = "llama-2-13b"', "actor = { params_b = -7 }", "models.actor: params_b=-7 must be above 0"),
        (
            'actor = "llama-2-13b"',
            "actor = { params_b = 1e300 }",
            "inf parameters are beyond any model. Choose a number below",
        ),
        ('actor = "llama-2-13b"', "actor = { params_b = inf }", "models.actor: params_b=inf must be above 0"),
        ('actor = "llama-2-13b"', 'actor = { params_b = "7B" }', "models.actor: params_b='7B' must be a number"),
        ('actor = "llama-2-13b"', "actor = { params_b = 7, layers = 3 }", "models.actor: .* has params_b alone"),
        (
            'actor = "llama-2-13b"',
            "actor = { layers = 3, hidden = 100, heads = 3 }",
            "models.actor: heads=3 does not divide hidden=100",
        ),
        ("response_tokens = 1024", "response_tokens = []", "response_tokens=.. must be a whole number"),
        ("response_tokens = 1024", "response_tokens = [8, -1]", r"response_lengths\[1\]=-1 must be a whole number"),
        ("response_tokens = 1024", 'response_tokens = [8, "x"]', "response_tokens=.8, 'x'. must be a whole number"),
        ("[models]", "[models", "problem.toml is not valid TOML"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in VALID
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, VALID.replace(old, new, 1)))


def test_backends_must_be_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backends='fsdp' must be a list of names"):
        read_config(write(tmp_path, 'backends = "fsdp"' + VALID))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        read_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml is not UTF-8 text: it looks like UTF-16"):
        read_config(tmp_path / "binary.toml")
