"""Runs that are struck by faults at random and resumed, until they end as a run that was not struck.

    python benchmarks/soak.py --kind in_process --keep    # `make soak` runs the three kinds
    python benchmarks/soak.py --kind ray --runs 1 --first 4
    .venv-vllm/bin/python benchmarks/soak.py --kind server

Runs are in process, on Ray, or in process with a vLLM server that generates. A fault has a kind (SIGKILL, SIGSTOP, disk
full), a victim (controller, trainer rank, server, reward process, raylet, GCS) and a phase of the run. Its run's number
and its place among the five faults of the run decide all three: every pair of kind and victim has its turn. After each
fault: the program has ended with one line that says why, no process and no shared memory is left, every commit has the
digests that it lists, and `--resume` goes on. A controller or a server that was stopped is continued, a server that was
killed is started again, and the run must go on. Where a program goes on to its end, the next fault strikes a new run.
At the end: metrics, ledger and weights are bit for bit those of the run without faults; with a server the metrics are
within its tolerance. Even numbers are runs of GRPO, odd ones of Safe-RLHF; the controllers of the first two of them are
killed at random, each five times.

`--keep` writes `results/soak_<kind>.json` and the tables of `docs/reference/recovery-contract.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from measurement import record, write_table
from soak_faults import DELAYS_S, LONGEST_DELAY_S, PHASES, Fault
from soak_programs import NOTE, Ended, run_program
from soak_server import TendedServer

from hf_algorithms.checkpoints import LEDGER, CheckpointError, count_ledger, find_commits
from hf_algorithms.checkpoints.commit import STEPS, read_commit
from hf_algorithms.data import load_rows, write_addition_data, write_rows
from hf_algorithms.run_directory import ORIGIN

__all__ = ["Soak", "Struck", "draw_fault"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "recovery-contract.md"
FAULTS_OF_A_RUN = 5
NUM_RUNS = {"in_process": 10, "ray": 7, "server": 2}
NUM_ITERATIONS = 12
MOST_VISITS = 2
ALGORITHMS = ("grpo", "safe_rlhf")
NUM_KILLED = {"in_process": 2, "ray": 2, "server": 0}
"""First runs, whose controllers are killed and nothing else."""
VICTIMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "in_process": {
        "SIGKILL": ("controller", "reward"),
        "SIGSTOP": ("controller", "reward"),
        "disk full": ("controller",),
    },
    "ray": {
        "SIGKILL": ("controller", "trainer", "reward", "raylet", "gcs"),
        "SIGSTOP": ("controller", "trainer", "reward", "raylet", "gcs"),
        "disk full": ("controller", "trainer"),
    },
    "server": {"SIGKILL": ("controller", "server"), "SIGSTOP": ("server",)},
}
TOLERANCE = {"rel_tol": 1e-3, "abs_tol": 2e-4}
"""Largest differences of metrics whose samples come from an engine, which rounds as it batches."""
REWARDS = '''"""Reward and cost of the soak, which need no model."""


def even_digits(prompts, responses, answers):
    return [sum(each in "02468" for each in response) / 5 for response in responses]


def length(prompts, responses, answers):
    return [len(response) / 5 - 0.5 for response in responses]
'''
CONFIG = """
[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"
test = "{data}/test.jsonl"
max_eval_rows = 8
[model]
tokenizer = "characters"
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 1
max_positions = 16
[warm_start]
max_steps = 2
batch_size = 16
eval_every = 2
[optimizer]
actor_learning_rate = 1e-4
critic_learning_rate = 1e-3
[rollout]
batch_size = 8
samples_per_prompt = 2
max_new_tokens = 5
[training]
shard = "root"
[reward]
function = "soak_rewards.py:even_digits"
[run]
eval_every = 10
checkpoint_every = 1
max_restarts = 0
[cluster]
call_timeout_s = {call_timeout_s}
[deadlines]
start_s = 600
"""
TITLES = {
    "in_process": '`run.executor = "in_process"`',
    "ray": '`run.executor = "ray"`',
    "server": '`rollout.backend = "server"`, of vLLM',
}
OF_SAFE_RLHF = ("cost.function=soak_rewards.py:length",)
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Struck:
    """The end of a program that was struck by a fault.

    Attributes:
        run: number of the run.
        runs: kind of the run, a key of `VICTIMS`.
        fault: that struck it.
        ended: the program.
        seconds: from the fault to the program's end.
        problems: sentences about what must not be.
    """

    run: int
    runs: str
    fault: Fault
    ended: Ended
    seconds: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        how = f"{self.fault.kind} of {self.fault.victim} in {self.fault.phase}"
        return f"{self.runs} run {self.run}: {how}: exit {self.ended.code} after {self.seconds} s: {self.reason}"

    @property
    def reason(self) -> str:
        """The program's error, or how it ended."""
        errors = _list_errors(self.ended)
        return errors[0][:200] if errors else ("went on" if self.ended.code == 0 else "was killed")


def draw_fault(kind: str, run: int, place: int) -> Fault:
    """Returns the fault that comes `place`-th in a run of a kind; the same one each time."""
    rng = random.Random(f"{kind}:{run}:{place}")
    pairs = [("SIGKILL", "controller")]
    turn = FAULTS_OF_A_RUN * (run - NUM_KILLED[kind]) + place
    if turn >= 0:
        pairs = [(fault, victim) for fault, victims in VICTIMS[kind].items() for victim in victims]
        random.Random(f"{kind}:{turn // len(pairs)}").shuffle(pairs)
    fault, victim = pairs[turn % len(pairs)]
    phase = rng.choice(list(PHASES))
    return Fault(
        kind=fault,
        victim=victim,
        phase=phase,
        count=rng.randint(1, MOST_VISITS),
        delay_s=rng.choice([0.0, rng.uniform(0.0, DELAYS_S.get(phase, LONGEST_DELAY_S))]),
    )


class Soak:
    """Runs of one kind.

    Args:
        folder: an empty one, for all that they need and leave.
        kind: key of `VICTIMS`.
        num_iterations: of each run.
    """

    def __init__(self, folder: Path, kind: str, *, num_iterations: int = NUM_ITERATIONS) -> None:
        self._folder = folder
        self._kind = kind
        self._num_iterations = num_iterations
        self._whole: dict[str, Path] = {}
        self._server: TendedServer | None = None
        files = write_addition_data(folder / "data", seed=0)
        write_rows(files.train, load_rows(files.train)[:128])
        text = CONFIG.format(data=folder / "data", call_timeout_s=CALL_TIMEOUT_S)
        (folder / "config.toml").write_text(text)
        (folder / "soak_rewards.py").write_text(REWARDS)

    def __enter__(self) -> Soak:
        if self._kind == "server":
            self._server = TendedServer(self._folder).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.__exit__(kind, error, trace)

    def strike_run(self, number: int, faults: Sequence[Fault]) -> Iterator[Struck | str]:
        """Strikes a run with faults, one after another, and lets it end; one that goes on to its end is begun again.

        Yields:
            What became of each program that a fault struck, and a sentence for all else that must not be.
        """
        algorithm = ALGORITHMS[number % len(ALGORITHMS)]
        if algorithm not in self._whole:
            whole = self._folder / f"whole_{algorithm}"
            ended = self._run(self._start(whole, algorithm), None)
            if ended.code or ended.problems:
                yield f"a run of {algorithm} without faults ended with {ended.code}: {ended.problems} {ended.lines}"
                return
            self._whole[algorithm] = whole
        run = self._folder / f"run_{number}"
        start = self._start(run, algorithm)
        for fault in faults:
            struck = self._strike(_go_on(run, start), run, fault, number)
            if struck is None:
                yield f"{self._kind} run {number} ended before {fault}"
                break
            yield struck
            if struck.ended.code == 0:
                yield from self._end(number, run, algorithm)
        if run.exists():
            ended = self._run(_go_on(run, start), None)
            if ended.code or ended.problems:
                yield f"{self._kind} run {number} ended with {ended.code}: {ended.problems} {ended.lines}"
            else:
                yield from self._end(number, run, algorithm)

    def _end(self, number: int, run: Path, algorithm: str) -> Iterator[str]:
        """Compares a run with that without faults, and removes it."""
        tolerance = TOLERANCE if self._kind == "server" else None
        yield from (f"{self._kind} run {number}: {each}" for each in _compare(run, self._whole[algorithm], tolerance))
        shutil.rmtree(run)

    def _start(self, run: Path, algorithm: str) -> list[str]:
        """Arguments that start a run."""
        keys = [f"run.output_dir={run}", f"run.iterations={self._num_iterations}",
                f"run.executor={'ray' if self._kind == 'ray' else 'in_process'}",
                f"algorithm.name={algorithm}", f"cluster.gpus_per_machine={2 if self._kind == 'ray' else 1}",
                *(OF_SAFE_RLHF if algorithm == "safe_rlhf" else ()),
                *(self._server.keys if self._server is not None else ())]  # fmt: skip
        return ["train", "config.toml", *(word for key in keys for word in ("--set", key))]

    def _run(self, arguments: Sequence[str], fault: Fault | None) -> Ended:
        if self._server is None:
            return run_program(arguments, self._folder, fault)
        return run_program(arguments, self._folder, fault, self._server.tend)

    def _strike(self, arguments: Sequence[str], run: Path, fault: Fault, number: int) -> Struck | None:
        """Runs a program that a fault strikes, and judges what it left; None where it ended before the fault."""
        ended = self._run(arguments, fault)
        note = self._folder / NOTE
        if not note.exists():
            return None
        return Struck(
            run=number,
            runs=self._kind,
            fault=fault,
            ended=ended,
            seconds=round(ended.at_s - json.loads(note.read_text())["at_s"], 1),
            problems=(*ended.problems, *_judge(ended, fault), *_check_commits(run)),
        )


def _go_on(run: Path, start: Sequence[str]) -> Sequence[str]:
    """Arguments that resume a run, or those that start one that has not begun."""
    has_begun = (run / ORIGIN).exists() and (run / ORIGIN).stat().st_size > 0
    return ["train", "--resume", str(run)] if has_begun else [*start, "--overwrite"]


def _list_errors(ended: Ended) -> list[str]:
    return [line.removeprefix("Error: ").strip() for line in ended.lines if line.startswith("Error: ")]


def _judge(ended: Ended, fault: Fault) -> Iterator[str]:
    """Yields a sentence for all that is wrong with how a program ended."""
    if any("Traceback" in line for line in ended.lines):
        yield f"a traceback: {ended.lines}"
    if fault.victim == "controller" and fault.kind == "SIGKILL":
        if ended.code != -signal.SIGKILL:
            yield f"exit code {ended.code} of a killed program"
    elif fault.victim == "server" or (fault.victim, fault.kind) == ("controller", "SIGSTOP"):
        if ended.code:
            yield f"exit code {ended.code} of a program that had to go on: {ended.lines}"
    elif ended.code not in (0, 1):
        yield f"exit code {ended.code}: {ended.lines}"
    elif ended.code == 1 and len(_list_errors(ended)) != 1:
        yield f"{len(_list_errors(ended))} lines of error: {ended.lines}"


def _check_commits(run: Path) -> Iterator[str]:
    """Yields a sentence for each commit that lists a file which is not as it was written."""
    for iteration in find_commits(run):
        try:
            read_commit(run / STEPS / str(iteration)).verify()
        except CheckpointError as error:
            yield f"commit {iteration}: {error}"


def _read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, less those that differ between equal runs."""
    measured = ("time/", "perf/", "memory/", "checkpoint/")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(measured)} for row in rows]


def _compare(run: Path, whole: Path, tolerance: Mapping[str, float] | None) -> Iterator[str]:
    """Yields a sentence for each file of a run that differs from that of the run without faults."""
    metrics, wanted = _read_metrics(run), _read_metrics(whole)
    if tolerance is None:
        if metrics != wanted:
            yield "other metrics than without faults"
        weights = [(each / "model" / "model.safetensors").read_bytes() for each in (run, whole)]
        if weights[0] != weights[1]:
            yield "other weights than without faults"
    else:
        yield from _compare_metrics(metrics, wanted, tolerance)
    if (run / LEDGER).read_text() != (whole / LEDGER).read_text():
        yield "another ledger than without faults"
    if count_ledger(run / LEDGER) != json.loads((run / "summary.json").read_text())["ledger"]:
        yield "the ledger is not what summary.json says"


def _compare_metrics(
    rows: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]], tolerance: Mapping[str, float]
) -> Iterator[str]:
    """Yields a sentence for each metric that is not within a tolerance."""
    if [row.keys() for row in rows] != [row.keys() for row in wanted]:
        yield "metrics of other names than without faults"
        return
    for row, other in zip(rows, wanted, strict=True):
        for name, value in row.items():
            is_number = isinstance(value, int | float)
            if not (math.isclose(value, other[name], **tolerance) if is_number else value == other[name]):
                yield f"{name} is {value}, not {other[name]}, in {row.get('iteration')}"


def measure(found: Sequence[Struck]) -> dict[str, tuple[float, str]]:
    """Returns the seconds from each fault to the program's end."""
    metrics: dict[str, tuple[float, str]] = {}
    for number, each in enumerate(found):
        parts = (str(each.run), str(number), each.fault.kind, each.fault.victim, each.fault.phase)
        name = "_".join(parts).replace(" ", "_").replace(",", "")
        metrics[name] = (each.seconds, "s to the end" if each.ended.code else "s to the end, went on")
    return metrics


def render(found: Sequence[Struck], kind: str) -> str:
    """Returns the table of the page."""
    rows = ["| fault | of | times | seconds to the end: median, most | went on |", "|---|---|--:|--:|--:|"]
    for fault, victims in VICTIMS[kind].items():
        for victim in victims:
            hits = [each for each in found if (each.fault.kind, each.fault.victim) == (fault, victim)]
            times = [each.seconds for each in hits if each.ended.code]
            shown = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else ""
            rows.append(f"| {fault} | {victim} | {len(hits)} | {shown} | {sum(not each.ended.code for each in hits)} |")
    phases = "; ".join(f"{phase}: {sum(each.fault.phase == phase for each in found)}" for phase in PHASES)
    title = f"{TITLES[kind]}: {len(found)} faults, after which all runs ended as without them"
    return f"{title}. Faults by phase: {phases}.\n\n" + "\n".join(rows)


def main() -> int:
    """Soak; 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(VICTIMS), required=True, help="of the runs")
    parser.add_argument("--runs", type=int, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--keep", action="store_true", help="the result and the table of the page")
    given = parser.parse_args()
    numbers = range(given.first, given.first + (given.runs or NUM_RUNS[given.kind]))
    return int(not soak(given.kind, numbers, keeps=given.keep))


def soak(kind: str, numbers: Sequence[int], *, keeps: bool) -> bool:
    """Strikes the runs of a kind, and keeps the result where that is asked; returns True if all was as it must."""
    found: list[Struck] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Soak(Path(folder), kind) as runs:
        for number in numbers:
            faults = [draw_fault(kind, number, place) for place in range(FAULTS_OF_A_RUN)]
            for each in runs.strike_run(number, faults):
                print(each, flush=True)
                if isinstance(each, Struck):
                    found.append(each)
                    problems += [f"{each}: {problem}" for problem in each.problems]
                else:
                    problems.append(each)
    for problem in problems:
        print(problem, file=sys.stderr)
    used_s = sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{len(found)} faults, {len(problems) or 'no'} problems, {used_s:.0f} s of CPU time")
    if keeps and not problems:
        record(f"soak_{kind}", measure(found))
        write_table(PAGE, f"soak {kind}", render(found, kind))
    return not problems


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
