"""Learning curves of the algorithms, from one cached warm start per task: `make bench-learning`.

Seven algorithms and the control, three seeds each. A run is named by algorithm, seed, and a digest of its whole
configuration and of the code of algorithms. Its result is kept in `.cache/learning/runs/NAME/result.json`; a run
that has one is not run again, so an interrupted benchmark goes on where it stopped. No run starts after `--minutes`.

`--write` puts the table and the curves of all finished runs into the documentation, once every run is there.
`--only NAME --seeds 0 --iterations 5` is a smoke: its results have names of their own and reach no page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from learning_curves import draw_curves
from learning_tasks import COST_LIMIT, build_addition, build_constrained_text, write_small_addition
from measurement import record, write_table

from hf_algorithms.config import format_toml, parse_config

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "learning"
PAGE = ROOT / "docs" / "reference" / "learning-curves.md"
ASSETS = ROOT / "docs" / "assets"
SEEDS = (0, 1, 2)
BUDGET_MINUTES = 90.0
WANTED_GAIN = 0.2
WANTED_DISTANCE = 0.05
LARGEST_CONTROL_GAIN = 0.05
RUN_TIMEOUT_S = 1200.0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An algorithm on a task."""

    name: str
    algorithm: Mapping[str, Any]
    iterations: int
    is_constrained: bool = False
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys that differ from the task's, by section."""

    def configure(self, seed: int, iterations: int | None = None) -> dict[str, Any]:
        """Returns the configuration without `run.output_dir`, as a TOML file would hold it."""
        build = build_constrained_text if self.is_constrained else build_addition
        body = build(CACHE / "data", self.algorithm, seed=seed, iterations=iterations or self.iterations)
        for section, keys in self.changes.items():
            body[section] = {**body.get(section, {}), **keys}
        return body


def _addition(name: str, algorithm: str | None = None, **changes: Mapping[str, Any]) -> Experiment:
    body = {"name": algorithm or name, "kl_coefficient": 0.0}
    return Experiment(name=name, algorithm=body, iterations=200, changes=changes)


EXPERIMENTS = (
    *(_addition(name) for name in ("ppo", "grpo", "rloo", "remax", "reinforce_pp", "dapo")),
    _addition("grpo_shuffled", "grpo", reward={"function": "learning_tasks:shuffled_exact_match"}),
    Experiment(
        name="safe_rlhf",
        algorithm={"name": "safe_rlhf", "cost_limit": COST_LIMIT, "lambda_learning_rate": 0.5},
        iterations=150,
        is_constrained=True,
    ),
)


def main() -> int:
    """Run what is not there yet; 1 if a finished run misses its mark or one is missing."""
    options = _parse_options()
    chosen = [each for each in EXPERIMENTS if not options.only or each.name in options.only]
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (CACHE / "data").exists():
        write_small_addition(CACHE / "data")
    started_s = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {}
    is_complete = True
    for seed in options.seeds:  # all algorithms have their first seed before one has its second
        for experiment in chosen:
            is_late = time.monotonic() - started_s > 60 * options.minutes
            result = _run_once(experiment, seed, options.iterations, starts=not is_late)
            if result is None:
                is_complete = False
                continue
            results.setdefault(experiment.name, []).append(result)
            print(f"{experiment.name} seed {seed}: {_describe(experiment, result)}", flush=True)
    missed = []
    if options.iterations is None:  # a smoke learns nothing
        missed = [
            each.name for each in chosen if not all(_reaches_mark(each, one) for one in results.get(each.name, []))
        ]
    if not is_complete:
        print(f"{options.minutes:g} minutes are over. Run it again: it goes on with the runs that are missing")
    elif options.write:
        _write(results)
    for name in missed:
        print(f"{name} misses its mark", file=sys.stderr)
    return int(bool(missed) or not is_complete)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [each.name for each in EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=names, help="algorithms")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--iterations", type=int, help="in place of each algorithm's own")
    parser.add_argument("--minutes", type=float, default=BUDGET_MINUTES, help="no run starts later")
    parser.add_argument("--write", action="store_true", help="into the documentation")
    options = parser.parse_args()
    is_whole = not options.only and options.iterations is None and options.seeds == list(SEEDS)
    if options.write and not is_whole:
        parser.error("--write is for all algorithms, seeds and iterations: leave the other options out")
    return options


def _digest(body: Mapping[str, Any], sources: Iterable[Path] = ()) -> str:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    text = json.dumps([body, versions, [path.read_text() for path in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _find_sources() -> list[Path]:
    """Files of which a run's result depends most: a result of other code is not this code's."""
    package = ROOT / "packages" / "hf-algorithms" / "src" / "hf_algorithms"
    parts = ("advantages", "losses", "recipes", "workers")
    found = [path for part in parts for path in sorted((package / part).glob("*.py"))]
    return [*found, ROOT / "benchmarks" / "learning_tasks.py"]


def _run_once(experiment: Experiment, seed: int, iterations: int | None, *, starts: bool) -> dict[str, Any] | None:
    """The result of a run: the kept one, or that of a new run; None if there is none and none may start."""
    body = experiment.configure(seed, iterations)
    folder = CACHE / "runs" / f"{experiment.name}-{seed}-{_digest(body, _find_sources())}"
    kept = folder / "result.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    if not starts:
        return None
    warm = _warm_model(experiment)
    started_s = time.perf_counter()
    body |= {"model": {"path": str(warm)}, "warm_start": {"max_steps": 0}}
    output = _train(body, folder)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    result = {
        "before": summary["score_before"],
        "after": summary["score_after"],
        "wall_s": time.perf_counter() - started_s,
        "curves": {name: _collect(rows, name) for name in _curves(experiment)},
    }
    partial = folder / "result.json.part"
    partial.write_text(json.dumps(result))
    partial.rename(kept)
    shutil.rmtree(output)
    return result


def _warm_model(experiment: Experiment) -> Path:
    """The model from which all runs of a task start, made once for each digest of what it depends on."""
    body = experiment.configure(seed=0, iterations=1)
    needed = {name: body[name] for name in ("data", "model", "warm_start", "run")}
    folder = CACHE / f"warm-{_digest(needed)}"
    if not (folder / "warm_model").exists():
        algorithm = {"name": "ppo"}
        body = {name: value for name, value in body.items() if name != "cost"} | {"algorithm": algorithm}
        output = _train(body, folder)
        (output / "warm_model").rename(folder / "warm_model")
        shutil.rmtree(output)
    return folder / "warm_model"


def _train(body: dict[str, Any], folder: Path) -> Path:
    """Runs `hybridflow train` in a process of its own; returns the run's directory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = folder / "run"
    config = parse_config({**body, "run": {**body["run"], "output_dir": str(output)}}, search_path=[str(ROOT)])
    (folder / "config.toml").write_text(format_toml(config))
    command = [str(Path(sys.executable).parent / "hybridflow"), "train", str(folder / "config.toml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False,
            timeout=RUN_TIMEOUT_S,
        )  # fmt: skip
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}\n{(folder / 'log').read_text()[-4000:]}")
    return output


def _curves(experiment: Experiment) -> tuple[str, ...]:
    if experiment.is_constrained:
        return ("constraint/cost", "constraint/lambda", "constraint/infeasible", "reward/mean")
    return ("eval/validation/exact_match", "reward/mean")


def _collect(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(row["iteration"], row[metric]) for row in rows if metric in row]


def _final(result: Mapping[str, Any], metric: str) -> float:
    """Mean over the last quarter of a curve."""
    values = [value for _, value in result["curves"][metric]]
    last = values[-max(len(values) // 4, 1) :]
    return sum(last) / len(last)


def _reaches_mark(experiment: Experiment, result: Mapping[str, Any]) -> bool:
    if experiment.is_constrained:
        return abs(_final(result, "constraint/cost") - COST_LIMIT) <= WANTED_DISTANCE
    gain = result["after"] - result["before"]
    return gain <= LARGEST_CONTROL_GAIN if experiment.name.endswith("_shuffled") else gain >= WANTED_GAIN


def _describe(experiment: Experiment, result: Mapping[str, Any]) -> str:
    if experiment.is_constrained:
        cost, multiplier = (_final(result, f"constraint/{name}") for name in ("cost", "lambda"))
        return f"cost {cost:.3f} at a limit of {COST_LIMIT}, lambda {multiplier:.2f}, {result['wall_s']:.0f} s"
    return f"exact match {result['before']:.1%} -> {result['after']:.1%}, {result['wall_s']:.0f} s"


def _rows(results: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| algorithm | task | seeds | before | after: mean, least and most | seconds a run |"
    yield "| --- | --- | --: | --: | --: | --: |"
    for experiment in EXPERIMENTS:
        found = results[experiment.name]
        seconds = sum(result["wall_s"] for result in found) / len(found)
        if experiment.is_constrained:
            task, before = f"constrained text, limit {COST_LIMIT}", "-"
            after = [_final(result, "constraint/cost") for result in found]
        else:
            task, before = "addition", f"{found[0]['before']:.3f}"
            after = [result["after"] for result in found]
        spread = f"{sum(after) / len(after):.3f}, {min(after):.3f} to {max(after):.3f}"
        yield f"| `{experiment.name}` | {task} | {len(found)} | {before} | {spread} | {seconds:.0f} |"


def _write(results: Mapping[str, list[dict[str, Any]]]) -> None:
    """The dated result, the page's table and its two pictures."""
    metrics: dict[str, tuple[float, str]] = {}
    for experiment in EXPERIMENTS:
        for seed, result in zip(SEEDS, results[experiment.name], strict=True):
            value = _final(result, "constraint/cost") if experiment.is_constrained else result["after"]
            unit = "cost" if experiment.is_constrained else "exact match"
            metrics[f"{experiment.name}_seed_{seed}"] = (round(value, 4), unit)
    record("learning", metrics)
    write_table(PAGE, "learning_curves", "\n".join(_rows(results)) + "\n\n" + _PICTURES)
    accuracy = "eval/validation/exact_match"
    addition = {
        experiment.name: [result["curves"][accuracy] for result in results[experiment.name]]
        for experiment in EXPERIMENTS
        if not experiment.is_constrained
    }
    (ASSETS / "learning-addition.svg").write_text(draw_curves({"exact match": addition}))
    panels = {
        title: {"safe_rlhf": [result["curves"][name] for result in results["safe_rlhf"]]}
        for title, name in {"mean cost": "constraint/cost", "lambda": "constraint/lambda"}.items()
    }
    (ASSETS / "learning-constrained.svg").write_text(draw_curves(panels))


_PICTURES = (
    "![Exact match on the validation rows over the iterations, by algorithm](../assets/learning-addition.svg)\n\n"
    "![Mean cost and multiplier over the iterations of Safe-RLHF](../assets/learning-constrained.svg)"
)


if __name__ == "__main__":
    sys.exit(main())
