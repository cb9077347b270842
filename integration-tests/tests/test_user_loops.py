"""A loop that a user writes has the same numbers on two ranks of Ray as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_algorithms.data import build_character_tokenizer
from hf_algorithms.jagged import decode_text
from hf_algorithms.workers import ActorWorker
from hf_controller import Executor, InProcessExecutor, RayExecutor, ResourcePool, WorkerSpec
from hf_engine import TrainConfig
from hf_engine.testing import write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

PROMPTS = ["ab", "abcd", "b", "cc", "dab"]
SAMPLING = {"max_new_tokens": 5, "n": 2, "temperature": 0.8, "seed": 7}


def run_loop(executor: Executor, model: str, num_ranks: int) -> tuple[list[str], list[float]]:
    """Two steps of two calls each: the texts, and the gradient norms."""
    training = TrainConfig(learning_rate=1e-2, micro_batch_tokens=64)
    kwargs = {"model": model, "backend": "fsdp", "rollout": "transformers", "training": training}
    topology = Topology(ParallelSpec(dp_size=num_ranks), GenerationSpec())
    spec = WorkerSpec(worker=ActorWorker, topology=topology, kwargs=kwargs)
    actor = executor.build_groups(ResourcePool([num_ranks], device="cpu"), {"actor": spec})["actor"]
    texts, norms = [], []
    for _ in range(2):
        batch = actor.sample(PROMPTS, SAMPLING)
        found = batch.result()
        texts += decode_text(found["text"])
        found["advantage"] = torch.tensor([float(len(row)) - 3 for row in found["response_ids"].unbind()])
        found["advantage"] += torch.arange(len(found)) % 3
        rows = executor.put(found)
        for part in (range(3), range(3, 10)):
            actor.forward_backward(
                rows.rows(part),
                lambda outputs, each: (-(outputs["logprobs"] * each["advantage"][:, None]).sum(), {}),
                30.0,
                temperature=0.8,
            )
        norms.append(actor.optim_step().result()["actor/grad_norm"])
    alone = actor.sample(["abc"], SAMPLING).result()
    assert alone["row_id"].tolist() == [0, 0], "one prompt, also where there are more replicas"
    return texts + decode_text(alone["text"]), norms


def test_two_ranks_of_ray_have_the_numbers_of_one_process(cluster_address: str, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model"))
    build_character_tokenizer("abcdefgh: ", model)
    with InProcessExecutor() as local:
        texts, norms = run_loop(local, model, 1)
    with RayExecutor(address=cluster_address, start_timeout_s=300.0) as ray:
        assert run_loop(ray, model, 2) == (texts, pytest.approx(norms, rel=1e-3))
