"""Time from the start of `hybridflow serve` until the page of a run of 100,000 iterations is shown; and its memory.

The requests are those that a browser sends first. Behind them the server reads the whole file; then the same page is
asked for again, as polls of a run that goes on do. Targets: 2 s until the page is shown, 256 MB when all is read.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
from measurement import record

NUM_ITERATIONS = 100_000
NUM_ROUNDS = 5
MAX_SHOWN_S = 2.0
MAX_RSS_BYTES = 256 << 20
PARTS = ("state", *(f"parts/{name}" for name in ("health", "curves", "samples", "compare", "gantt")))
"""Asked for at first, and whenever a run went on."""
METRICS = """
    actor/clip_high actor/clip_low actor/entropy actor/grad_norm actor/policy_loss actor/update_kl
    batch/padding critic/explained_variance critic/grad_norm critic/value_loss group/filtered
    group/zero_variance kl/k1 kl/k2 kl/k3 kl_sequence/k1 kl_sequence/k3 memory/peak_bytes
    perf/samples_per_s perf/tokens_per_s response/tokens response/truncated reward/exact_match/mean
    reward/mean reward/std reward/unscorable rollout/masked rollout/mismatch_k3 rollout/weight_max
    time/advantages_s time/generate_s time/iteration_s time/logprobs_s time/other_s time/score_s
    time/sync_s time/train_s
"""


def main() -> int:
    """Measure, record, and return 1 if a target is missed."""
    with tempfile.TemporaryDirectory() as folder:
        write_metrics(Path(folder) / "metrics.jsonl")
        found = [open_page(folder) for _ in range(NUM_ROUNDS)]
    shown_s, whole_s, again_s, rss_bytes = (statistics.median(each) for each in zip(*found, strict=True))
    record(
        "serve",
        {
            "iterations": (NUM_ITERATIONS, "iterations"),
            "shown_s": (round(shown_s, 3), "s"),
            "all_read_s": (round(whole_s, 2), "s"),
            "shown_again_s": (round(again_s, 3), "s"),
            "rss_bytes": (rss_bytes, "bytes"),
        },
    )
    reached = shown_s < MAX_SHOWN_S and rss_bytes < MAX_RSS_BYTES
    limit = MAX_RSS_BYTES >> 20
    print(
        f"{'reached' if reached else 'MISSED '} shown in {shown_s:.2f} s (wanted < {MAX_SHOWN_S:g}), "
        f"{rss_bytes / 2**20:.0f} MB (wanted < {limit})"
    )
    return 0 if reached else 1


def write_metrics(path: Path) -> None:
    """A run's file: 150 MB of all metrics that an algorithm with a critic has."""
    draw = random.Random(0)
    with path.open("w") as file:
        for iteration in range(1, NUM_ITERATIONS + 1):
            file.write(json.dumps({"iteration": iteration, **{name: draw.random() for name in METRICS.split()}}) + "\n")


def open_page(folder: str) -> tuple[float, float, float, int]:
    """Seconds until the page is shown, until all is read, for the page after that; and the process's memory."""
    start = time.perf_counter()
    command = [str(Path(sys.executable).with_name("hybridflow")), "serve", folder, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = process.stderr.readline().split()[0]
            for part in ("", "page.css", "page.js", *PARTS):
                fetch(address, part)
            shown_s = time.perf_counter() - start
            while json.loads(fetch(address, "state"))["runs"][0]["notes"]:
                time.sleep(0.1)
            whole_s = time.perf_counter() - start
            again = time.perf_counter()
            for part in PARTS:
                fetch(address, part)
            again_s = time.perf_counter() - again
            return shown_s, whole_s, again_s, psutil.Process(process.pid).memory_info().rss
        finally:
            process.kill()


def fetch(address: str, part: str) -> bytes:
    """One answer."""
    with urllib.request.urlopen(f"{address}/{part}") as answer:
        content: bytes = answer.read()
        return content


if __name__ == "__main__":
    sys.exit(main())
