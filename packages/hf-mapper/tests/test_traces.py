"""Runs made up from the simulators' own answers: what was put in must be found again."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hf_mapper import (
    ClusterSpec,
    EfficiencySpec,
    TraceConstants,
    WorkloadSpec,
    calibrate_traces,
    host_gpu,
    map_dataflow,
    read_config,
    read_stages,
    validate_trace,
)
from hf_mapper.cli import main
from hf_protocols import (
    ConfigError,
    Dataflow,
    GenerationSpec,
    MachinePlan,
    MappingPlan,
    ModelPlan,
    ModelShape,
    ParallelSpec,
    PoolPlan,
)

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 160, "intermediate_size": 448,
    "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
WORKLOAD = {
    "global_batch": 64, "samples_per_prompt": 1, "prompt_tokens": 12, "response_tokens": 8, "epochs": 1,
    "mini_batches": 2, "dtype": "float32", "micro_batch_tokens": 8192,
}  # fmt: skip
STAGES = [
    ("actor", "generate_sequences", "transition"),
    ("actor", "generate_sequences", "generation"),
    ("actor", "compute_logprobs", "inference"),
    ("critic", "update_critic", "training"),
]


KINDS = {
    "actor.generate_sequences": "generation",
    "actor.compute_logprobs": "inference",
    "critic.update_critic": "training",
}


def plan() -> MappingPlan:
    model = ModelPlan(pool="models", backend="fsdp", train=ParallelSpec(dp_size=2))
    return MappingPlan(
        pools=(
            PoolPlan(name="models", machines=(MachinePlan(gpu_kind="cpu", slots=2),)),
            PoolPlan(name="advantage", machines=(MachinePlan(gpu_kind="cpu", slots=1),)),
        ),
        models={
            "actor": replace(model, generation=GenerationSpec()),
            "critic": model,
            "advantage": ModelPlan(pool="advantage", backend="function"),
        },
    )


def write_run(folder: Path, seconds: dict[str, float], *, slow: float = 1.0, **sizes: Any) -> Path:
    """A run of four iterations on two ranks, the second of which is faster; the first iteration is `slow`er."""
    folder.mkdir(parents=True)
    config = {**CONFIG, **{key: value for key, value in sizes.items() if key in CONFIG}}
    workload = {**WORKLOAD, **{key: value for key, value in sizes.items() if key in WORKLOAD}}
    (folder / "config.json").write_text(json.dumps(config))
    shape = asdict(ModelShape.from_config(folder / "config.json"))
    facts = {
        "workload": workload,
        "plan": json.loads(plan().to_json()),
        "models": dict.fromkeys(("actor", "critic"), shape),
    }
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "x"}}]
    clock = 0.0
    for iteration in range(1, 5):
        factor = slow if iteration == 1 else 1.0
        for number, name in enumerate(("actor.generate_sequences", "actor.compute_logprobs", "critic.update_critic")):
            repeats = 2 if "update" in name else 1
            for part in range(repeats):
                total = factor * sum(value for key, value in seconds.items() if key.startswith(name)) / repeats
                for rank, share in ((0, 1.0), (1, 0.5)):
                    call = 100 * iteration + 10 * number + part
                    arguments = {"call": call, "iteration": iteration, "compute_ms": 1e3 * total * share}
                    arguments["kind"] = KINDS[name]
                    events.append(complete(name, clock, total * share, rank, arguments))
                    if "generate" in name:
                        middle = clock
                        for span, phase in (("reshard", "transition"), ("generate", "generation")):
                            length = factor * share * seconds[f"{name} {phase}"]
                            events.append(complete(span, middle, length, rank, {"kind": phase}))
                            middle += length
                clock += total + 1
        metrics = {"call": 9000 + iteration, "iteration": iteration, "compute_ms": 5.0, "kind": "function"}
        events.append(complete("advantage.compute_advantages", clock, 0.005, 0, metrics, pid=2))
    # an evaluation, which belongs to no iteration
    events.append(
        complete("actor.generate_sequences", clock, 99.0, 0, {"call": 1, "compute_ms": 99e3, "kind": "generation"})
    )
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events, "otherData": facts}))
    return folder / "trace.json"


def change_facts(trace: Path, **facts: Any) -> None:
    body = json.loads(trace.read_text())
    trace.write_text(json.dumps({**body, "otherData": body["otherData"] | facts}))


def complete(
    name: str, start_s: float, seconds: float, rank: int, arguments: dict[str, Any], pid: int = 1
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": rank, "ts": 1e6 * start_s, "dur": 1e6 * seconds, "args": arguments,
    }  # fmt: skip


MEASURED = {
    "actor.generate_sequences transition": 0.01,
    "actor.generate_sequences generation": 0.2,
    "actor.compute_logprobs inference": 0.05,
    "critic.update_critic training": 0.4,
}


def test_stage_time_is_the_slowest_rank_over_its_calls(tmp_path: Path) -> None:
    """Two updates of 0.2 s make 0.4 s; the warm-up, the faster rank, functions and evaluations do not count."""
    cases = read_stages(write_run(tmp_path / "run", MEASURED, slow=7.0))
    assert [(case.role, case.method, case.phase) for case in cases] == STAGES
    assert {case.fit_group: case.measured for case in cases} == pytest.approx(MEASURED)
    assert all(case.parallel == ParallelSpec(dp_size=2) and case.workload.mini_batches == 2 for case in cases)


def truth() -> TraceConstants:
    """A device that differs from the defaults in everything that is fitted."""
    efficiency = EfficiencySpec(
        training_flops=0.31, training_latency_s=9e-4, generation_flops=0.12, layer_latency_s=4e-4,
        memory_bandwidth=0.33, sequence_latency_s=2e-5,
    )  # fmt: skip
    spec = host_gpu(
        memory_bytes=2**34,
        peak_flops_per_s=2e11,
        memory_bandwidth_bytes_per_s=5e10,
        link_bandwidth_bytes_per_s=1e10,
    )
    return TraceConstants(gpu=replace(spec, efficiency=efficiency), link_efficiency=0.05)


def simulated_run(folder: Path, **sizes: Any) -> Path:
    """A run that takes exactly what the simulators say of the true device."""
    guess = write_run(folder / "guess", MEASURED, **sizes)
    return write_run(folder / "run", {case.fit_group: case.predict() for case in read_stages(guess, truth())}, **sizes)


def test_calibration_recovers_the_device_and_predicts_a_size(tmp_path: Path) -> None:
    profiles = [
        simulated_run(tmp_path / "a"),
        simulated_run(tmp_path / "b", hidden_size=640, intermediate_size=1792, global_batch=256, response_tokens=24),
        simulated_run(tmp_path / "c", num_hidden_layers=6, global_batch=16),
    ]
    other = simulated_run(tmp_path / "d", hidden_size=320, intermediate_size=896, global_batch=128)
    found = calibrate_traces(profiles)
    assert found.link_efficiency == pytest.approx(0.05, rel=0.01)
    for error in validate_trace(other, found):
        assert abs(error.error) < 0.03, error
    before = [abs(error.error) for error in validate_trace(other)]
    assert max(before) > 0.3, "the default device is another one"
    # predicted over measured, less one
    for error in validate_trace(other):
        assert error.error == pytest.approx(error.predicted_s / error.measured_s - 1)


@pytest.mark.parametrize(("preset", "times"), [("remax", 2), ("grpo", 1), ("safe_rlhf", 1)])
def test_a_stage_counts_as_often_as_the_recipe_calls_it(tmp_path: Path, preset: str, times: int) -> None:
    """ReMax generates twice in an iteration, once greedily; the trace has the sum."""
    trace = write_run(tmp_path / "run", MEASURED)
    once = {case.fit_group: case.predict() for case in read_stages(trace)}
    shape = ModelShape.from_config(trace.parent / "config.json")
    flow = Dataflow.preset(preset)
    models = {role: shape for role in flow.roles if role not in ("reward", "cost", "advantage")}
    made = map_dataflow(flow, models, ClusterSpec.host(2, 2**31), WorkloadSpec(**WORKLOAD), backends=("fsdp",))
    assert made.models["actor"].train == ParallelSpec(dp_size=2), "as in the run"
    change_facts(trace, plan=json.loads(made.to_json()))
    found = {case.fit_group: case.predict() for case in read_stages(trace)}
    expected = {name: once[name] * (times if "generate" in name else 1) for name in found}
    assert found == pytest.approx(expected)
    assert ("critic.update_critic training" in found) is ("critic" in models)


def test_constants_travel_as_json() -> None:
    assert TraceConstants.from_json(truth().to_json()) == truth()
    for text in ("{}", "[]", "x", '{"gpu": {"efficiency": {}}}', "[" * 9000):
        with pytest.raises(ConfigError, match="not constants of calibrate --trace"):
            TraceConstants.from_json(text)


def run_command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(map(str, arguments)), env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_the_commands_go_together(tmp_path: Path) -> None:
    profile, other = simulated_run(tmp_path / "a"), simulated_run(tmp_path / "b", global_batch=32)
    code, output = run_command("calibrate", "--trace", profile, "--output", tmp_path / "cpu.json")
    assert (code, "actor.compute_logprobs" in output) == (0, True)
    code, output = run_command("calibrate", "--trace", profile, "--json")
    assert (code, output) == (0, (tmp_path / "cpu.json").read_text())
    code, output = run_command("validate", "--trace", other, "--constants", tmp_path / "cpu.json", "--json")
    assert code == 0
    stages = json.loads(output)["stages"]
    constants = TraceConstants.from_json((tmp_path / "cpu.json").read_text())
    assert stages == [asdict(error) for error in validate_trace(other, constants)]
    code, output = run_command("validate", "--trace", other)
    for word in ("transition", "generation", "inference", "training", "critic.update_critic", "predicted"):
        assert word in output


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    trace = write_run(tmp_path / "run", MEASURED)
    empty = tmp_path / "empty" / "trace.json"
    empty.parent.mkdir()
    empty.write_text("{}")
    nothing = write_run(tmp_path / "nothing", MEASURED)
    nothing.write_text(json.dumps({**json.loads(nothing.read_text()), "traceEvents": []}))
    foreign = write_run(tmp_path / "foreign", MEASURED)
    events = [{"ph": "X", "ts": 0, "dur": 1, "name": "of another program"}]
    foreign.write_text(json.dumps({**json.loads(foreign.read_text()), "traceEvents": events}))
    older = write_run(tmp_path / "older", MEASURED)
    older.write_text(json.dumps({"traceEvents": json.loads(older.read_text())["traceEvents"]}))
    damaged = write_run(tmp_path / "damaged", MEASURED)
    change_facts(damaged, plan={"schema_version": 1, "pools": 3, "models": {}})
    shapeless = write_run(tmp_path / "shapeless", MEASURED)
    change_facts(shapeless, models={"actor": {"layers": 3}})
    deep = write_run(tmp_path / "deep", MEASURED)
    deep.write_text("[" * 100_000)
    unmeasured = write_run(tmp_path / "unmeasured", MEASURED)
    unmeasured.write_text(re.sub(r'"dur": [0-9.]+', '"dur": NaN', unmeasured.read_text()))
    other_release = write_run(tmp_path / "other release", MEASURED)
    change_facts(other_release, workload={**WORKLOAD, "rounds": 3})
    other_kind = tmp_path / "h100.json"
    other_kind.write_text(replace(truth(), gpu=replace(truth().gpu, kind="h100")).to_json())
    cases = [
        (("validate",), "give either --data"),
        (("calibrate",), "give either --data"),
        (("validate", "--trace", trace, "--data", tmp_path), "give either --data"),
        (("validate", "--data", tmp_path, "--constants", tmp_path / "absent"), "--constants goes with --trace"),
        (("calibrate", "--data", tmp_path, "--output", tmp_path / "x.json"), "--output goes with --trace"),
        (("calibrate", "--trace", trace, "--stack", "vllm"), "--stack goes with --data"),
        (
            ("validate", "--trace", tmp_path / "absent.json"),
            f"Error: {tmp_path / 'absent.json'} does not exist",
        ),
        (("validate", "--trace", empty), "has no workload, plan and models of its run"),
        (("validate", "--trace", older), f"{older} has no workload, plan and models of its run, as traces of this"),
        (("validate", "--trace", damaged), f"{damaged}, its otherData: not a mapping plan: pools=3. Use a list"),
        (("validate", "--trace", shapeless), f"{shapeless}, its otherData, is not as a run wrote it: TypeError"),
        (("validate", "--trace", nothing), "no call of a model in an iteration"),
        (("validate", "--trace", foreign), "is not as a run wrote it: KeyError('args')"),
        (("validate", "--trace", deep), "nests too deeply"),
        (("validate", "--trace", unmeasured), "is not as a run wrote it: ValueError('a call took nan us')"),
        (("validate", "--trace", other_release), "its otherData, is not as a run wrote it: TypeError"),
        (("validate", "--trace", trace, "--constants", tmp_path / "absent"), "absent cannot be read"),
        (("validate", "--trace", trace, "--constants", trace), "not constants of calibrate"),
        (("validate", "--trace", trace, "--constants", other_kind), "constants are of h100, the run was on cpu"),
    ]
    for arguments, message in cases:
        code, output = run_command(*arguments)
        assert (code, message in output) == (2, True), (arguments, output)
        assert len(output.splitlines()) == 1, output


def test_a_mapping_problem_takes_the_device_that_was_found(tmp_path: Path) -> None:
    device = json.loads(truth().to_json())["gpu"]
    problem = f"""
        dataflow = "ppo"
        [models]
        actor = "qwen2.5-0.5b"
        critic = "qwen2.5-0.5b"
        reference = "qwen2.5-0.5b"
        [[cluster.machines]]
        gpu = {inline(device)}
        num_gpus = 4
        [workload]
        global_batch = 8
        prompt_tokens = 6
        response_tokens = 6
        dtype = "float32"
    """
    (tmp_path / "problem.toml").write_text(problem)
    assert read_config(tmp_path / "problem.toml").cluster.machine.gpu == truth().gpu


def inline(value: object) -> str:
    """As TOML has it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)
