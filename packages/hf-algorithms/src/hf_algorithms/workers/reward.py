"""Rewards and costs: roles whose workers call Python functions on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import decode_responses, load_tokenizer
from hf_algorithms.jagged import decode_text
from hf_algorithms.rewards import RewardFunction, compute_scores, load_function
from hf_controller import Worker, WorkerContext
from hf_protocols import DP, RANK_ZERO, register

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.workers._setup import RoleSetup

__all__ = ["CostWorker", "RewardWorker"]

_READS = ("prompt_ids", "response_ids", "answer", "sample_id?")


class _TextFunctionWorker(Worker):
    """One rank of a role that calls a function of texts; it needs no model and no process group.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        stop_ids: tokens at which responses end, which no text has.
        function: `module:function` that scores responses.
        search_path: folders where the functions' modules are looked for first.
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
        stop_ids: Sequence[int] = (),
        function: str,
        search_path: Sequence[str],
    ) -> None:
        super().__init__(context)
        self._tokenizer = load_tokenizer(tokenizer)
        self._stop_ids = frozenset(stop_ids)
        self._function = load_function(function, search_path=search_path)

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
        prompts, responses = ([row.tolist() for row in batch[name].unbind()] for name in ("prompt_ids", "response_ids"))
        return (
            decode_responses(self._tokenizer, prompts),
            decode_responses(self._tokenizer, responses, stop_ids=self._stop_ids),
            decode_text(batch["answer"]),
        )


class RewardWorker(_TextFunctionWorker):
    """One rank of the reward.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        stop_ids: tokens at which responses end, which no text has.
        function: `module:function` that scores responses.
        metric: `module:function` that scores responses in evaluations.
        search_path: folders where the functions' modules are looked for first.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        tokenizer: str,
        stop_ids: Sequence[int] = (),
        function: str,
        metric: str,
        search_path: Sequence[str],
    ) -> None:
        super().__init__(context, tokenizer=tokenizer, stop_ids=stop_ids, function=function, search_path=search_path)
        self._metric = load_function(metric, search_path=search_path)

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        reward = setup.config.reward
        return {
            "tokenizer": setup.model.tokenizer_path,
            "stop_ids": setup.stop_ids,
            "function": reward.function,
            "metric": reward.metric,
            "search_path": list(setup.search_path),
        }

    @register(protocol=DP, reads=_READS, writes=("scores",))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        """`scores` float32 [B], one for each response; NaN where the function answers None or NaN.

        Raises:
            RewardError: if the function raises, or does not answer one number, NaN or None for each response.
        """
        import torch

        return self._score(self._function, batch, "scores", torch.float32, may_be_unscorable=True)

    @register(protocol=DP, reads=_READS, writes=("metric_scores",))
    def compute_metric(self, batch: TensorDict) -> TensorDict:
        """``metric_scores`` float64 [B]: what the metric function counts for each response.

        Raises:
            RewardError: as `compute_reward` does.
        """
        import torch

        return self._score(self._metric, batch, "metric_scores", torch.float64)

    @register(protocol=RANK_ZERO, returns="object", reads=_READS)
    def collect_samples(self, batch: TensorDict) -> list[dict[str, Any]]:
        """Prompt, response, answer and score of every row, as texts."""
        prompts, responses, answers = self._texts(batch)
        scores = compute_scores(self._metric, prompts, responses, answers)
        rows = zip(prompts, responses, answers, scores, strict=True)
        return [dict(zip(("prompt", "response", "answer", "score"), row, strict=True)) for row in rows]


class CostWorker(_TextFunctionWorker):
    """One rank of the cost of a constraint."""

    kind = "cost"

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        return {
            "tokenizer": setup.model.tokenizer_path,
            "stop_ids": setup.stop_ids,
            "function": setup.config.cost.function,
            "search_path": list(setup.search_path),
        }

    @register(protocol=DP, reads=_READS, writes=("costs",))
    def compute_cost(self, batch: TensorDict) -> TensorDict:
        """`costs` float32 [B], one for each response, above 0 for what is unwanted; NaN where it is not known.

        Raises:
            RewardError: if the function raises, or does not answer one number for each response.
        """
        import torch

        return self._score(self._function, batch, "costs", torch.float32, may_be_unscorable=True)

    @register(protocol=RANK_ZERO, returns="object", reads=("costs",))
    def list_costs(self, batch: TensorDict) -> list[float]:
        """Returns the costs as numbers, for a multiplier on the controller."""
        costs: list[float] = batch["costs"].tolist()
        return costs
