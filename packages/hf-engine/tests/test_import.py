from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import hf_engine
print(json.dumps(sorted(sys.modules)))
"""


LIBRARIES = {"megatron", "peft", "ray", "safetensors", "sglang", "tensordict", "transformers", "vllm"}
EXPECTED = [
    "hf_engine.backends.base",
    "hf_engine.backends.capabilities",
    "hf_engine.backends.jagged",
    "hf_engine.backends.lora_config",
    "hf_engine.backends.registry",
    "hf_engine.backends.sampling_params",
    "hf_engine.backends.train_config",
    "hf_engine.models.adapter_rules",
    "hf_engine.models.merging",
    "hf_engine.models.shapes",
    "hf_engine.training.directories",
    "hf_engine.training.state",
    "hf_engine.training.state.files",
    "hf_engine.training.state.records",
]
"""Modules of backends, models and states that the package imports."""


def test_importing_the_package_loads_no_backend():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    modules = set(json.loads(output))
    assert "torch" in modules
    assert not LIBRARIES & {module.partition(".")[0] for module in modules}
    assert "torch.distributed.fsdp" not in modules
    rooms = tuple(f"hf_engine.{room}." for room in ("backends", "cpu_support", "models", "rollout", "training"))
    assert sorted(module for module in modules if module.startswith(rooms)) == EXPECTED
