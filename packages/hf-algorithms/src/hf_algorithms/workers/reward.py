"""Rewards and costs: roles whose workers call Python functions on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import load_tokenizer
from hf_algorithms.jagged import decode_text
from hf_algorithms.rewards import RewardFunction, combine_scores, compute_scores, load_function
from hf_controller import Worker, WorkerContext
from hf_protocols import DP, RANK_ZERO, register

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.workers._setup import RoleSetup

__all__ = ["EVALUATED", "CostWorker", "RewardWorker"]

_READS = ("prompt_ids", "response_ids", "answer", "sample_id?")

EVALUATED = ("compute_metric", "collect_samples")
"""Methods that read a model's scores only where evaluation averages them."""


class _TextFunctionWorker(Worker):
    """One rank of a role that calls a function of texts; it needs no model and no process group.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        function: `module:function` that scores responses; None: a model alone scores them.
        search_path: folders where the functions' modules are looked for first.
        model_weight: of the column `model_scores`, which another role's model computes; None without such a model.
    """

    needs_process_group = False
    phase = "score"
    kind = "reward"
    """Of the functions, in messages."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        tokenizer: str,
        function: str | None,
        search_path: Sequence[str],
        model_weight: float | None = None,
    ) -> None:
        super().__init__(context)
        self._tokenizer = load_tokenizer(tokenizer)
        self._function = None if function is None else load_function(function, search_path=search_path)
        self._model_weight = model_weight

    def _combine(self, batch: TensorDict, column: str) -> TensorDict:
        """The weighted sum of the function's scores and the model's, as one float32 column [B]."""
        import torch
        from tensordict import TensorDict

        parts: dict[str, tuple[float, torch.Tensor]] = {}
        if self._function is not None:
            found = self._score(self._function, batch, column, torch.float64, may_be_unscorable=True)
            parts["function"] = (1.0, found[column])
        if self._model_weight is not None:
            parts["model"] = (self._model_weight, batch["model_scores"])
        return TensorDict({column: combine_scores(parts).float()}, batch_size=batch.batch_size)

    def _score(
        self,
        function: RewardFunction,
        batch: TensorDict,
        column: str,
        dtype: torch.dtype,
        *,
        may_be_unscorable: bool = False,
    ) -> TensorDict:
        import torch
        from tensordict import TensorDict

        found = compute_scores(
            function,
            *self._texts(batch),
            samples=batch["sample_id"].tolist() if "sample_id" in batch else None,
            may_be_unscorable=may_be_unscorable,
            kind=self.kind,
        )
        return TensorDict({column: torch.tensor(found, dtype=dtype)}, batch_size=batch.batch_size)

    def _texts(self, batch: TensorDict) -> tuple[list[str], list[str], list[str]]:
        prompts, responses = (
            self._tokenizer.batch_decode([row.tolist() for row in batch[name].unbind()], skip_special_tokens=True)
            for name in ("prompt_ids", "response_ids")
        )
        return prompts, responses, decode_text(batch["answer"])


class RewardWorker(_TextFunctionWorker):
    """One rank of the reward.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        metric: `module:function` that scores responses in evaluations; None: a model's scores count.
        options: of every such worker.
    """

    def __init__(
        self, context: WorkerContext, *, metric: str | None, search_path: Sequence[str], **options: Any
    ) -> None:
        super().__init__(context, search_path=search_path, **options)
        self._metric = None if metric is None else load_function(metric, search_path=search_path)

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        reward = setup.config.reward
        return {
            "tokenizer": setup.model.tokenizer_path,
            "function": reward.function if reward.uses_function else None,
            "metric": None if reward.evaluates_model else reward.metric,
            "search_path": list(setup.search_path),
            "model_weight": None if reward.model is None else reward.model.weight,
        }

    @register(protocol=DP, reads=(*_READS, "model_scores?"), writes=("scores",))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        """`scores` float32 [B], one for each response; NaN where the function answers None or NaN.

        With a reward model, its score times its weight is added.

        Raises:
            RewardError: if the function raises, or does not answer one number, NaN or None for each response.
        """
        return self._combine(batch, "scores")

    @register(protocol=DP, reads=(*_READS, "model_scores?"), writes=("metric_scores",))
    def compute_metric(self, batch: TensorDict) -> TensorDict:
        """``metric_scores`` float64 [B]: what the metric function counts for each response.

        Raises:
            RewardError: as `compute_reward` does.
        """
        import torch
        from tensordict import TensorDict

        if self._metric is None:
            return TensorDict({"metric_scores": batch["model_scores"].double()}, batch_size=batch.batch_size)
        return self._score(self._metric, batch, "metric_scores", torch.float64)

    @register(protocol=RANK_ZERO, returns="object", reads=(*_READS, "model_scores?"))
    def collect_samples(self, batch: TensorDict) -> list[dict[str, Any]]:
        """Prompt, response, answer and score of every row, as texts."""
        prompts, responses, answers = self._texts(batch)
        if self._metric is None:
            scores = batch["model_scores"].tolist()
        else:
            scores = compute_scores(self._metric, prompts, responses, answers)
        rows = zip(prompts, responses, answers, scores, strict=True)
        return [dict(zip(("prompt", "response", "answer", "score"), row, strict=True)) for row in rows]


class CostWorker(_TextFunctionWorker):
    """One rank of the cost of a constraint."""

    kind = "cost"

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        cost = setup.config.cost
        return {
            "tokenizer": setup.model.tokenizer_path,
            "function": cost.function,
            "search_path": list(setup.search_path),
            "model_weight": None if cost.model is None else cost.model.weight,
        }

    @register(protocol=DP, reads=(*_READS, "model_scores?"), writes=("costs",))
    def compute_cost(self, batch: TensorDict) -> TensorDict:
        """`costs` float32 [B], one for each response, above 0 for what is unwanted; NaN where it is not known.

        With a cost model, its score times its weight is added.

        Raises:
            RewardError: if the function raises, or does not answer one number for each response.
        """
        return self._combine(batch, "costs")

    @register(protocol=RANK_ZERO, returns="object", reads=("costs",))
    def list_costs(self, batch: TensorDict) -> list[float]:
        """Returns the costs as numbers, for a multiplier on the controller."""
        costs: list[float] = batch["costs"].tolist()
        return costs
