from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import hf_engine
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_the_package_loads_no_backend():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    modules = json.loads(output)
    heavy = ("tensordict", "transformers", "safetensors", "torch.distributed.fsdp", "hf_engine.backends.fsdp", "ray")
    assert not set(heavy) & set(modules)
