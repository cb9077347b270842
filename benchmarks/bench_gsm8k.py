"""The five runs of the page "Train on GSM8K", three seeds each: `make bench-gsm8k`.

Each run is a command of the page on a file of `examples/gsm8k`, in a folder of its own for each seed. Its result is
kept in `.cache/gsm8k` under a digest of that file, of those before it and of the data; a run that has a result is not
run again, so an interrupted benchmark goes on where it stopped.

`--write` keeps `results/gsm8k.json` and puts the table into the page once every run is there; `--write-finished` does
so with the runs that are there. Exits with 1 where one is missing or GRPO gains too little in a seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gsm8k_page import MARK_POINTS, Results, gain_of, write_page

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "gsm8k"
EXAMPLES = ROOT / "examples" / "gsm8k"
SOURCE = ROOT.parent / "shared" / "data" / "gsm8k"
SEEDS = (0, 1, 2)
BUDGET_MINUTES = 90.0
DATA = {"steps": "gsm8k-steps", "problems": "gsm8k", "pairs": "gsm8k-preferences"}
"""Folder and command of each example set."""


@dataclass(frozen=True)
class PageCommand:
    """One command of the page: what it runs, on which rows, and after which stages."""

    name: str
    command: str
    data: str
    after: tuple[str, ...] = ()


STAGES = {
    stage.name: stage
    for stage in (
        PageCommand("steps_sft", "sft", "steps"),
        PageCommand("steps_grpo", "train", "steps", ("steps_sft",)),
        PageCommand("problems_sft", "sft", "problems"),
        PageCommand("reward", "reward-model", "pairs", ("problems_sft",)),
        PageCommand("ppo", "train", "problems", ("problems_sft", "reward")),
    )
}
"""In the order of the page: a stage comes after those whose models it reads."""


def main() -> int:
    """Run what is not there yet; 1 if a run is missing or a gain too small."""
    options = _parse_options()
    write_data(options.source)
    started_s = time.monotonic()
    results: Results = {name: {} for name in STAGES}
    for seed in SEEDS:
        for name in STAGES:
            is_late = time.monotonic() - started_s > 60 * options.minutes
            may_start = name in options.stages and seed in options.seeds and not is_late
            if found := run_stage(name, seed, starts=may_start):
                results[name][seed] = found
                print(f"{name} seed {seed}: {found['score_before']:.3f} -> {found['score_after']:.3f}", flush=True)
    missing = [f"{name} seed {seed}" for name in STAGES for seed in SEEDS if seed not in results[name]]
    if missing:
        print(f"missing: {', '.join(missing)}. Run it again: it goes on with them")
    if options.write_finished or (options.write and not missing):
        write_page(results)
    small = [seed for seed, found in results["steps_grpo"].items() if gain_of(found) < MARK_POINTS]
    for seed in small:
        print(f"steps_grpo seed {seed} gains less than {MARK_POINTS:g} points", file=sys.stderr)
    return int(bool(missing or small))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with train.jsonl and solutions.jsonl")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--minutes", type=float, default=BUDGET_MINUTES, help="no run starts later")
    parser.add_argument("--write", action="store_true", help="the result and the page, once all runs are there")
    parser.add_argument("--write-finished", action="store_true", help="the same with the runs that are there")
    return parser.parse_args()


def write_data(source: Path) -> None:
    """Writes the three example sets, each once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for folder, name in DATA.items():
        output = CACHE / "data" / folder
        if not (output / "test.jsonl").exists():
            _run(["data", name, "--source", str(source), "--output", str(output)], CACHE, CACHE / f"{folder}.log")


def run_stage(name: str, seed: int, *, starts: bool) -> dict[str, Any] | None:
    """The kept result of a stage, or that of a new run; None if there is none and none may start."""
    folder = CACHE / f"seed-{seed}"
    kept = folder / "results" / f"{name}-{digest_of(name, seed)}.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    if not starts or not all(run_stage(before, seed, starts=False) for before in STAGES[name].after):
        return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    (folder / "data").unlink(missing_ok=True)  # of a cache that has been moved since
    (folder / "data").symlink_to(CACHE / "data")
    words = [STAGES[name].command, str(EXAMPLES / f"{name}.toml"), "--overwrite", "--set", f"run.seed={seed}"]
    used_s = _run(words, folder, folder / f"{name}.log")
    result = read_result(folder / "runs" / name) | {"cpu_s": round(used_s, 1), "commit": _read_commit()}
    unfinished = kept.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(kept)
    return result


def digest_of(name: str, seed: int) -> str:
    """Names a run by what its result depends on: its file and those of stages before it, rows, versions, seed."""
    names = [*STAGES[name].after, name]
    rows = sorted({STAGES[each].data for each in names})
    texts = [(EXAMPLES / f"{each}.toml").read_text() for each in names]
    texts += [path.read_text() for each in rows for path in sorted((CACHE / "data" / each).glob("*.jsonl"))]
    texts += [metadata.version(library) for library in ("torch", "transformers")]
    return hashlib.sha256(json.dumps([texts, seed]).encode()).hexdigest()[:12]


def read_result(run: Path) -> dict[str, Any]:
    """Reads a finished run's figures for the table and the pictures."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wanted = ("score_before", "score_after", "interval_before", "interval_after", "kl_to_reference", "rows", "wall_s")
    names = sorted({name for row in rows for name in row if name.startswith("eval/") or name.endswith("/mean")})
    curves = {name: [(row["iteration"], row[name]) for row in rows if name in row] for name in names}
    return {name: summary[name] for name in wanted if name in summary} | {"curves": curves}


def _run(words: Sequence[str], folder: Path, log: Path) -> float:
    """Runs `hybridflow` as a user does, on one thread, so that two seeds fit two cores; returns processor seconds."""
    program = Path(sys.executable).with_name("hybridflow")
    environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before_s = _used_s()
    with log.open("w") as lines:
        ended = subprocess.run([program, *words], cwd=folder, env=environment, stdout=lines, stderr=lines, check=False)
    if ended.returncode:
        shutil.copy(log, log.with_suffix(".failed"))
        sys.exit(f"hybridflow {' '.join(words)} ended with {ended.returncode}\n{log.read_text()[-4000:]}")
    return _used_s() - before_s


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_commit() -> str:
    """The last commit that changed the packages, with `+` where their files differ from it."""
    sources = sorted(map(str, ROOT.glob("packages/*/src")))
    git = ["git", "-C", str(ROOT)]
    last = [*git, "log", "-1", "--format=%h", "--abbrev=12", "--", *sources]
    commit = subprocess.run(last, capture_output=True, text=True, check=True).stdout.strip()
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *sources], check=False).returncode
    return commit + "+" * bool(differs)


if __name__ == "__main__":
    sys.exit(main())
