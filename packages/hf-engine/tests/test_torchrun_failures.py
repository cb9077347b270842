"""One rank of a program that torchrun started fails: the others end, torchrun reports it, and no process stays.

A few cells run with every change; `make test-failures` runs all, and writes how long each message took.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_engine import default_group
from hf_engine.process_groups import default_timeout

how, place, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
Path(folder, str(os.getpid())).touch()


def reach(here):
    if rank == 1 and here == place:
        if how == "raise":
            raise KeyError("the rank failed")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))


def meet():
    dist.all_reduce(torch.ones(()), group=group)


# Who is stopped never answers: the deadline can be short where all have arrived before.
long_s, short_s = (30, 5) if how == "SIGSTOP" else (120, 120)
with default_group("gloo", timeout_s=long_s):
    assert default_timeout().total_seconds() == long_s
    dist.barrier()
    reach("construction")
    group = dist.new_group(timeout=timedelta(seconds=short_s))
    reach("before")
    meet()
    reach("inside")
    meet()
    time.sleep(0.1)
    reach("generation")
    meet()
    reach("after")
    dist.barrier()
"""
HOWS = ("raise", "exit", "SIGKILL", "SIGSTOP")
PLACES = ("construction", "before", "inside", "generation", "after")
IN_CI = {("raise", "after"), ("exit", "generation"), ("SIGKILL", "construction"), ("SIGSTOP", "inside")}
REPORTS = {
    "raise": (1, "KeyError: 'the rank failed'"),
    "exit": (7, ""),
    "SIGKILL": (-9, r"Signal 9 \(SIGKILL\) received"),
    "SIGSTOP": (-9, r"Signal 9 \(SIGKILL\) received"),  # torchrun's own, after the others reported that it did not come
}
REPORT = r"rank +: {} .*\n +exitcode +: {} .*\n +error_file: .*\n +traceback : (?:.*\n)*?.*{}"


def find_marks(cell: tuple[str, str]) -> tuple[pytest.MarkDecorator, ...]:
    if cell not in IN_CI:
        return (pytest.mark.failures,)
    # A stopped rank ends at its deadline only; one that raises after all passes has made all of them.
    return (pytest.mark.slow,) if cell[0] == "SIGSTOP" or cell == ("raise", "after") else ()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "place"),
    [pytest.param(*cell, marks=find_marks(cell), id="-".join(cell)) for cell in itertools.product(HOWS, PLACES)],
)
def test_torchrun_reports_the_rank_that_failed(tmp_path, how, place):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--shutdown-timeout", "2", str(tmp_path / "program.py"), how, place, str(tmp_path / "pids")]
    started_s = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    took_s = time.monotonic() - started_s
    exit_code, message = REPORTS[how]
    assert ended.returncode == 1, ended.stderr
    assert re.search(REPORT.format(1, exit_code, message), ended.stderr), ended.stderr
    if how == "SIGSTOP":
        assert re.search(REPORT.format(0, 1, r"\w*Error: "), ended.stderr), ended.stderr
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert pids and not any(map(is_alive, pids)), "a process stays"
    if path := os.environ.get("HYBRIDFLOW_FAILURES"):  # for docs/reference/recovery-contract.md
        record = {"how": how, "place": place, "groups": "one", "launcher": "torchrun", "seconds": took_s}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"message": message}) + "\n")
