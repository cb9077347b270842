"""Learning curves of the algorithms, from one cached warm start per task: `make bench-learning`.

Seven algorithms and the control, and pairs of algorithms on tasks that separate them, three seeds each. A run is named
by experiment, seed, and a digest of its whole configuration and of the code of algorithms. Its result is kept in
`.cache/learning/runs/NAME/result.json`; a run that has one is not run again, so an interrupted benchmark goes on where
it stopped. No run starts after `--minutes`.

`--write` puts the tables and the curves of all finished runs into the documentation, once every run is there;
`--write-finished` does so with the runs that are there.
`--only NAME --seeds 0 --iterations 5` is a smoke: its results have names of their own and reach no page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from completion_task import write_completion
from learning_experiments import EXPERIMENTS, SEPARATIONS, Experiment
from learning_page import write_page
from learning_tasks import write_small_addition
from separating_tasks import write_task_data

from hf_algorithms.config import Config, format_toml, parse_config
from hf_algorithms.run.loop import run_training
from hf_algorithms.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
CACHE = ROOT / ".cache" / "learning"
SEEDS = (0, 1, 2)
BUDGET_MINUTES = 90.0
RUN_TIMEOUT_S = 60 * BUDGET_MINUTES
"""Of a run, by the clock: it ends a hang, and leaves room for a machine that does other work as well."""
_MODULES = {
    "addition": ("learning_tasks",),
    "completion": ("learning_tasks", "completion_task"),
    "constrained": ("learning_tasks", "constrained_text"),
}
"""Modules of a task's rows, rewards and settings; other tasks share theirs."""
_ROWS = {"addition": "data", "constrained": "data", "completion": "completion-data"}
"""Folders of a task's rows; other tasks share theirs."""
ALL = (*EXPERIMENTS, *(each for separation in SEPARATIONS for each in separation.experiments))


def main() -> int:
    """Run what is not there yet; 1 if a finished run misses its mark or one is missing."""
    options = _parse_options()
    chosen = [each for each in ALL if not options.only or each.name in options.only]
    _write_data()
    _load_libraries()
    started_s = time.monotonic()
    results: dict[str, dict[int, dict[str, Any]]] = {each.name: {} for each in chosen}
    is_complete = True
    for seed in options.seeds:  # all experiments have their first seed before one has its second
        for experiment in chosen:
            is_late = time.monotonic() - started_s > 60 * options.minutes
            result = _run_once(experiment, seed, options.iterations, starts=not is_late)
            if result is None:
                is_complete = False
                continue
            results[experiment.name][seed] = result
            print(f"{experiment.name} seed {seed}: there", flush=True)
    if options.iterations is not None:  # a smoke learns nothing
        return 0
    if not is_complete:
        print(f"{options.minutes:g} minutes are over. Run it again: it goes on with the runs that are missing")
    if options.write_finished or (options.write and is_complete):
        write_page(results)
    missed = _find_missed(results)
    for name in missed:
        print(f"{name} misses its mark", file=sys.stderr)
    return int(bool(missed) or not is_complete)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[each.name for each in ALL], help="experiments")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--iterations", type=int, help="in place of each experiment's own")
    parser.add_argument("--minutes", type=float, default=BUDGET_MINUTES, help="no run starts later")
    parser.add_argument("--write", action="store_true", help="into the documentation, once all runs are there")
    parser.add_argument("--write-finished", action="store_true", help="the same with the runs that are there")
    options = parser.parse_args()
    is_whole = not options.only and options.iterations is None and options.seeds == list(SEEDS)
    if (options.write or options.write_finished) and not is_whole:
        parser.error("--write is for all experiments, seeds and iterations. Leave the other options out")
    return options


def _find_missed(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """The names of experiments of which a finished seed misses its mark, and of tasks whose finished seeds do."""
    missed = [
        each.name for each in EXPERIMENTS if not all(each.judge(one)[1] for one in results.get(each.name, {}).values())
    ]
    found = {each.task: each.judge([results.get(one.name, {}) for one in each.experiments]) for each in SEPARATIONS}
    missed += [task for task, passes in found.items() if passes is False]
    return missed


def _write_data() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (CACHE / "data").exists():
        write_small_addition(CACHE / "data")
    write_task_data(CACHE / "task-data")
    write_completion(CACHE / "completion-data")


def _load_libraries() -> None:
    """Imports what runs need, ten seconds' worth, before the first is forked. One thread, as a fork ends threads."""
    for name in ("transformers.models.llama", "hf_engine.training.fsdp", "hf_engine.rollout.transformers"):
        import_module(name)
    import_module("torch").set_num_threads(1)


def _configure(experiment: Experiment, seed: int, iterations: int | None = None) -> dict[str, Any]:
    rows = _ROWS.get(experiment.task, "task-data")
    return experiment.configure(CACHE / rows, seed, iterations)


def _digest(body: Mapping[str, Any], sources: Iterable[Path] = ()) -> str:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    text = json.dumps([body, versions, [path.read_text() for path in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _find_sources(experiment: Experiment) -> list[Path]:
    """Files of which a run's result depends most: a result of other code is not this code's."""
    package = ROOT / "packages" / "hf-algorithms" / "src" / "hf_algorithms"
    parts = ("advantages", "losses", "recipes", "workers")
    found = [path for part in parts for path in sorted((package / part).glob("*.py"))]
    names = _MODULES.get(experiment.task, ("separating_recipes", "separating_tasks"))
    return [*found, *(BENCHMARKS / f"{name}.py" for name in names)]


def _run_once(experiment: Experiment, seed: int, iterations: int | None, *, starts: bool) -> dict[str, Any] | None:
    """The result of a run: the kept one, or that of a new run; None if there is none and none may start."""
    body = _configure(experiment, seed, iterations)
    folder = CACHE / "runs" / f"{experiment.name}-{seed}-{_digest(body, _find_sources(experiment))}"
    kept = folder / "result.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    if not starts:
        return None
    warm = _warm_model(experiment)
    started_s = _used_s()
    body |= {"model": {"path": str(warm)}, "warm_start": {"max_steps": 0}}
    output = _train(body, folder)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    result = {
        "before": summary["score_before"],
        "after": summary["score_after"],
        "cpu_s": _used_s() - started_s,
        "curves": {name: _collect(rows, name) for name in experiment.curves},
    }
    partial = folder / "result.json.part"
    partial.write_text(json.dumps(result))
    partial.rename(kept)
    shutil.rmtree(output)
    return result


def _warm_model(experiment: Experiment) -> Path:
    """The model from which all runs of a task start, made once for each digest of what it depends on."""
    body = _configure(experiment, seed=0, iterations=1)
    needed = {name: body[name] for name in ("data", "model", "warm_start", "run")}
    folder = CACHE / f"warm-{_digest(needed, [Path(body['data']['train'])])}"
    if not (folder / "warm_model").exists():
        algorithm = {"name": "ppo"}
        body = {name: value for name, value in body.items() if name != "cost"} | {"algorithm": algorithm}
        output = _train(body, folder)
        (output / "warm_model").rename(folder / "warm_model")
        shutil.rmtree(output)
    return folder / "warm_model"


def _train(body: dict[str, Any], folder: Path) -> Path:
    """Trains in a process of its own, forked after the imports; returns the run's directory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output, log = folder / "run", folder / "log"
    config = parse_config({**body, "run": {**body["run"], "output_dir": str(output)}}, search_path=[str(BENCHMARKS)])
    (folder / "config.toml").write_text(format_toml(config))
    process = multiprocessing.get_context("fork").Process(target=_train_here, args=(config, log))
    process.start()
    process.join(RUN_TIMEOUT_S)
    if process.exitcode is None:
        process.terminate()
        process.join()
    if process.exitcode:
        sys.exit(f"{folder.name}: the run ended with {process.exitcode}\n{log.read_text()[-4000:]}")
    return output


def _train_here(config: Config, log: Path) -> None:
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        directory = RunDirectory(Path(config.run.output_dir))
        directory.begin()
        run_training(config, directory, search_path=[str(BENCHMARKS)])


def _used_s() -> float:
    """Processor seconds of all runs that have ended: other programs on the machine do not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _collect(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(row["iteration"], row[metric]) for row in rows if metric in row]


if __name__ == "__main__":
    sys.exit(main())
