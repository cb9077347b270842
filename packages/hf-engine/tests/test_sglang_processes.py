"""Processes, shared memory and messages between a rank and its engine, without SGLang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from hf_engine import load_rollout_backend
from hf_engine.resharding.boxes import Box
from hf_engine.rollout.sglang._options import EngineModel, build_options
from hf_engine.rollout.sglang._process import EngineProcess
from hf_engine.rollout.sglang._session import end_session, find_segments
from hf_engine.rollout.sglang._staging import Staging, read_staging, write_report
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, BackendUnavailableError, ReshardError

without_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")


def wait_until(condition):
    stop = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < stop, "still not so after 30 s"
        time.sleep(0.05)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def start():
    return EngineProcess(lambda directory: {**os.environ, "TMPDIR": directory})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tp_size": 2}, "engine_options={'tp_size': 2} would change tp_size, which is set by the other arguments"),
        ({"log_level": "info", "sampling_backend": "pytorch"}, "would change sampling_backend, which"),
        ({"preferred_sampling_params": {"repetition_penalty": 1.2}}, "would change preferred_sampling_params, which"),
        ({"speculative_algorithm": "NGRAM"}, "would change speculative_algorithm, which"),
        (5, "engine_options=5. Use a table of SGLang's server arguments"),
    ],
)
def test_options_that_are_ours_are_refused(tmp_path, more, message):
    model = EngineModel(write_tiny_model(tmp_path))
    sizes = {"tp_size": 1, "positions": 48, "cache_bytes": 1 << 20, "max_rows": 4}
    with pytest.raises(BackendError, match=re.escape(message)):
        build_options(model, dtype="float32", seed=0, more=more, **sizes)
    options = build_options(model, dtype="float32", seed=0, more={"log_level": "info"}, **sizes)
    assert (options["log_level"], options["tp_size"]) == ("info", 1)


def test_a_request_that_fails_leaves_the_process():
    process = start()
    for _ in range(2):
        with pytest.raises(BackendError, match=r"SGLang refused 'flush': AttributeError: .* '_engine'"):
            process.call("flush", timeout_s=30)
    pid, directory = process.pid, Path(process._directory)
    assert directory.is_dir()
    process.close()
    process.close()
    assert is_gone(pid) and not directory.exists()
    with pytest.raises(BackendError, match=r"the SGLang engine has ended. Build the backend again"):
        process.call("flush", timeout_s=30)


def test_a_killed_process_is_one_typed_error():
    process = start()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"ended in 'flush' \(signal 9\): it left no message. Build the backend"):
        process.call("flush", timeout_s=30)
    with pytest.raises(BackendError, match=r"engine has ended \(in 'flush', signal 9\). Build the backend again"):
        process.call("flush", timeout_s=30)


def test_a_process_that_cannot_start_leaves_no_files():
    made = []

    def environment(directory):
        made.append(Path(directory))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        EngineProcess(environment)
    assert not made[0].exists()


def test_an_interrupted_request_ends_the_process_of_its_engine():
    process = start()
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            process.call("flush", timeout_s=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_gone(pid)
    with pytest.raises(BackendError, match=r"engine has ended \('flush' was interrupted\). Build the backend again"):
        process.call("flush", timeout_s=30)


def test_a_process_that_does_not_answer_is_ended():
    process = start()
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"did not finish 'flush' in 0.2 s and was ended. .* a longer timeout_s"):
        process.call("flush", timeout_s=0.2)
    assert is_gone(pid)


CHILD = """
import os, sys
from hf_engine.rollout.sglang._process import EngineProcess
process = EngineProcess(lambda directory: {**os.environ, "TMPDIR": directory})
try:
    process.call("flush", timeout_s=30)
except Exception:
    print(process.pid, process._directory, flush=True)
sys.stdin.read()
"""


def test_a_killed_rank_takes_its_engine_with_it():
    rank = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, directory = rank.stdout.readline().split()
    assert Path(directory).is_dir() and not is_gone(int(pid))
    rank.kill()
    rank.wait()
    wait_until(lambda: is_gone(int(pid)) and not Path(directory).exists())


MAPPING = """
import multiprocessing.shared_memory, os, subprocess, sys
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(memory.name, "sem." + semaphore._semlock.name.removeprefix("/"), flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "again"])
sys.stdin.read()
"""


def test_a_session_ends_with_its_shared_memory(tmp_path):
    script = tmp_path / "mapping.py"
    script.write_text(MAPPING)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, str(script)], text=True, start_new_session=True, **pipes)
    paths = {f"/dev/shm/{name}" for _ in range(2) for name in process.stdout.readline().split()}
    assert len(paths) == 4 and find_segments(process.pid) == paths
    end_session(process.pid)
    process.wait()
    assert not any(Path(path).exists() for path in paths)


READING = """
import json, sys
from hf_engine.rollout.sglang._staging import read_staging, write_report
memory, shards = read_staging(sys.argv[1])
print(json.dumps([(name, shape, box.offset, box.shape, part.tolist()) for name, shape, box, part in shards]))
write_report(memory, "no, because")
"""


def test_shards_lie_in_memory_that_another_process_maps():
    staging = Staging()
    whole = torch.arange(15.0).view(5, 3)
    boxes = {"a": Box((1, 0), (2, 3)), "b": Box.whole((1,)), "none": Box((5, 0), (0, 3))}
    shards = {"a": whole[1:3], "b": torch.tensor([7.0]), "none": whole[5:]}
    shapes = {"a": (5, 3), "b": (1,), "none": (5, 3)}
    description = staging.fill(shards, shapes=shapes, boxes=boxes)
    read = subprocess.run([sys.executable, "-c", READING, description], capture_output=True, text=True, check=True)
    assert json.loads(read.stdout) == [
        ["a", [5, 3], [1, 0], [2, 3], [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]],
        ["b", [1], [0], [1], [7.0]],
        ["none", [5, 3], [5, 0], [0, 3], []],
    ]
    with pytest.raises(ReshardError, match=r"^SGLang did not take the weights: no, because$"):
        staging.check_report()
    staging.fill({"b": torch.tensor([8.0])}, shapes=shapes, boxes=boxes)
    staging.check_report()  # nothing is left of it
    size = staging.num_bytes
    big = {"a": torch.zeros(1 << 16)}
    description = staging.fill(big, shapes=shapes, boxes={"a": Box.whole((1 << 16,))})
    assert staging.num_bytes > size
    memory, _ = read_staging(description)
    write_report(memory, "x" * 10_000)
    with pytest.raises(ReshardError, match=r"^SGLang did not take the weights: x{4095}$"):
        staging.check_report()
    staging.close()


STAND_IN = """
from hf_engine.cpu_support.torchvision import install_stand_in
install_stand_in()
import importlib.util, torchvision.transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize
assert importlib.util.find_spec("torchvision") is not None and InterpolationMode.BICUBIC is not None
try:
    resize(1)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_what_text_never_uses_can_be_imported_and_not_be_called():
    done = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True, check=True)
    assert "functional.resize was called, and torchvision is not installed" in done.stdout


@without_sglang
def test_another_version_is_refused_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "0.5.24.post1")
    with pytest.raises(BackendError, match=r"supports SGLang >=0.5.23,<0.5.24 and sglang 0.5.24.post1 is inst"):
        load_rollout_backend("sglang")


@without_sglang
def test_the_error_of_a_missing_sglang_has_the_install_command():
    with pytest.raises(BackendUnavailableError, match=r'not installed: pip install "hf-engine\[sglang\]" .*env.sh sgl'):
        load_rollout_backend("sglang")
