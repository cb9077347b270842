"""The part of `conformance_trl.py` that compares PPO, which TRL shipped last in 1.12.0.

Its trainer's loop is one function. It runs here over given responses, rewards, values and log-probs, and ends at the
first backward pass. Advantages are what it whitens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from conformance import SEEDS, Comparison, answer, build_parts, draw_batch, namespace

INSTALLS = (
    (
        *("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "tokenizers==0.23.3"),
        *("trl==1.12.0", "pydantic", "tensordict"),
    ),
)
WIDTH = 11
_MODULE = "trl.experimental.ppo.ppo_trainer"


class _LossReachedError(Exception):
    """Ends the trainer's loop where it has its loss."""


def main() -> int:
    """Run in the environment of TRL 1.12.0."""
    from importlib.metadata import version

    comparison = Comparison()
    for seed in SEEDS:
        for case, ragged in (("ppo", False), ("ppo on ragged rows", True)):
            _compare(comparison, case, seed, ragged=ragged)
    answer(comparison, {"trl (PPO)": version("trl")})
    return 0


def _compare(comparison: Comparison, case: str, seed: int, *, ragged: bool) -> None:
    batch = draw_batch(seed, width=WIDTH, holes=False)
    if not ragged:
        batch["response_mask"] |= True
        batch["lengths"] = torch.full_like(batch["lengths"], WIDTH)
    mask = batch["response_mask"]
    logprobs, values = batch["logprobs"].clone().requires_grad_(), batch["new_values"].clone().requires_grad_()
    loss, advantages, weight = _run_trainer(batch, logprobs, values)
    theirs = torch.autograd.grad(loss, (logprobs, values))

    parts = build_parts("ppo", "trl", max_new_tokens=WIDTH, mini_batches=2)
    assert parts.value_loss is not None
    # the value after a response, where the trainer's table has room for it
    has_room, rows = batch["lengths"] < WIDTH, torch.arange(len(mask))
    after = batch["lengths"].clamp(max=WIDTH - 1)
    batch["next_values"] = torch.where(has_room, batch["values"][rows, after], torch.nan)
    batch |= parts.estimator(batch)
    comparison.compare(f"{case}/advantages", batch["advantages"], advantages, mask)
    learned = _add_positions(batch, has_room, after)
    own_loss = parts.aggregate(logprobs, batch) + weight * parts.aggregate(values, learned, loss=parts.value_loss)
    comparison.compare(f"{case}/loss", own_loss, loss)
    masks = (mask, learned["response_mask"])
    for ours, their, trained in zip(torch.autograd.grad(own_loss, (logprobs, values)), theirs, masks, strict=True):
        size = float(their[trained].abs().max())
        comparison.compare(f"{case}/gradient", ours / size, their / size, trained)


def _add_positions(batch: dict[str, Any], has_room: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    """The critic's columns with the position after each response, as its worker adds them."""
    found = {name: batch[name].clone() for name in ("response_mask", "returns", "values")}
    rows = has_room.nonzero()[:, 0]
    found["response_mask"][rows, after[rows]] = True
    found["returns"][rows, after[rows]] = batch["next_returns"][rows]
    return found


def _run_trainer(
    batch: dict[str, Any], logprobs: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The trainer's loss, its whitened advantages [B, T] and the weight of the value loss in the loss."""
    from trl.experimental.ppo import ppo_trainer

    rows = len(logprobs)
    is_response = torch.arange(WIDTH) < batch["lengths"][:, None]
    # The prompt is one token, the row's number, by which shuffled rows are known.
    queries = torch.arange(rows)[:, None] + 10
    sequences = torch.cat([queries, is_response.long()], 1)
    seen: dict[str, torch.Tensor] = {}

    def lay(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[B, 1 + T, 1]: what stands before each response token."""
        of_rows = table[ids[:, 0] - 10]
        return torch.cat([of_rows, torch.zeros_like(of_rows[:, :1])], 1)[..., None]

    def forward(model: Any, ids: torch.Tensor, pad: int) -> Any:
        if model == "reference":
            return namespace(logits=lay(batch["ref_logprobs"], ids))
        return namespace(logits=lay(logprobs, ids)), lay(values, ids)

    def get_reward(model: Any, ids: torch.Tensor, pad: int, length: int) -> tuple[Any, ...]:
        if model == "reward":
            return None, batch["scores"][ids[:, 0] - 10].clone(), None
        return lay(batch["values"], ids), None, None

    def backward(loss: torch.Tensor) -> None:
        seen["loss"] = loss
        raise _LossReachedError

    original = ppo_trainer.masked_whiten

    def whiten(given: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        seen["advantages"] = original(given, mask, shift_mean)
        return seen["advantages"]

    @contextmanager
    def unwrap(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield namespace(policy=None)

    replaced = {
        "unwrap_model_for_generation": unwrap,
        "batch_generation": lambda *arguments: (sequences, batch["old_logprobs"][..., None]),
        "selective_log_softmax": lambda logits, ids: logits.squeeze(-1),
        "forward": forward,
        "get_reward": get_reward,
        "masked_whiten": whiten,
    }
    peer = _build_peer(queries, backward)
    with mock.patch.multiple(_MODULE, **replaced), suppress(_LossReachedError):
        peer.train()
    return seen["loss"], seen["advantages"], float(peer.args.vf_coef)


def _build_peer(queries: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> Any:
    """The trainer without models, at its first batch: `queries` [B, 1], one prompt a row."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    rows = len(queries)

    class PpoPeer(PPOTrainer):
        def __init__(self) -> None:
            self.args = PPOConfig(
                output_dir=tempfile.gettempdir(),
                use_cpu=True,
                bf16=False,
                report_to="none",
                per_device_train_batch_size=rows,
                response_length=WIDTH,
                temperature=1.0 - 1e-7,  # the loop adds as much
                local_rollout_forward_batch_size=rows,
                total_episodes=rows,
            )
            self.args.num_total_batches = 1
            self.args.batch_size = self.args.local_batch_size = self.args.local_mini_batch_size = rows
            self.accelerator = namespace(
                device=torch.device("cpu"),
                print=lambda *words: None,
                unwrap_model=lambda model: namespace(value_model="values"),
                accumulate=lambda model: nullcontext(),
                backward=backward,
            )
            self.optimizer = None
            self.model = namespace(train=lambda: None)
            self.ref_model, self.reward_model = "reference", "reward"
            self.processing_class = namespace(pad_token_id=0, eos_token_id=1)
            self.dataloader = [{"input_ids": queries}]
            self.train_dataset_len, self.stop_token_id, self.control = rows, None, None
            self.state, self.is_deepspeed_enabled = namespace(), False
            self.callback_handler = namespace(on_train_begin=lambda *arguments: None)

    return PpoPeer()


if __name__ == "__main__":
    sys.exit(main())
