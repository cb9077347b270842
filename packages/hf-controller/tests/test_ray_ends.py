"""However a program ends, nothing of it stays: no process, no shared memory."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ray

from hf_controller.executors.ray.watchdog import find_sessions
from hf_controller.local_start import find_temp_dir

PROGRAM = """
import signal, sys, time
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec

class Sleeper(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep_on(self, seconds):
        time.sleep(seconds)

signal.signal(signal.SIGINT, signal.default_int_handler)
with RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20) as executor:
    spec = WorkerSpec(worker=Sleeper, topology=Topology(ParallelSpec(dp_size=1)))
    group = executor.build_groups(ResourcePool([1], device="cpu"), {"sleeper": spec})["sleeper"]
    print("ready", flush=True)
    if sys.argv[1] == "close":
        group.sleep_on(0).result()
    elif sys.argv[1] == "raise":
        group.sleep_on(600)
        raise ValueError("this program is wrong")
    else:  # a signal comes
        group.sleep_on(600).result()
print("closed", flush=True)
"""


class Process(NamedTuple):
    pid: int
    started: str
    """Ticks since the machine's start: a later process with the same number has another."""


def all_processes() -> dict[Process, tuple[int, str]]:
    """Parent and command of every process; those that only wait to be reaped do not count."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = rest.split()
        if fields[0] != "Z":
            found[Process(int(folder.name), fields[19])] = (int(fields[1]), name.partition("(")[2])
    return found


def tree_of(pid: int) -> set[Process]:
    """A process and all that it started, and they started."""
    family, processes = {pid}, all_processes()
    while grown := {process.pid for process, (parent, _) in processes.items() if parent in family} - family:
        family |= grown
    return {process for process in processes if process.pid in family}


def start(argument: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, argument], text=True, start_new_session=True, **pipes)


def wait_until_ready(program: subprocess.Popen[str]) -> set[Process]:
    """Its processes."""
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n", program.communicate()
    return tree_of(program.pid)


def wait_until_gone(tree: set[Process], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while left := {process: command for process, command in all_processes().items() if process in tree}:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def shared_memory() -> set[str]:
    """Returns the segments, except semaphores of multiprocessing, which these programs do not make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


FIRST_SESSION = datetime.datetime.now().strftime("session_%Y-%m-%d_%H-%M-%S")


def sessions_of(program: subprocess.Popen[str]) -> list[str]:
    """Folders of clusters that a program of these tests started; an earlier program may have had its number."""
    return find_sessions(f"{find_temp_dir()[0]}/ray", program.pid, FIRST_SESSION)


def wait_for_shared_memory(before: set[str]) -> None:
    """Waits until nothing is left; segments of tests that run at the same time go by themselves."""
    deadline_s = time.monotonic() + 30.0
    while left := shared_memory() - before:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


ENDS = {
    "close": (None, 0),
    "raise": (None, 1),
    "interrupt": (signal.SIGINT, -signal.SIGINT),
    "end all": (signal.SIGTERM, 143),  # as timeout does
    "end": (signal.SIGTERM, 143),
}
PAIRS = (("close", "raise"), ("interrupt", "end all"))
"""The programs of a test; a signal to the whole group reaches the program too, as "end" does."""


@pytest.fixture(params=PAIRS, ids=" and ".join)
def programs(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two that start together; four clusters at a time are more than two cores start in time next to another lane."""
    programs = {argument: start(argument) for argument in request.param}
    yield programs
    for program in programs.values():
        program.kill()
        program.communicate(timeout=15)


@pytest.mark.slow
def test_nothing_is_left_behind(programs):
    for argument, program in programs.items():
        check_end(program, argument)


@pytest.mark.slow
def test_a_signal_to_the_program_alone_leaves_nothing_behind():
    program = start("end")
    try:
        check_end(program, "end")
    finally:
        program.kill()
        program.communicate(timeout=15)


def check_end(program: subprocess.Popen[str], argument: str) -> None:
    """Ends the program, and fails if something of it stays."""
    sent, exit_code = ENDS[argument]
    before = shared_memory()
    tree = wait_until_ready(program)
    if sent is not None:
        time.sleep(0.5)
        if argument == "end all":
            # Ray would exit from a program whose store ended first.
            still_there = tree & all_processes().keys()
            assert [each.pid for each in still_there if os.getpgid(each.pid) == program.pid] == [program.pid]
            os.killpg(program.pid, sent)
        else:
            program.send_signal(sent)
    output, errors = program.communicate(timeout=100)
    assert program.returncode == exit_code, (output, errors)
    assert ("closed" in output) is (argument == "close")
    assert ("ValueError: this program is wrong" in errors) is (argument == "raise")
    wait_until_gone(tree, within_s=30.0)
    wait_for_shared_memory(before)
    # The logs are kept for the reader of an error.
    assert len(sessions_of(program)) == (1 if argument == "raise" else 0)
    assert "Ray" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sent", "exit_code"),
    [
        ("gcs_server", signal.SIGTERM, 143),
        ("raylet", signal.SIGTERM, 143),
        ("raylet", signal.SIGABRT, -signal.SIGABRT),  # as Ray's code does that finds no thread to start
    ],
)
def test_a_signal_while_the_cluster_starts_ends_all(command, sent, exit_code):
    program, seen = start("end"), set[Process]()
    try:
        deadline_s = time.monotonic() + 100.0
        while command not in {name for each, (_, name) in all_processes().items() if each in seen}:
            assert program.poll() is None and time.monotonic() < deadline_s
            seen |= tree_of(program.pid)
            time.sleep(0.02)
        program.send_signal(sent)
        while program.poll() is None and time.monotonic() < deadline_s:
            seen |= tree_of(program.pid)
            time.sleep(0.02)
        output, errors = program.communicate(timeout=15)
        assert (program.returncode, output) == (exit_code, ""), errors
        wait_until_gone(seen, within_s=30.0)
        assert sessions_of(program) == []
    finally:
        program.kill()
        program.communicate(timeout=15)


@pytest.mark.slow
def test_a_watchdog_ends_what_a_killed_program_leaves_behind():
    before = shared_memory()
    program = start("interrupt")
    tree = wait_until_ready(program)
    program.kill()
    program.communicate(timeout=10)
    wait_until_gone(tree, within_s=10.0)
    wait_for_shared_memory(before)
    assert sessions_of(program) == []


UNCLOSED_PROGRAM = """
import gc, sys, time
from hf_controller import RayExecutor

executor = RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20)
print("ready", flush=True)
sys.stdin.readline()
del executor
gc.collect()
time.sleep(0.5)  # nobody may end a program that lost its executor, either
print("done", flush=True)
if sys.argv[1] == "1":
    raise RuntimeError("this program is wrong")
"""


def test_programs_with_unclosed_executors_keep_their_exit_codes():
    before = shared_memory()
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", UNCLOSED_PROGRAM]
    programs = [subprocess.Popen([*command, str(code)], text=True, **pipes) for code in (0, 1)]
    try:
        trees = [wait_until_ready(program) for program in programs]
        ends = [program.communicate("\n", timeout=60) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 1], ends
    assert [output for output, _ in ends] == ["done\n"] * 2
    assert ["RuntimeError: this program is wrong" in errors for _, errors in ends] == [False, True]
    for tree in trees:
        wait_until_gone(tree, within_s=10.0)
    wait_for_shared_memory(before)


def test_an_address_without_a_cluster_is_refused():
    program = "from hf_controller import RayExecutor; RayExecutor(address='127.0.0.1:9')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "PoolError: cannot connect to a Ray cluster at '127.0.0.1:9'" in done.stderr.splitlines()[-1]


CLOSED_PROGRAM = """
import json, signal, sys, time
from pathlib import Path
import ray, torch
from tensordict import TensorDict
from hf_protocols import DP, ONE_TO_ALL, ParallelSpec, PoolError, Topology, WorkerError, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec, connect, rebuild

class Doubler(Worker):
    needs_process_group = False

    @register(protocol=DP)
    def double(self, batch):
        return TensorDict({"x": 2 * batch["x"]}, batch_size=[len(batch)])

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail(self, how):
        raise how("early")

    @register(protocol=ONE_TO_ALL, returns="object")
    def save_and_fail(self, path):
        time.sleep(1)
        Path(path).write_text("saved")
        raise KeyError("lost")

batch = TensorDict({"x": torch.arange(2)}, batch_size=[2])
def hooks():
    return [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], sys.unraisablehook

before = hooks()
try:
    with RayExecutor(**json.loads(sys.argv[2])) as executor:
        spec = WorkerSpec(worker=Doubler, topology=Topology(ParallelSpec(dp_size=1)))
        pool = ResourcePool([1], device="cpu")
        group = executor.build_groups(pool, {"doubler": spec})["doubler"]
        seen, unseen = group.double(batch), group.double(batch)
        seen.wait()
        try:
            group.fail(LookupError).result()
        except WorkerError:
            pass  # told, and dealt with
        if sys.argv[3:]:
            group.fail(ValueError)
        group.save_and_fail(sys.argv[1])
except WorkerError as error:
    print(error)
assert Path(sys.argv[1]).exists(), "the block did not wait for its last call"
for use in (seen.result, unseen.result, unseen.wait, lambda: unseen.num_rows, lambda: executor.put(batch),
            lambda: group.double(batch), lambda: group.double(seen), lambda: rebuild(executor, [pool]),
            lambda: connect(group, group)):
    try:
        use()
    except PoolError as error:
        assert "this executor is closed" in str(error), error
    else:
        raise AssertionError("it was served")
executor.trace.drain()
assert not ray.is_initialized()
assert hooks() == before, (hooks(), before)
print("refused")
"""


def run_closed_program(path: Path, *more: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLOSED_PROGRAM, str(path), json.dumps(options), *more]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}  # as a cluster that we start
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_closed_executor_finishes_its_calls_and_refuses_others(tmp_path):
    done = run_closed_program(tmp_path / "saved", num_cpus=1, object_store_bytes=100 * 2**20)
    assert done.stdout == "doubler.save_and_fail on rank 0 failed: KeyError: 'lost'\nrefused\n", done.stderr


def test_an_executor_leaving_a_cluster_finishes_its_calls_too(ray_executor, tmp_path):
    done = run_closed_program(tmp_path / "saved", "early", address=ray.get_runtime_context().gcs_address)
    assert done.stdout == "doubler.fail on rank 0 failed: ValueError: early\nrefused\n", done.stderr


TOLD_PROGRAM = """
import time
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerTimeoutError, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec

class Sleeper(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep_on(self):
        time.sleep(600)

with RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20) as executor:
    spec = WorkerSpec(worker=Sleeper, topology=Topology(ParallelSpec(dp_size=1)))
    group = executor.build_groups(ResourcePool([1], device="cpu"), {"sleeper": spec})["sleeper"]
    try:
        group.sleep_on().wait(timeout_s=1)
    except WorkerTimeoutError:
        print("late")
print("closed")
"""


@pytest.mark.slow
def test_a_block_does_not_wait_for_a_call_reported_as_late():
    done = subprocess.run([sys.executable, "-c", TOLD_PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "late\nclosed\n", done.stderr


DEAD_PROGRAM = """
import os, sys, time
from pathlib import Path
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerError, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec

class Mortal(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self):
        return os.getpid()

    @register(protocol=ONE_TO_ALL, returns="object")
    def die(self):
        os._exit(1)

with RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20) as executor:
    spec = WorkerSpec(worker=Mortal, topology=Topology(ParallelSpec(dp_size=1)))
    group = executor.build_groups(ResourcePool([1], device="cpu"), {"mortal": spec})["mortal"]
    (pid,) = group.pid().result()
    dying, behind = group.die(), group.pid()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.1)
    time.sleep(2)  # Ray knows it too: both calls are over
    if sys.argv[1] == "told":
        try:
            dying.wait()
        except WorkerError:
            print("told")
print("closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["told", "untold"])
def test_a_block_raises_a_death_only_if_it_is_unreported(argument):
    done = subprocess.run([sys.executable, "-c", DEAD_PROGRAM, argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if argument == "told" else 1), done.stderr
    assert ("closed" in done.stdout.splitlines()) is ("told" in done.stdout.splitlines()) is (argument == "told")
    assert ("process mortal/0 is gone" in done.stderr) is (argument == "untold")
    line = DEAD_PROGRAM[: DEAD_PROGRAM.index("dying, behind")].count("\n") + 1
    place = f"the call was made at <string>:{line}, and nothing asked for its result"
    assert (place in done.stderr) is (argument == "untold")
