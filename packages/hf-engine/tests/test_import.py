from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import hf_engine
print(json.dumps([middle - start, time.perf_counter() - middle, sorted(sys.modules)]))
"""


def test_importing_the_package_loads_no_backend_and_costs_little_beyond_torch():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    torch_s, ours_s, modules = json.loads(output)
    heavy = ("tensordict", "transformers", "safetensors", "torch.distributed.fsdp", "hf_engine.backends.fsdp", "ray")
    assert not set(heavy) & set(modules)
    assert ours_s < 0.5 * torch_s
