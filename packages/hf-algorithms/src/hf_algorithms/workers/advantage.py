"""Advantages: one process that sees the whole batch, and only its [B, T] columns (design of the data flow)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hf_algorithms.jagged import pad_rows, unpad_rows
from hf_algorithms.workers._model import Metrics
from hf_controller import Worker
from hf_protocols import RANK_ZERO, register

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["AdvantageWorker"]

Estimator = Callable[[Mapping[str, "torch.Tensor"]], dict[str, "torch.Tensor"]]


class AdvantageWorker(Worker):
    """Numerical work over a whole batch: whitening and groups see every row."""

    needs_process_group = False

    @register(
        protocol=RANK_ZERO,
        reads=("response_mask", "scores", "old_logprobs", "ref_logprobs?", "values?"),
        writes=("advantages", "returns"),
    )
    def compute_advantages(self, batch: TensorDict, estimator: Estimator) -> TensorDict:
        """What ``estimator`` makes of the padded columns: ``advantages`` and ``returns``, jagged [B, T]."""
        from tensordict import TensorDict

        padded = {str(name): pad_rows(batch[name]) for name, _ in batch.items()}
        padded["response_mask"] = padded["response_mask"].bool()
        columns = {name: unpad_rows(value, batch["response_mask"]) for name, value in estimator(padded).items()}
        return TensorDict(columns, batch_size=batch.batch_size)

    @register(
        protocol=RANK_ZERO,
        returns="metrics",
        reads=("response_mask", "scores", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
    )
    def compute_metrics(self, batch: TensorDict, *, compares_sampler: bool = True) -> Metrics:
        """Means over responses: score, divergence from the reference, tokens; and the sampler's mismatch.

        ``kl/k1``, ``kl/k2`` and ``kl/k3`` estimate the KL to the reference in nats per trained token (see
        `estimate_kl`); ``kl_sequence/k1`` and ``kl_sequence/k3`` are sums over the trained tokens of a response.
        ``response/tokens`` counts trained tokens.

        ``rollout/logprob_gap`` is the mean over trained tokens of |sampler's log-prob - trainer's|, ``..._max`` the
        largest, ``..._share`` the share of tokens above `GAP_BOUND`. They are left out where the sampler's log-probs
        were taken as old ones: then there is nothing to compare before the update. Means over tokens are left out where
        there is no trained token.
        """
        from hf_algorithms.kl import estimate_kl
        from hf_algorithms.losses import GAP_BOUND

        rows = float(len(batch))
        mask = pad_rows(batch["response_mask"]).bool()
        old, reference, sampled = (
            pad_rows(batch[name])[mask] for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        )
        tokens = float(len(old))
        sums = {name: float(each.sum()) for name, each in estimate_kl(old, reference).items()}
        metrics = {
            "reward/mean": (float(batch["scores"].sum()), rows),
            "response/tokens": (tokens, rows),
            **{f"kl_sequence/{name}": (sums[name], rows) for name in ("k1", "k3")},
        }
        if not tokens:
            return metrics
        metrics |= {f"kl/{name}": (each, tokens) for name, each in sums.items()}
        if compares_sampler:
            gaps = (sampled - old).abs()
            metrics["rollout/logprob_gap"] = (float(gaps.sum()), tokens)
            metrics["rollout/logprob_gap_max"] = (float(gaps.max()), 1.0)
            metrics["rollout/logprob_gap_share"] = (float((gaps > GAP_BOUND).sum()), tokens)
        return metrics
