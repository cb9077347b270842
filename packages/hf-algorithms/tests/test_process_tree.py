from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil

from hf_algorithms.run.process_tree import MemoryMeter

SIZE = 96 << 20
# A grandchild holds the memory: children of children count.
CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "held = b'x' * {SIZE}; print('held', flush=True); input()"])
"""


def test_the_peak_sums_over_the_tree_and_outlives_its_processes():
    own = psutil.Process().memory_info().rss
    with MemoryMeter(interval_s=0.02) as meter:
        before = meter.peak_bytes
        command = [sys.executable, "-c", CHILD]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        until_s = time.monotonic() + 30.0
        while meter.peak_bytes < before + SIZE and time.monotonic() < until_s:
            time.sleep(0.05)
        child.communicate("\n", timeout=30)
    assert before >= 0.9 * own
    assert meter.peak_bytes >= before + SIZE
    assert meter.peak_bytes < before + 4 * SIZE
    assert "memory-meter" not in {thread.name for thread in threading.enumerate()}


def test_a_short_block_is_measured():
    meter = MemoryMeter()
    assert meter.peak_bytes == 0
    with meter:
        pass
    assert meter.peak_bytes > 1 << 20
