from __future__ import annotations

import json
import subprocess
import sys


def test_importing_the_package_loads_no_backend():
    program = (
        "import json, sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import hf_engine\n"
        "print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    seconds, modules = json.loads(output)
    heavy = ("tensordict", "transformers", "safetensors", "torch.distributed.fsdp", "hf_engine.backends.fsdp", "ray")
    assert not set(heavy) & set(modules)
    assert seconds < 1.0
