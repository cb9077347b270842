"""GRPO and PPO from prompts to updated weights: this system against TRL, in turns in one run.

Both sides get the same weights, prompts, lengths, samples of each prompt, optimizer steps, dtype and reward, and our
conventions are set to the peer's. Before anything is timed both take one stored batch of completions and rewards: loss
and every gradient of that update have to agree, or the run is void. Timed runs then sample freely. Each side runs as
its users run it, `hf_algorithms.train` and `GRPOTrainer.train` or `PPOTrainer.train`, in a process that waits while
another is measured. The peer's environments, one for PPO, are made from the package registry. Each workload has a
result of its own.

    bench_end_to_end.py                               all workloads, three rounds
    bench_end_to_end.py --workloads tiny --rounds 1   one of them, quickly; writes no result
    bench_end_to_end.py --race                        the time to a held-out score alone
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conformance_trl
import conformance_trl_ppo
import psutil
from end_to_end_page import TARGETS, write_page
from end_to_end_workloads import GOAL, SEED, WORKLOADS, Workload, draw_prompts
from measured_program import MeasuredProgram
from measurement import record
from peer_environments import ROOT, make_environment

FOLDER = ROOT / ".cache" / "end-to-end"
PEERS = {
    "grpo": ("1.16.0", "end_to_end_trl.py", "trl", conformance_trl.INSTALLS),
    "ppo": ("1.12.0", "end_to_end_trl_ppo.py", "trl-ppo", conformance_trl_ppo.INSTALLS),
}
"""By algorithm: TRL's version, its program here, its environment and what is installed there."""
ITERATIONS = {"tiny": 100, "shared_prompts": 3, "long_answers": 8, "tiny_ppo": 60}
"""Of a round, which takes most systems five seconds or more: the processor's speed may change for a second or two. More
where the lengths that are drawn differ. The first round of a process is a warm-up."""
Programs = Mapping[str, tuple[Path, str]]
"""By side: an interpreter and what it runs."""
RACE_SEEDS = (1, 2, 3)
LARGEST_DIFFERENCE = 1e-4
LARGEST_EXCESS = 0.1
"""Of one system's mean length over another's, where lengths are drawn: 2.5 standard errors of three rounds."""
LEAST_NORM = 1e-3
"""Of every parameter's gradient in the stored update: a smaller one would prove nothing."""
COUNTED = {"tokens": "tokens a response", "padding": "share of an update's tokens"}
"""Unit of what sides count in an iteration apart from seconds."""


@dataclass(frozen=True)
class Arrangement:
    """One side in one arrangement of the cores."""

    side: str
    ranks: int
    threads: int

    @property
    def name(self) -> str:
        """In results and tables."""
        return f"{self.side}_{self.ranks}x{self.threads}"


SYSTEMS = (
    *(Arrangement(side, ranks, threads) for side in ("ours", "trl") for ranks, threads in ((1, 1), (1, 2), (2, 1))),
    *(Arrangement("bare", 1, threads) for threads in (1, 2)),
)


class _VoidRunError(Exception):
    """The sides did not do the same work: what was measured says nothing."""


class SideProcess:
    """A system's process, which waits between its segments of iterations."""

    def __init__(self, system: Arrangement, options: Mapping[str, Any], python: Path, program: str) -> None:
        threads, folder = str(system.threads), Path(options["folder"])
        given = {**options, "ranks": system.ranks, "threads": system.threads}
        path = Path(__file__).with_name(program)
        self._program = MeasuredProgram(
            lambda answers: [str(python), str(path), json.dumps(given | {"answers": answers})],
            folder / f"{system.name}.log",
            {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
            folder,
        )
        self.close = self._program.close

    def read(self) -> Any:
        """The next answer."""
        return json.loads(self._program.read())

    def go(self) -> Any:
        """Runs the next segment; returns the seconds of its iterations by phase."""
        return json.loads(self._program.ask())

    def measure_start(self) -> int:
        """Resident bytes of the process and of all that it started and that live; peaks are counted from here."""
        tree = self._tree()
        for each in tree:
            Path(f"/proc/{each.pid}/clear_refs").write_text("5")
        resident = sum(each.memory_info().rss for each in tree)
        peak = sum(_read_peak(each.pid) for each in tree)
        assert peak < 1.05 * resident, f"peaks of {peak} bytes were not cleared: {resident} are resident"
        return resident

    def measure(self) -> tuple[float, int]:
        """Processor seconds of these processes, and the sum of each one's most resident bytes."""
        tree = self._tree()
        times = [each.cpu_times() for each in tree]
        return sum(each.user + each.system for each in times), sum(_read_peak(each.pid) for each in tree)

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._program.pid)
        return [root, *root.children(recursive=True)]


def _read_peak(pid: int) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]  # an ended process lacks it
    return 1024 * sum(found)


def main() -> int:
    """Measure; 1 if a target is missed. Raises _VoidRunError, for which the program ends with 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=[each.name for each in SYSTEMS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="transformers", help="that generates on our side")
    parser.add_argument("--race", action="store_true", help="measure the time to a held-out score alone")
    options = parser.parse_args()
    if options.race:
        return _race(options)
    systems = [each for each in SYSTEMS if not options.systems or each.name in options.systems]
    missed = []
    for name in options.workloads:
        given = _prepare(name, options)
        version, program, environment, installs = PEERS[WORKLOADS[name].algorithm]
        programs = {
            "ours": (Path(sys.executable), "end_to_end_ours.py"),
            "trl": (make_environment(environment, installs), program),
            "bare": (Path(sys.executable), "end_to_end_bare.py"),
        }
        # The plain loop does not follow rows that end.
        measured = [each for each in systems if each.side != "bare" or not WORKLOADS[name].is_ragged]
        if not measured:
            print(f"{name}: no system that was asked for runs it")
            continue
        found = _compare_updates(given, programs) | _measure(name, given, measured, programs)
        ratio = found.get("speed_up", (0.0, ""))[0]
        print(f"{name}: {ratio:.2f} times the peer's best, target {TARGETS[name]}", flush=True)
        if ratio < TARGETS[name]:
            missed.append(name)
        if not options.systems and options.rounds >= 3:
            engine = "" if options.backend == "transformers" else f"_{options.backend}"
            record(f"end_to_end_{name}{engine}", found, versions={"trl": version})
            write_page()
    return int(bool(missed))


def _prepare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Writes the model, its tokenizer and the stored batch; returns the settings that every process reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_algorithms.data import build_character_tokenizer, select_rows

    workload, folder = WORKLOADS[name], FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_character_tokenizer("0123456789", folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=workload.num_heads,
        max_position_embeddings=workload.max_positions,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if workload.end_logit is not None:
        _set_end(model, tokenizer.eos_token_id, workload.end_logit)
    model.save_pretrained(folder / "model")
    _write_batch(workload, folder / "batch.json")
    num_prompts, segments = workload.num_prompts * 64, [2, *[ITERATIONS[name]] * options.rounds]
    order = [select_rows(num_prompts, workload.num_prompts, iteration=each, seed=SEED) for each in range(sum(segments))]
    (folder / "order.json").write_text(json.dumps(order))
    return {
        "workload": name,
        "folder": str(folder),
        "model": str(folder / "model"),
        "batch": str(folder / "batch.json"),
        "backend": options.backend,
        "num_prompts": num_prompts,
        "order": str(folder / "order.json"),
        "segments": segments,
        "gate": False,
    }


def _set_end(model: Any, token: int, mean_logit: float) -> None:
    """Gives a token this mean logit over random texts: its row of the head lies along their mean hidden state."""
    import torch

    texts = torch.randint(3, model.config.vocab_size, (16, model.config.max_position_embeddings))
    with torch.no_grad():
        mean = model.model(texts).last_hidden_state.mean((0, 1))
        model.lm_head.weight[token] = mean_logit * mean / mean.square().sum()


def _write_batch(workload: Workload, path: Path) -> None:
    """Stores completions of random tokens and lengths, and rewards of random numbers."""
    draw = random.Random(1)

    def complete() -> list[int]:
        least = 1 if workload.is_ragged else workload.new_tokens
        length = draw.randint(least, workload.new_tokens)
        return [draw.randint(3, 12) for _ in range(length)]

    prompts = draw_prompts(workload, workload.num_prompts)
    ids = [[complete() for _ in range(workload.num_samples)] for _ in prompts]
    rewards = [[draw.random() for _ in range(workload.num_samples)] for _ in prompts]
    path.write_text(json.dumps({"prompts": prompts, "ids": ids, "rewards": rewards}))


def _compare_updates(given: Mapping[str, Any], programs: Programs) -> dict[str, tuple[float, str]]:
    """Differences between both sides' updates of the stored batch; ends the program where they are not the same."""
    from safetensors.torch import load_file

    answers, gradients = {}, {}
    sides = ("ours", "trl")
    for side in sides:
        path = Path(given["folder"]) / f"{side}.safetensors"
        path.unlink(missing_ok=True)
        stored = {**given, "gate": True, "gradients": str(path)}
        with _started(Arrangement(side, 1, 1), stored, programs) as process:
            answers[side] = process.read()
        gradients[side] = load_file(path)
    loss, theirs_loss = (answers[side]["loss"] for side in sides)
    # Where all summands have one weight, those of GRPO add up to nothing.
    differences = {"loss": abs(loss - theirs_loss) / max(abs(theirs_loss), answers["ours"]["summand"])}
    norms = {name: float(each.double().norm()) for name, each in gradients["trl"].items()}
    if gradients["ours"].keys() != norms.keys():
        raise _VoidRunError(f"only one side has gradients of {sorted(gradients['ours'].keys() ^ norms.keys())}")
    for name in norms:
        ours, theirs = (gradients[side][name].double() for side in sides)
        differences[name] = float((ours - theirs).norm()) / max(norms[name], LEAST_NORM)
    worst, least = max(differences, key=differences.__getitem__), min(norms, key=norms.__getitem__)
    print(f"{given['workload']}: largest difference {differences[worst]:.1e} ({worst}), loss {differences['loss']:.1e}")
    print(f"{given['workload']}: smallest norm of a gradient {norms[least]:.2e} ({least})")
    if answers["ours"]["prompt_ids"] != answers["trl"]["prompt_ids"]:
        raise _VoidRunError("the sides have other tokens of the same prompts")
    # Comparisons with NaN are false, and it is neither the largest nor the smallest.
    if small := [name for name, norm in norms.items() if not norm > LEAST_NORM]:
        raise _VoidRunError(f"the gradients of {small} have norms of at most {LEAST_NORM}, which prove nothing")
    if wrong := [name for name, each in differences.items() if not each <= LARGEST_DIFFERENCE]:
        raise _VoidRunError(f"{wrong} differ by more than {LARGEST_DIFFERENCE}")
    found = {"loss": differences.pop("loss"), "gradient": max(differences.values())}
    return {f"update_{name}_difference": (float(f"{each:.2g}"), "relative") for name, each in found.items()} | {
        "update_least_gradient": (float(f"{norms[least]:.3g}"), "norm of a parameter's gradient")
    }


def _race(options: argparse.Namespace) -> int:
    """Records each side's seconds and iterations to the goal, the seeds in turns; 1 if one does not reach it."""
    given = _prepare(GOAL.workload, options)
    version, program, environment, installs = PEERS["grpo"]
    programs = {
        "ours": (Path(sys.executable), "end_to_end_ours.py"),
        "trl": (make_environment(environment, installs), program),
    }
    metrics = _compare_updates(given, programs)
    seconds: dict[str, list[float]] = {side: [] for side in programs}
    for seed in RACE_SEEDS:
        for side in programs if seed % 2 else reversed(programs):
            with _started(Arrangement(side, 1, 2), {**given, "seed": seed}, programs) as process:
                process.read()
                found = process.read()
            if found is None:
                print(f"seed {seed} {side}: {GOAL.score} is not reached in {GOAL.most} iterations", flush=True)
                return 1
            print(f"seed {seed} {side}: {found['seconds']:.2f} s, {found['iterations']} iterations", flush=True)
            seconds[side].append(found["seconds"])
            metrics[f"{side}_seed_{seed}"] = (round(found["seconds"], 2), "s")
            metrics[f"{side}_seed_{seed}_iterations"] = (found["iterations"], "iterations")
    ours, theirs = (statistics.median(seconds[side]) for side in ("ours", "trl"))
    metrics["speed_up"] = (round(theirs / ours, 3), "times as long as here")
    record("end_to_end_race", metrics, versions={"trl": version})
    write_page()
    return 0


def _started(system: Arrangement, options: Mapping[str, Any], programs: Programs) -> closing[SideProcess]:
    return closing(SideProcess(system, options, *programs[system.side]))


def _measure(
    name: str, given: Mapping[str, Any], systems: Sequence[Arrangement], programs: Programs
) -> dict[str, tuple[float, str]]:
    """Medians and extremes of every system over the rounds, in which they take turns."""
    rates: dict[Arrangement, list[float]] = {}
    used: dict[Arrangement, list[float]] = {}
    phases: dict[Arrangement, list[dict[str, float]]] = {}
    counted: dict[str, dict[Arrangement, list[float]]] = {kind: {} for kind in COUNTED}
    resident: dict[Arrangement, list[int]] = {}
    rows = WORKLOADS[name].num_rows
    with ExitStack() as stack:
        sides = {}
        for system in systems:
            sides[system] = stack.enter_context(_started(system, given, programs))
            sides[system].read()
            resident[system] = [sides[system].measure_start()]
            sides[system].go()
            if system.side == "ours" and WORKLOADS[name].algorithm == "grpo":
                _check_order(Path(given["folder"]) / f"ours-{system.ranks}-{system.threads}", Path(given["order"]))
        for number in range(len(given["segments"]) - 1):
            first = number % len(systems)
            for system in (*systems[first:], *systems[:first]):
                before_s, _ = sides[system].measure()
                found = sides[system].go()
                after_s, now = sides[system].measure()
                resident[system].append(now)
                for kind, of in counted.items():
                    of.setdefault(system, []).extend(each.pop(kind) for each in found if kind in each)
                wall_s = statistics.median(each["wall"] for each in found)
                rates.setdefault(system, []).append(rows / wall_s)
                used.setdefault(system, []).append((after_s - before_s) / len(found))
                phases.setdefault(system, []).extend(found)
                print(f"{name} {system.name}: {rows / wall_s:.1f} samples/s, {used[system][-1]:.3f} CPU s", flush=True)
                parts = {phase: statistics.median(row.get(phase, 0.0) for row in found) for phase in found[-1]}
                print("   ", ", ".join(f"{phase} {1000 * each:.1f} ms" for phase, each in parts.items()), flush=True)
    means = {
        (system.name, kind): statistics.mean(found)
        for kind, of in counted.items()
        for system, found in of.items()
        if found
    }
    if WORKLOADS[name].is_ragged:
        _check_lengths({system: each for (system, kind), each in means.items() if kind == "tokens"})
    metrics = _summarise(systems, rates, used, phases, resident)
    return metrics | {
        f"{system}_{kind}": (float(f"{each:.4g}"), COUNTED[kind]) for (system, kind), each in means.items()
    }


def _check_order(run: Path, order: Path) -> None:
    """Compares the prompts that a run of ours has drawn, by its ledger, with those that its peer is given."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    drawn = [[row for _, row, _ in line["prompts"]] for line in lines if line["state"] == "planned"]
    if not drawn or drawn != json.loads(order.read_text())[: len(drawn)]:
        raise _VoidRunError(f"{run} draws other prompts than its peer is given")


def _check_lengths(lengths: Mapping[str, float]) -> None:
    """Refuses a comparison of responses of other lengths."""
    print(f"tokens a response: {', '.join(f'{name} {each:.1f}' for name, each in lengths.items())}", flush=True)
    if max(lengths.values()) > (1 + LARGEST_EXCESS) * min(lengths.values()):
        raise _VoidRunError(f"responses of one system are more than {LARGEST_EXCESS:.0%} longer")


def _summarise(
    systems: Sequence[Arrangement],
    rates: Mapping[Arrangement, Sequence[float]],
    used: Mapping[Arrangement, Sequence[float]],
    phases: Mapping[Arrangement, Sequence[Mapping[str, float]]],
    resident: Mapping[Arrangement, Sequence[int]],
) -> dict[str, tuple[float, str]]:
    metrics: dict[str, tuple[float, str]] = {}
    best = {each.side: 0.0 for each in systems}
    for system in systems:
        middle = statistics.median(rates[system])
        best[system.side] = max(best[system.side], middle)
        for kind, value in (("median", middle), ("slowest", min(rates[system])), ("fastest", max(rates[system]))):
            metrics[f"{system.name}_{kind}"] = (round(value, 2), "samples/s")
        metrics[f"{system.name}_used"] = (round(statistics.median(used[system]), 4), "CPU s an iteration")
        rows = [each | {"rest": _find_rest(each)} for each in phases[system]]
        for phase in sorted({each for row in rows for each in row}):
            seconds = statistics.median(row.get(phase, 0.0) for row in rows)
            metrics[f"{system.name}_{phase}"] = (round(1000 * seconds, 2), "ms an iteration")
        metrics[f"{system.name}_resident"] = (round(max(resident[system]) / 2**20, 1), "MiB, all processes")
        grown = max(resident[system]) - resident[system][0]
        metrics[f"{system.name}_grown"] = (round(grown / 2**20, 1), "MiB above the start's")
    for name, other, unit in (
        ("speed_up", "trl", "times the peer's best"),
        ("of_bare", "bare", "of the plain loop's best"),
    ):
        if best.get("ours") and best.get(other):
            metrics[name] = (round(best["ours"] / best[other], 3), unit)
    return metrics


def _find_rest(phases: Mapping[str, float]) -> float:
    """Seconds of an iteration that are in no phase."""
    return 2 * phases["wall"] + phases.get("operations", 0.0) - sum(phases.values())


if __name__ == "__main__":
    started_s = time.monotonic()
    try:
        code = main()
    except _VoidRunError as error:
        print(f"void: {error}")
        code = 2
    print(f"took {time.monotonic() - started_s:.0f} s")
    sys.exit(code)
