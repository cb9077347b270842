"""The table of docs/reference/algorithm-agreement.md: every algorithm in process against two ranks on Ray.

Runs one iteration of each shipped algorithm on a small model, twice: one rank in this process, and two ranks on Ray.
The sampled tokens must be equal, and every metric must agree to 1e-5 relative; near zero, to 1e-7 absolute. Takes some
minutes; other programs change how long, not what it says. Exits with 1 if an algorithm differs.

    .venv/bin/python benchmarks/algorithm_agreement.py [NAME...]
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_algorithms.config import Config, parse_config
from hf_algorithms.data import write_addition_data
from hf_algorithms.preflight.placement import plan_dataflow
from hf_algorithms.recipes import RECIPES
from hf_algorithms.run import loop as run_module
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import MappingPlan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "algorithm-agreement.md"
BEGIN, END = "<!-- agreement -->\n", "<!-- end -->"
RELATIVE, NEAR_ZERO = 1e-5, 1e-2
"""Bounds of a metric: smaller ones may differ by 1e-7."""
HERE = str(Path(__file__).resolve().parent)

NOT_COMPARED = ("time/", "perf/", "memory/", "batch/")
"""Prefixes of metrics that measure the machine."""


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens and metrics of a run of one iteration."""

    tokens: list[list[list[int]]]
    """Responses of every generation call of the first iteration, in order: evaluations are left out."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Difference:
    """Largest difference between two runs."""

    num_responses: int
    num_metrics: int
    largest: float
    """Largest relative difference of a metric; metrics near zero count as `NEAR_ZERO`."""
    metric: str
    """The metric that has it."""


def build_body(
    name: str, data: Path, output: Path, *, teacher: Path | None, on_ray: bool, address: str = "local"
) -> dict[str, Any]:
    """Returns the sections of a run of one iteration.

    Args:
        name: the algorithm.
        data: folder of the rows.
        output: folder of the run.
        teacher: model directory for the algorithm that needs one.
        on_ray: runs on two ranks of a Ray cluster.
        address: of the cluster.
    """
    body: dict[str, Any] = {
        "run": {"output_dir": str(output), "iterations": 1, "executor": "ray" if on_ray else "in_process"},
        "data": {"train": str(data / "train.jsonl"), "validation": str(data / "validation.jsonl"), "max_eval_rows": 8},
        "model": {"tokenizer": "characters", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1},
        "algorithm": {"name": name},
        "optimizer": {"actor_learning_rate": 1e-4, "critic_learning_rate": 1e-3},
        "rollout": {"batch_size": 8, "max_new_tokens": 5, "samples_per_prompt": RECIPES[name].config.least_samples},
        "reward": {"function": "length_rewards:response_length"},
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": 2, "address": address} if on_ray else {"gpus_per_machine": 1},
    }
    body["model"] |= {"num_heads": 1, "max_positions": 16}
    if "cost.function" in RECIPES[name].config.needs_keys:
        body["cost"] = {"function": "length_rewards:holds_a_one"}
    if "roles.teacher.path" in RECIPES[name].config.needs_keys:
        body["roles"] = {"teacher": {"path": str(teacher)}}
    return body


def run_once(body: Mapping[str, Any]) -> Sampled:
    """Runs one iteration, and keeps the responses that it was trained on."""
    config = parse_config(body)
    with _recorded() as tokens:
        _run(config)
    (line,) = (Path(config.run.output_dir) / "metrics.jsonl").read_text().splitlines()
    return Sampled(tokens, {name: value for name, value in json.loads(line).items() if _is_compared(name)})


def compare(one: Sampled, other: Sampled) -> Difference:
    """Compares two runs.

    Raises:
        AssertionError: for other tokens, other names of metrics, or a metric that differs by more than the bounds.
    """
    assert one.tokens == other.tokens, "the sampled tokens differ"
    assert one.metrics.keys() == other.metrics.keys(), one.metrics.keys() ^ other.metrics.keys()
    differences = {name: _measure(value, other.metrics[name]) for name, value in one.metrics.items()}
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= RELATIVE, f"{worst}: {one.metrics[worst]} and {other.metrics[worst]}"
    return Difference(sum(map(len, one.tokens)), len(differences), differences[worst], worst)


def _measure(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), NEAR_ZERO)


def _is_compared(name: str) -> bool:
    return not name.startswith(NOT_COMPARED)


def _run(config: Config) -> None:
    plan = build_plan(config) if config.run.executor == "ray" else None
    run_module.run_training(config, RunDirectory(Path(config.run.output_dir)), plan=plan, search_path=[HERE])


def build_plan(config: Config) -> MappingPlan:
    """Returns the plan of two data-parallel ranks for every model, fused; a process for every other role."""
    roles = [config.recipe.role(name) for name in plan_dataflow(config).roles]
    pools = {"models": 2} | {role.name: 1 for role in roles if not role.has_model}
    models: dict[str, dict[str, Any]] = {}
    for role in roles:
        generates = hasattr(role.load_worker(), "generate_sequences")
        models[role.name] = {
            "pool": "models" if role.has_model else role.name,
            "backend": config.training.backend if role.has_model else "function",
            "train": {"pp_size": 1, "tp_size": 1, "dp_size": 2, "cp_size": 1, "ep_size": 1} if role.has_model else None,
            "generation": {"gen_pp_size": 1, "gen_tp_size": 1} if generates else None,
            "offload": False,
            "micro_batch_tokens": config.training.micro_batch_tokens,
        }
    body = {
        "schema_version": 1,
        "pools": [{"name": name, "machines": [{"gpu_kind": "cpu", "slots": slots}]} for name, slots in pools.items()],
        "models": models,
        "estimates": {},
    }
    return MappingPlan.from_json(json.dumps(body))


@contextmanager
def _recorded() -> Iterator[list[list[list[int]]]]:
    """In the block, runs leave the responses of their iterations in the list."""
    found: list[list[list[int]]] = []
    build = run_module.build_roles

    def build_recorded(*args: Any, **kwargs: Any) -> Any:
        roles = build(*args, **kwargs)
        group = roles.having("generate_sequences")
        generate = group.generate_sequences

        def record(batch: Any, sampling: Any) -> Any:
            future = generate(batch, sampling)
            if sampling.step:
                found.append([row.tolist() for row in future.result()["response_ids"].unbind()])
            return future

        group.generate_sequences = record
        return roles

    with mock.patch.object(run_module, "build_roles", build_recorded):
        yield found


def main(names: Sequence[str]) -> int:
    """Compares the algorithms of these names, all by default; then the page is written."""
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "integration-tests"))
    from shared_cluster import shared_cluster

    lines, failed = [], []
    with tempfile.TemporaryDirectory() as folder, shared_cluster() as address:
        data = Path(folder) / "data"
        data.mkdir()
        write_addition_data(data, seed=0)
        teacher = make_teacher(Path(folder), data)
        for name in names or RECIPES:
            one = build_body(name, data, Path(folder) / f"{name}-1", teacher=teacher, on_ray=False)
            two = build_body(name, data, Path(folder) / f"{name}-2", teacher=teacher, on_ray=True, address=address)
            try:
                found = compare(run_once(one), run_once(two))
            except AssertionError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            lines.append(
                f"| `{name}` | {found.num_responses} | {found.num_metrics} | {found.largest:.0e} | `{found.metric}` |"
            )
            print(lines[-1])
    if not names and not failed:
        _write_page(lines)
    print(f"{len(lines)} algorithms agree, {len(failed)} do not: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def make_teacher(folder: Path, data: Path) -> Path:
    """Returns the directory of a larger model with the tokenizer of the others."""
    body = build_body("grpo", data, folder / "teacher", teacher=None, on_ray=False)
    body["run"] |= {"seed": 7}
    body["model"] |= {"hidden_size": 48, "num_heads": 2}
    _run(parse_config(body))
    return folder / "teacher" / "initial_model"


def _write_page(lines: Sequence[str]) -> None:
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    table = "\n".join(
        [
            f"Measured on {date}, torch {torch.__version__}, one rank in process against two ranks on Ray.",
            "",
            "| algorithm | responses | metrics | largest relative difference | of the metric |",
            "|---|---|---|---|---|",
            *lines,
        ]
    )
    before, found, rest = PAGE.read_text().partition(BEGIN)
    assert found and END in rest, f"{PAGE} has lost its comments"
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
