"""Training next to generation, and checks of the samples by whole forward passes of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_engine import HybridEngine, LoraConfig, SamplingParams, TrainConfig, load_train_backend
from hf_engine.resharding.boxes import Box
from hf_engine.testing._cases import build_batch, build_prompts, greedy_response, rows_of, select_rows
from hf_protocols import THREE_D, Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.resharding.plan import ReshardPlan

__all__ = ["check_greedy_samples", "count_lacking_bytes", "follow_the_training", "train_step"]


def train_step(train: Any, topology: Topology, *, vocab_size: int) -> None:
    """One optimizer step on this rank's rows of a small batch."""
    batch = build_batch(6, vocab_size=vocab_size)
    rows = list(THREE_D.distribute(topology, 6)[dist.get_rank()])

    def loss(outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    train.train_step(select_rows(batch, rows), loss, 18.0)


def follow_the_training(
    rollout: Any,
    model: Path,
    directory: Path,
    topology: Topology,
    *,
    vocab_size: int,
    lora: LoraConfig | None = None,
    tolerance: float = 2e-4,
) -> None:
    """Two steps, each followed by a transition: greedy samples are those of the exported weights.

    Args:
        rollout: the engine, built with the model; it is closed.
        model: what is trained.
        directory: of the export.
        topology: of both.
        vocab_size: token ids of the test prompts stay below it.
        lora: adapters to train in place of the weights.
        tolerance: largest difference of log-probs.

    Raises:
        AssertionError: for other tokens, or log-probs that the training backend does not find.
    """
    from transformers import AutoModelForCausalLM

    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0, lora=lora)
    train = load_train_backend("fsdp").build(model, topology=topology, config=config)
    engine = HybridEngine(train, rollout, topology)
    prompts = build_prompts(4, vocab_size=vocab_size)
    for _ in range(2):
        train_step(train, topology, vocab_size=vocab_size)
        with engine.generation():
            responses = engine.generate(prompts, SamplingParams(max_new_tokens=6, greedy=True))
    train.export_hf(directory)
    exported: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    check_greedy_samples(train, exported, prompts, responses, tolerance=tolerance)
    engine.close()


def check_greedy_samples(
    train: Any, exported: Any, prompts: TensorDict, responses: TensorDict, *, tolerance: float = 1e-4
) -> None:
    """Greedy responses are those of the training weights.

    Args:
        train: the training backend.
        exported: its export, as transformers loads it.
        prompts: what was asked.
        responses: what was answered.
        tolerance: largest difference of log-probs.

    Raises:
        AssertionError: for other tokens, or log-probs that the training backend does not find.
    """
    for prompt, found in zip(rows_of(prompts["prompt_ids"]), rows_of(responses["response_ids"]), strict=True):
        assert torch.equal(found, greedy_response(exported, prompt, len(found), frozenset()))
    trained = rows_of(train.compute_logprobs(prompts.update(responses.select("response_ids")))["logprobs"])
    for ours, theirs in zip(rows_of(responses["rollout_logprobs"]), trained, strict=True):
        off = float((ours - theirs).abs().max())
        assert off < tolerance, f"log-probs of the sampler are {off} off"


def count_lacking_bytes(plan: ReshardPlan, rank: int) -> int:
    """Counts the bytes that a rank wants in float32 and does not hold, element by element."""
    lacking = 0
    for name, shape in plan.target.shapes.items():
        wanted, held = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for layout, mask in ((plan.target, wanted), (plan.source, held)):
            for box in layout.boxes_of(rank).get(name, ()):
                mask[box.slices_in(Box.whole(shape))] = True
        lacking += int((wanted & ~held).sum()) * 4
    return lacking
