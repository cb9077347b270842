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


def test_importing_the_package_loads_no_backend():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    modules = set(json.loads(output))
    assert "torch" in modules
    assert not LIBRARIES & {module.partition(".")[0] for module in modules}
    assert "torch.distributed.fsdp" not in modules
    backends = [module for module in modules if module.startswith("hf_engine.backends.")]
    assert sorted(backends) == [
        "hf_engine.backends._abilities",
        "hf_engine.backends._adapter_rules",
        "hf_engine.backends._base",
        "hf_engine.backends._directories",
        "hf_engine.backends._jagged",
        "hf_engine.backends._lora_config",
        "hf_engine.backends._merging",
        "hf_engine.backends._registry",
        "hf_engine.backends._sampling_params",
        "hf_engine.backends._shapes",
        "hf_engine.backends._train_config",
    ]
