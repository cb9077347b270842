"""All readers of files that others may have damaged, and what draws them. A new reader is one line of `READERS`."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["READERS", "Fuzzed", "write_files"]


@dataclass(frozen=True)
class Fuzzed:
    """One file, and what is done with it.

    Attributes:
        name: in messages.
        file: path in the folder that `write_files` fills.
        read: gets the folder; only errors of HybridFlow's tree may leave it.
        kind: structure by which the file is damaged; its suffix by default.
        share: how often it is drawn; slow readers less often.
        names_file: its errors name the file. A configuration's name the key, which is in one file alone.
    """

    name: str
    file: str
    read: Callable[[Path], object]
    kind: str = ""
    share: int = 4
    names_file: bool = True


def write_files(folder: Path) -> None:
    """Fills a folder with a healthy file for every reader."""
    run = folder / "run"
    for each in (run / "samples", run / "model", folder / "data", folder / "tables"):
        each.mkdir(parents=True)
    (folder / "mapper.toml").write_text(_MAPPER)
    (folder / "config.toml").write_text(_CONFIG)
    (folder / "sft.toml").write_text(_SFT)
    (folder / "plan.json").write_text(_build_plan(folder))
    _write_run(run)
    _write_steps(run)
    _write_data(folder / "data")
    (folder / "tables" / "times.csv").write_text(_TIMES)
    (folder / "constants.json").write_text(_build_constants())


# ------------------------------------------------------------------------------------------------------------- readers


def _load_config(name: str, command: str | None) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from hf_algorithms.config import format_commented, format_toml, load_config

        settings = load_config(folder / name, command=command)
        return format_toml(settings), format_commented(settings)

    return read


def _read_mapper_config(folder: Path) -> object:
    from hf_mapper import read_config

    return read_config(folder / "mapper.toml")


def _draw_plan(folder: Path) -> object:
    from rich.console import Console

    from hf_mapper import build_page, render_plan
    from hf_mapper.search.simulation import read_placement
    from hf_protocols import HybridFlowError, load_plan

    plan = load_plan(folder / "plan.json")
    plan.to_json()
    failures: list[HybridFlowError] = []
    draws: Sequence[Callable[[], object]] = (
        lambda: build_page(plan).encode(),
        lambda: render_plan(plan, Console(file=io.StringIO(), width=100)),
        lambda: read_placement(plan),
    )
    for draw in draws:
        try:
            draw()
        except HybridFlowError as error:
            failures.append(error)
    for failure in failures:
        raise failure
    return None


def _validate_trace(folder: Path) -> object:
    from rich.console import Console

    from hf_mapper import validate_trace
    from hf_mapper.explain.report import render_stage_errors

    return render_stage_errors(validate_trace(folder / "run" / "trace.json"), Console(file=io.StringIO()))


def _read_constants(folder: Path) -> object:
    from hf_mapper import TraceConstants
    from hf_protocols.paths import read_text

    return TraceConstants.from_json(read_text(folder / "constants.json", "--constants", "constants"))


def _read_tables(folder: Path) -> object:
    from rich.console import Console

    from hf_mapper.explain.report import render_errors
    from hf_mapper.measurements.validation import build_report, validate_folder

    errors = validate_folder(folder / "tables")
    json.dumps(build_report(errors))
    return render_errors(errors, Console(file=io.StringIO()))


def _read_shape(folder: Path) -> object:
    from hf_protocols import ModelShape

    return ModelShape.from_config(folder / "run" / "model" / "config.json")


def _report(folder: Path) -> object:
    from hf_algorithms.report import write_report

    return write_report(folder / "run").read_text(encoding="utf-8")


def _sum_up_trace(folder: Path) -> object:
    from rich.console import Console

    from hf_algorithms.report import load_breakdown, render_breakdown

    return render_breakdown(load_breakdown(folder / "run"), Console(file=io.StringIO(), width=100))


def _serve(*addresses: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from starlette.testclient import TestClient

        from hf_algorithms.report.live import build_app

        with TestClient(build_app([folder / "run"]), base_url="http://localhost") as client:
            for address in addresses:
                answer = client.get(address)
                assert answer.status_code in (200, 400), (address, answer.status_code)
                answer.content.decode("utf-8")
        return None

    return read


def _watch(folder: Path) -> object:
    from rich.console import Console

    from hf_algorithms.commands.watch import print_run
    from hf_algorithms.report.live import open_runs

    (run,) = open_runs([folder / "run"])
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a terminal
    print_run(run, Console(file=file, width=100))
    return file.flush()


def _read_rows(name: str, **options: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from hf_algorithms.data import open_rows

        rows = open_rows([(str(folder / "data" / name), None)], **options)
        return [row.prompt for row in rows]

    return read


def _read_pairs(folder: Path) -> object:
    from hf_algorithms.data import load_preferences

    return load_preferences(folder / "data" / "pairs.jsonl")


def _find_commit(folder: Path) -> object:
    from hf_algorithms.checkpoints import find_last_commit

    return find_last_commit(folder / "run")


def _read_program(folder: Path) -> object:
    from hf_algorithms.checkpoints.program import read_program

    return read_program(folder / "run" / "steps" / "3")


def _read_origin(folder: Path) -> object:
    from hf_algorithms.checkpoints.origin import read_origin

    return read_origin(folder / "run")


def _count_ledger(folder: Path) -> object:
    from hf_algorithms.checkpoints import count_ledger

    return count_ledger(folder / "run" / "ledger.jsonl")


_METRICS, _SAMPLES = "run/metrics.jsonl", "run/samples/20.jsonl"
_CURVES = "/parts/curves", "/parts/curves?axis=tokens", "/parts/health"
_SHOWN = "/parts/samples", "/parts/sample?row=0", "/parts/sample?row=0&colouring=ratio", "/samples.jsonl"

READERS: Sequence[Fuzzed] = (
    Fuzzed("configuration", "config.toml", _load_config("config.toml", "train"), share=12, names_file=False),
    Fuzzed("configuration of sft", "sft.toml", _load_config("sft.toml", None), share=8, names_file=False),
    Fuzzed("configuration of the mapper", "mapper.toml", _read_mapper_config, share=12, names_file=False),
    Fuzzed("plan, drawn", "plan.json", _draw_plan, share=12, names_file=False),
    Fuzzed("trace, against simulators", "run/trace.json", _validate_trace, share=4),
    Fuzzed("model", "run/model/config.json", _read_shape, share=8, names_file=False),
    Fuzzed("constants", "constants.json", _read_constants, share=8, names_file=False),
    Fuzzed("measured tables", "tables/times.csv", _read_tables),
    Fuzzed("report, configuration", "run/config.toml", _report),
    Fuzzed("report, metrics", _METRICS, _report),
    Fuzzed("report, summary", "run/summary.json", _report, share=6),
    Fuzzed("report, trace", "run/trace.json", _report),
    Fuzzed("report, samples", _SAMPLES, _report),
    Fuzzed("trace", "run/trace.json", _sum_up_trace, share=8),
    Fuzzed("serve, configuration", "run/config.toml", _serve("/state", "/parts/compare"), share=2),
    Fuzzed(
        "serve, metrics",
        _METRICS,
        _serve("/state", "/parts/curves", "/parts/curves?axis=tokens", "/parts/health"),
        share=3,
    ),
    Fuzzed("serve, summary", "run/summary.json", _serve("/state", "/parts/compare"), share=2),
    Fuzzed("serve, trace", "run/trace.json", _serve("/state", "/parts/gantt", "/parts/gantt?iteration=3"), share=2),
    Fuzzed("serve, samples", _SAMPLES, _serve("/state", *_SHOWN), share=3),
    Fuzzed("watch, configuration", "run/config.toml", _watch, share=2),
    Fuzzed("watch, metrics", _METRICS, _watch, share=3),
    Fuzzed("watch, summary", "run/summary.json", _watch, share=2),
    Fuzzed("watch, samples", _SAMPLES, _watch, share=3),
    Fuzzed("rows, JSON lines", "data/rows.jsonl", _read_rows("rows.jsonl"), share=8),
    Fuzzed("rows, chats", "data/chats.jsonl", _read_rows("chats.jsonl", is_learned=True), share=8),
    Fuzzed("rows, JSON", "data/rows.json", _read_rows("rows.json")),
    Fuzzed("rows, CSV", "data/rows.csv", _read_rows("rows.csv")),
    Fuzzed("rows, Parquet", "data/rows.parquet", _read_rows("rows.parquet"), kind="bytes"),
    Fuzzed("rows, gzip", "data/packed.jsonl.gz", _read_rows("packed.jsonl.gz"), kind="bytes"),
    Fuzzed("commit", "run/steps/3/COMMIT", _find_commit, kind="json", share=8),
    Fuzzed("commit, a file of it", "run/steps/3/actor/state.json", _find_commit),
    Fuzzed("commit, program", "run/steps/3/program.json", _read_program, share=8),
    Fuzzed("origin of a run", "run/.hybridflow-run", _read_origin, kind="json", share=6),
    Fuzzed("ledger", "run/ledger.jsonl", _count_ledger, share=8),
    Fuzzed("pairs", "data/pairs.jsonl", _read_pairs, share=8),
)

# --------------------------------------------------------------------------------------------------- healthy files

_MAPPER = """dataflow = "ppo"
backends = ["fsdp", "megatron"]
[models]
actor = "llama-2-7b"
critic = "llama-2-7b"
reference = "llama-2-7b"
reward = { params_b = 7 }
[cluster]
inter_bandwidth_bytes_per_s = 25e9
[[cluster.machines]]
gpu = "a100-80"
num_gpus = 8
num_machines = 1
host_memory_bytes = 1_000_000_000_000
[workload]
global_batch = 64
prompt_tokens = 128
response_tokens = [256, 512]
mini_batches = 8
largest_generation = "1-8"
adapters = { rank = 16 }
"""

_CONFIG = """[run]
output_dir = "runs/one"
iterations = 30
eval_every = 10
executor = "in_process"
trackers = ["tensorboard"]
[data]
train = [{path = "a.jsonl", weight = 2.0}, {path = "b.jsonl", weight = 1}]
prompt_field = "question"
too_long = "drop"
[model]
path = "models/one"
[model.lora]
rank = 4
targets = ["q_proj"]
[algorithm]
name = "grpo"
kl_coefficient = 0.005
clip_low = 0.2
[optimizer]
actor_learning_rate = 2e-4
[rollout]
batch_size = 64
samples_per_prompt = 4
max_new_tokens = 128
stop = ["###"]
[[reward.functions]]
name = "exact"
function = "hf_algorithms.rewards:exact_match"
weight = 1.0
[[evaluation]]
name = "held_out"
data = "c.jsonl"
metrics = ["exact_match"]
samples = 4
temperature = 0.7
every = 5
[training]
shard = "root"
[cluster]
call_timeout_s = 60
"""

_SFT = """[run]
output_dir = "runs/two"
iterations = 30
[data]
train = "a.jsonl"
[model]
path = "models/one"
[algorithm]
name = "sft"
batch_size = 8
[optimizer]
actor_learning_rate = 1e-4
"""

_TIMES = "gpu,n_gpus,global_batch,seq_len,params_b,tp,dp,pp,framework,model,step_time_s,suspect\n" + "".join(
    f"A100,8,64,2048,7,{tp},{8 // tp},1,Megatron-LM,llama-2-7b,{10 + tp}.5,0\n" for tp in (1, 2, 4, 8)
)


def _build_plan(folder: Path) -> str:
    from hf_mapper import map_dataflow, read_config

    problem = read_config(folder / "mapper.toml")
    found = map_dataflow(problem.dataflow, problem.models, problem.cluster, problem.workload, backends=problem.backends)
    return found.to_json()


def _build_constants() -> str:
    from hf_mapper import TraceConstants, gpu

    return TraceConstants(gpu=gpu("a100-80")).to_json()


def _span(name: str, start_us: float, dur_us: float, tid: int = 0, iteration: int = 3, **more: Any) -> dict[str, Any]:
    times = {"queue_ms": 0.1, "fetch_ms": 0.1, "compute_ms": dur_us / 1e3, "store_ms": 0.0}
    counts = {"bytes_read": 800, "remote_bytes": 0, "pool": "models"}
    arguments = {"iteration": iteration, "call": f"{name} {iteration}", **times, **counts, **more}
    return {
        "ph": "X",
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": 1e9 * iteration + start_us,
        "dur": dur_us,
        "args": arguments,
    }


def _write_run(run: Path) -> None:
    from hf_protocols import ModelShape

    (run / "config.toml").write_text(_CONFIG)
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(1, 31):
            row = {"iteration": number, "reward/mean": 0.01 * number, "actor/entropy": 2.0, "kl/k3": 0.01}
            row |= {"actor/policy_loss": -0.1, "perf/tokens_per_s": 100.5, "time/iteration_s": 2.0, "time/train_s": 0.5}
            file.write(json.dumps({**row, "eval/validation/exact_match": 0.5}) + "\n")
    workload = {
        "global_batch": 64, "samples_per_prompt": 1, "prompt_tokens": 12, "response_tokens": 8, "epochs": 1,
        "mini_batches": 2, "dtype": "float32", "micro_batch_tokens": 8192,
    }  # fmt: skip
    divergence = {"estimator": "k3", "unit": "nats per response", "value": 0.3}
    summary = {"status": "finished", "metric": "exact", "score_before": 0.25, "score_after": 0.75, "wall_s": 80.0}
    summary |= {
        "kl_to_reference": divergence,
        "iterations": 30,
        "tokens_per_s": 5.0,
        "samples_per_s": 1.0,
    }
    summary |= {"peak_rss_bytes": 1 << 30, "workload": workload, "versions": {"torch": "2.13"}, "error": None}
    (run / "summary.json").write_text(json.dumps(summary))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "models"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "rank 0"}},
    ]
    for iteration in (1, 2, 3):
        generate = _span("actor.generate_sequences", 0, 600, iteration=iteration, kind="generation")
        inner = [
            dict(generate, name=name, ts=generate["ts"] + 1 + 200 * place, dur=150, args={"kind": kind})
            for place, (name, kind) in enumerate((("reshard", "transition"), ("generate", "generation")))
        ]
        events += [generate, *inner, _span("actor.update_actor", 600, 400, iteration=iteration, kind="training")]
        scored = {"tid": 1, "iteration": iteration, "kind": "inference", "failed": True}
        events.append(_span("actor.compute_logprobs", 600, 100, **scored))
    (run / "plan.json").write_text(_PLAN)
    shape = {"num_hidden_layers": 3, "hidden_size": 160, "intermediate_size": 448, "num_attention_heads": 5}
    shape |= {"num_key_value_heads": 5, "vocab_size": 64, "max_position_embeddings": 64}
    (run / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    models = {"actor": asdict(ModelShape.from_config(run / "model" / "config.json"))}
    facts = {"workload": workload, "plan": json.loads(_PLAN), "models": models}
    (run / "trace.json").write_text(json.dumps({"traceEvents": events, "otherData": facts}))
    rows = [_build_sample(group, number) for group in (1, 2) for number in range(4)]
    rows += [{"set": "test", "prompt": "1+1=", "response": "2", "answer": "2", "score": 1.0, "extra": {"a": [1]}}]
    (run / "samples" / "20.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


_PLAN = json.dumps({
    "schema_version": 1,
    "pools": [{"name": "models", "machines": [{"gpu_kind": "cpu", "slots": 2}]}],
    "models": {
        "actor": {
            "pool": "models", "backend": "fsdp", "train": {"dp_size": 2}, "generation": {"gen_tp_size": 1},
        }
    },
    "estimates": {
        "iteration_s": 1.0, "pools": {}, "models": {}, "idle_gpus": 0,
        "stages": [{
            "calls": ["actor.generate_sequences", "actor.compute_logprobs", "actor.update_actor"],
            "latency_s": 1.0, "waits_for": "models",
        }],
    },
})  # fmt: skip


def _write_steps(run: Path) -> None:
    """The ledger and the only commit of a run."""
    from hf_algorithms.checkpoints import LEDGER
    from hf_algorithms.checkpoints.commit import write_commit
    from hf_algorithms.checkpoints.program import Program, save_generators, write_program

    prompts = [[0, row, 0] for row in range(4)]
    lines: list[dict[str, Any]] = []
    for iteration in (1, 2, 3):
        lines.append({"iteration": iteration, "state": "planned", "samples": 2, "prompts": prompts})
        lines.append({"iteration": iteration, "state": "trained", "samples": 2, "prompts": prompts[1:]})
        lines.append({"iteration": iteration, "state": "dropped", "sample_ids": [[0, 0, 0, 0], [0, 0, 1, 0]]})
    (run / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = run / "steps" / "3"
    (step / "actor").mkdir(parents=True)
    (step / "actor" / "state.json").write_text(json.dumps({"schema": 1, "world_size": 2}))
    counts = {"planned": 24, "trained": 18, "filtered": 0, "dropped": 6, "in_flight": 0}
    program = Program(
        iteration=3, state={"multiplier": {"value": 0.5}}, summary={"iterations": 3}, totals={"wall_s": 2.0},
        ledger=counts, data={"rows_drawn": 4, "rows": 4}, generators=save_generators(), sizes={"metrics.jsonl": 100},
    )  # fmt: skip
    write_program(step, program)
    write_commit(step, 3, [], ledger=counts, versions={"torch": "2.13"})
    origin = {"directory": str(run), "sections": {"run": {"seed": 1}}, "search_path": [str(run)]}
    origin |= {"inputs": [{"path": str(run / "a.jsonl"), "bytes": 3, "sha256": "0" * 64}]}
    (run / ".hybridflow-run").write_text(json.dumps(origin))


def _build_sample(group: int, number: int) -> dict[str, Any]:
    return {
        "iteration": 20, "set": "train", "row": group, "group": group, "sample": [0, group, number, 0],
        "prompt": f"{group}+1=", "response": f"answer {number}", "answer": "2", "finish_reason": "stop",
        "score": 0.25 * number, "rewards": {"exact": 0.5, "format": 0.5}, "advantage": 0.5, "tokens": 3,
        "token_ids": [7, 8, 9], "token_texts": ["answer", " ", str(number)], "rollout_logprobs": [-0.1, -2.0, -1.0],
        "old_logprobs": [-0.1, -1.0, -3.0], "advantages": [0.5, 0.5, 0.5], "response_mask": [1, 1, 0],
    }  # fmt: skip


def _write_data(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n, "tags": ["a"]} for n in range(6)]
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.csv").write_text("prompt,answer\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(6)))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat, "id": n}) + "\n" for n in range(4)))
    pairs = [{"prompt": f"{n}?", "chosen": "good", "rejected": "bad"} for n in range(4)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
