"""Fused roles of different layouts: one process per slot, each role with process groups of its own.

The actor and the critic train with FSDP over all four ranks, sharded by layer and as a whole; a third role in the same
processes has a layout of two tensor-parallel and two data-parallel ranks and meets on its own axes. Calls interleave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.losses import SupervisedLoss
from hf_algorithms.workers import ActorWorker, CriticWorker
from hf_controller import InProcessExecutor, RayExecutor, ResourcePool, Worker, WorkerContext, WorkerGroup, WorkerSpec
from hf_engine import TrainConfig
from hf_engine.process_groups import build_groups
from hf_engine.testing import write_tiny_model
from hf_protocols import ONE_TO_ALL, THREE_D, GenerationSpec, ParallelSpec, ProtocolError, Topology, register

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=64, shard="root")
VOCAB_SIZE = 64
LAYOUTS = {
    "actor": Topology(ParallelSpec(dp_size=4), GenerationSpec()),
    "critic": Topology(ParallelSpec(dp_size=4)),
    "mesh": Topology(ParallelSpec(tp_size=2, dp_size=2)),
}


class SquaredValues:
    """A loss of the critic: values against the returns."""

    reads = ("returns",)

    def __call__(self, outputs: TensorDict, micro_batch: TensorDict) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = micro_batch["response_mask"]
        error = (outputs["values"] - micro_batch["returns"]).masked_fill(~mask, 0.0)
        loss = error.square().sum()
        return loss, {"critic/loss": (float(loss.detach()), float(mask.sum()))}


class TracedActor(ActorWorker):
    """The actor, and which process it is in."""

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self) -> int:
        """This process."""
        return os.getpid()


class MeshWorker(Worker):
    """A weight [2, 6] split by columns over tp: partial products are summed over tp, and means over dp."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.groups = {axis: build_groups(context.topology, axis) for axis in ("tp", "dp")}
        columns = slice(3 * context.coordinate.tp, 3 * context.coordinate.tp + 3)
        self.columns = columns
        self.weight = torch.arange(12.0).view(2, 6)[:, columns]

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @register(protocol=THREE_D, reads=["x"], writes=["y", "mean"])
    def project(self, batch: TensorDict) -> TensorDict:
        """`y` [B, 2] is x [B, 6] times the weight; `mean` is that of x over the rows of all replicas."""
        y = batch["x"][:, self.columns] @ self.weight.T
        torch.distributed.all_reduce(y, group=self.groups["tp"])
        total = torch.tensor([float(batch["x"].sum()), float(batch["x"].numel())])
        torch.distributed.all_reduce(total, group=self.groups["dp"])
        mean = (total[0] / total[1]).repeat(len(batch))
        return TensorDict({"y": y, "mean": mean}, batch_size=batch.batch_size)


class RigidWorker(MeshWorker):
    """A library that keeps its layout in globals."""

    @classmethod
    def one_layout_per_process(cls, kwargs: Mapping[str, Any]) -> bool:
        return True


@pytest.fixture(scope="module")
def executor(cluster_address: str) -> Iterator[RayExecutor]:
    deadlines = {"start_timeout_s": 180.0, "call_timeout_s": 120.0, "collective_timeout_s": 60.0}
    with RayExecutor(address=cluster_address, **deadlines) as executor:
        yield executor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def groups(executor: RayExecutor, model: Path) -> dict[str, WorkerGroup]:
    kwargs = {"model": str(model), "backend": "fsdp"}
    specs = {
        "actor": WorkerSpec(
            worker=TracedActor,
            topology=LAYOUTS["actor"],
            kwargs={**kwargs, "training": replace(CONFIG, shard="layer"), "rollout": "transformers"},
        ),
        "critic": WorkerSpec(worker=CriticWorker, topology=LAYOUTS["critic"], kwargs={**kwargs, "training": CONFIG}),
        "mesh": WorkerSpec(worker=MeshWorker, topology=LAYOUTS["mesh"]),
    }
    return executor.build_groups(ResourcePool([4], device="cpu", name="shared"), specs, fused=True)


def _batch() -> TensorDict:
    """Seven rows of ragged lengths, so that no rank has what another has."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(2 + row % 3, 1 + (5 * row) % 7) for row in range(7)]

    def ragged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, (length,), generator=generator)

    return TensorDict(
        {
            "prompt_ids": ragged([tokens(prompt) for prompt, _ in lengths]),
            "response_ids": ragged([tokens(response) for _, response in lengths]),
            "response_mask": ragged([torch.ones(response, dtype=torch.bool) for _, response in lengths]),
            "returns": ragged([torch.randn(response, generator=generator) for _, response in lengths]),
            "values": ragged([torch.zeros(response) for _, response in lengths]),
            "x": torch.randn(7, 6, generator=generator),
        },
        batch_size=[7],
    )


class PlainTraining:
    """The same model in this process: transformers, torch's AdamW, one sequence after another, nothing padded."""

    def __init__(self, directory: Path, head: str) -> None:
        from transformers import AutoModelForCausalLM

        self.head = head
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if head == "value":
            self.model.config.tie_word_embeddings = False
            self.model.set_output_embeddings(torch.nn.Linear(self.model.config.hidden_size, 1, bias=False))
            torch.nn.init.zeros_(self.model.get_output_embeddings().weight)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=CONFIG.learning_rate, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.0
        )

    def score(self, batch: TensorDict) -> list[torch.Tensor]:
        """Log-probs, or values, of each row's response tokens."""
        scores = []
        for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
            output = self.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            if self.head == "value":
                scores.append(output[:, 0])
            else:
                scores.append(output.log_softmax(-1).gather(-1, response[:, None])[:, 0])
        return scores

    def step(self, batch: TensorDict) -> float:
        """One step on the mean over all response tokens; the loss."""
        scores = torch.cat(self.score(batch))
        loss = -scores.mean() if self.head == "lm" else (scores - batch["returns"].values()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG.max_grad_norm)
        self.optimizer.step()
        return float(loss.detach())


def _assert_rows(got: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(got.unbind(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_roles_train_under_their_own_layouts(groups: dict[str, WorkerGroup], model: Path) -> None:
    assert len(set(LAYOUTS.values())) == 3
    actor, critic, mesh = groups["actor"], groups["critic"], groups["mesh"]
    assert actor.pid().result() == mesh.pid().result()

    batch = _batch()
    made = [  # nothing waits for a result: the three roles' calls interleave in every process
        (
            actor.update_actor(batch, SupervisedLoss()),
            mesh.project(batch),
            critic.update_critic(batch, SquaredValues()),
        )
        for _ in range(3)
    ]
    logprobs, values = actor.compute_logprobs(batch), critic.compute_values(batch)

    policy, value = PlainTraining(model, "lm"), PlainTraining(model, "value")
    for trained, projected, fitted in made:
        assert trained.result()["supervised/loss"] == pytest.approx(policy.step(batch), rel=1e-4)
        assert fitted.result()["critic/loss"] == pytest.approx(value.step(batch), rel=1e-4)
        torch.testing.assert_close(projected.result()["y"], batch["x"] @ torch.arange(12.0).view(2, 6).T)
        assert projected.result()["mean"].tolist() == pytest.approx([float(batch["x"].mean())] * 7)
    _assert_rows(logprobs.result()["old_logprobs"], policy.score(batch))
    _assert_rows(values.result()["values"], value.score(batch))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_library_that_keeps_its_layout_in_globals_is_refused(executor: RayExecutor) -> None:
    specs = {
        "rigid": WorkerSpec(worker=RigidWorker, topology=LAYOUTS["mesh"]),
        "other": WorkerSpec(worker=MeshWorker, topology=LAYOUTS["critic"]),
    }
    with pytest.raises(ProtocolError) as refused:
        executor.build_groups(ResourcePool([4], device="cpu", name="refused"), specs, fused=True)
    for part in ("rigid", "1-2-2", "1-1-4", "fused=True"):
        assert part in str(refused.value), part


def _megatron_specs(model: Path, actor: ParallelSpec, critic: ParallelSpec) -> dict[str, WorkerSpec]:
    kwargs = {"model": str(model), "backend": "megatron", "training": CONFIG}
    rollout = {"rollout": "transformers"}
    return {
        "actor": WorkerSpec(worker=ActorWorker, topology=Topology(actor, GenerationSpec()), kwargs=kwargs | rollout),
        "critic": WorkerSpec(worker=CriticWorker, topology=Topology(critic), kwargs=kwargs),
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_fused_megatron_roles_of_different_layouts_are_refused(model: Path) -> None:
    specs = _megatron_specs(model, ParallelSpec(tp_size=2), ParallelSpec(pp_size=2))
    with InProcessExecutor() as executor, pytest.raises(ProtocolError) as refused:
        executor.build_groups(ResourcePool([2], device="cpu", name="refused"), specs, fused=True)
    for part in ("actor, critic cannot share", "actor is 1-2-1 generation pp-tp 1-1", "critic is 2-1-1", "fused=True"):
        assert part in str(refused.value), part


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_megatron_roles_of_one_layout_share_processes(executor: RayExecutor, model: Path) -> None:
    specs = _megatron_specs(model, ParallelSpec(tp_size=2), ParallelSpec(tp_size=2))
    pool = ResourcePool([2], device="cpu", name="megatron")
    groups = executor.build_groups(pool, specs, fused=True)
    batch = _batch()
    logprobs, values = groups["actor"].compute_logprobs(batch), groups["critic"].compute_values(batch)
    _assert_rows(logprobs.result()["old_logprobs"], PlainTraining(model, "lm").score(batch))
    _assert_rows(values.result()["values"], PlainTraining(model, "value").score(batch))
    executor.release(pool)
