"""Compares online DPO with TRL 1.16.0's: the loss of pairs and its gradient. `conformance_trl.py` runs it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from conformance import Comparison, build_parts, draw_batch, namespace

WIDTH = 11
PROMPTS = 8


def compare(comparison: Comparison, seed: int) -> None:
    """Compares both losses on distinct scores, and the first on equal ones."""
    for case, keys, options in (
        ("online_dpo", {}, {}),
        ("online_dpo, IPO", {"preference_loss": "ipo"}, {"loss_type": "ipo"}),
        ("online_dpo with equal scores", {}, {}),
    ):
        batch = draw_batch(seed, width=WIDTH, groups=PROMPTS, samples=2, holes=False)
        if "equal" not in case:
            batch["scores"] = torch.randn(
                2 * PROMPTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
        # Rows of a pair see each other's log-probs, computed again before every update.
        batch["old_logprobs"] = batch["logprobs"]
        parts = build_parts("online_dpo", "trl", **keys)
        columns = {**batch, **parts.estimator(batch)}
        peer = _build_peer(batch, **options)
        comparison.compare_losses(
            case,
            lambda logprobs, parts=parts, columns=columns: parts.aggregate(logprobs, columns),
            lambda logprobs, peer=peer: peer.compute(logprobs),
            batch["logprobs"],
            batch["response_mask"],
        )


def _build_peer(batch: dict[str, Any], **options: Any) -> Any:
    """TRL's trainer without a model: responses, scores and log-probs are those of `batch`.

    TRL has the first responses to all prompts, then the second ones; here a prompt's two stand together.
    """
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **options)
    order = torch.arange(2 * PROMPTS).view(PROMPTS, 2).T.flatten()
    mask = batch["response_mask"][order]

    class DpoPeer(OnlineDPOTrainer):
        def __init__(self) -> None:
            self.args = args
            self._beta = args.beta[0] if isinstance(args.beta, list) else args.beta
            self.model, self.ref_model = torch.nn.Module(), torch.nn.Module()
            self.eos_token_ids = [2]
            self.processing_class = namespace(batch_decode=lambda ids, **others: [""] * len(ids))
            self.reward_funcs = [None]
            self.stats = defaultdict(list)
            self.state = namespace(global_step=1, epoch=0)
            self.accelerator = namespace(gather_for_metrics=lambda value: value, backward=self.take)

        def take(self, loss: torch.Tensor, **others: Any) -> None:
            self.loss = loss

        def _generate(self, model: Any, prompts: list[Any], images: Any = None) -> tuple[Any, ...]:
            ids = torch.ones_like(mask, dtype=torch.long)
            return ids[:, :1], ids[:, :1], ids, mask.long(), None

        def _forward(self, model: Any, *arguments: Any) -> torch.Tensor:
            return (batch["ref_logprobs"] if model is self.ref_model else self.given)[order]

        def _calculate_rewards_from_functions(self, *arguments: Any, **others: Any) -> torch.Tensor:
            return batch["scores"][order].clone()

        def compute(self, logprobs: torch.Tensor) -> torch.Tensor:
            self.given = logprobs
            self.training_step(self.model, {"prompt": [""] * PROMPTS})
            return self.loss

    return DpoPeer()
