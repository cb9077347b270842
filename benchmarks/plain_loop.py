"""A plain transformers and torch loop over ready micro-batches: what a training backend is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_engine import TrainConfig
from hf_engine.training.micro_batches import SequenceBatch

__all__ = ["PlainLoop"]


class PlainLoop:
    """A causal model with float32 weights and torch's fused AdamW.

    Args:
        model: directory.
        batch: prompts and responses in jagged columns; sorted and padded here, before any step.
        config: learning rate, betas, clipping, tokens of a micro-batch, the computation's dtype, and whether
            activations are computed again.
        num_tokens: by which the loss is divided for its gradients.
        device: of the model.
    """

    def __init__(
        self, model: str | Path, batch: Any, config: TrainConfig, num_tokens: float, *, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        if config.activation_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=True
        )
        self._micro_batches: Sequence[Any] = SequenceBatch(batch).micro_batches(config.micro_batch_tokens)
        self._config, self._num_tokens, self._device = config, num_tokens, device

    def update(self) -> tuple[float, float]:
        """Makes one optimizer step; returns the loss, summed over the response tokens, and the gradient norm."""
        total = 0.0
        for each in self._micro_batches:
            loss = self._score(each, "sum")
            (loss / self._num_tokens).backward()
            total += float(loss.detach())
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, float(grad_norm)

    @torch.no_grad()
    def logprobs(self) -> list[torch.Tensor]:
        """Returns the log-probs of each micro-batch's response tokens, float32 [tokens]."""
        return [-self._score(each, "none") for each in self._micro_batches]

    def _score(self, each: Any, reduction: str) -> torch.Tensor:
        """Negative log-probs of the response tokens."""
        device = self._device
        dtype = getattr(torch, self._config.dtype)
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            hidden = self._model.model(
                input_ids=each.input_ids.to(device),
                attention_mask=each.attention_mask.to(device),
                position_ids=each.position_ids.to(device),
                use_cache=False,
            ).last_hidden_state
            logits = self._model.lm_head(hidden.flatten(0, 1)[each.predicting_positions.to(device)])
        labels = each.response_ids[each.response_mask].to(device)
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction=reduction)
