"""The reward: a role whose worker calls Python functions on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import load_tokenizer
from hf_algorithms.jagged import decode_text
from hf_algorithms.rewards import RewardFunction, compute_scores, load_function
from hf_controller import Worker, WorkerContext
from hf_protocols import DP, RANK_ZERO, register

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.workers._setup import RoleSetup

__all__ = ["RewardWorker"]

_READS = ("prompt_ids", "response_ids", "answer")


class RewardWorker(Worker):
    """One rank of the reward; it needs no model and no process group.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        function: ``module:function`` that scores responses.
        metric: ``module:function`` that scores responses in evaluations.
        search_path: folders where the functions' modules are looked for first.
    """

    needs_process_group = False

    def __init__(
        self, context: WorkerContext, *, tokenizer: str, function: str, metric: str, search_path: Sequence[str]
    ) -> None:
        super().__init__(context)
        self._tokenizer = load_tokenizer(tokenizer)
        self._function = load_function(function, search_path=search_path)
        self._metric = load_function(metric, search_path=search_path)

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        reward = setup.config.reward
        return {
            "tokenizer": setup.model.tokenizer_path,
            "function": reward.function,
            "metric": reward.metric,
            "search_path": list(setup.search_path),
        }

    @register(protocol=DP, reads=_READS, writes=("scores",))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        """``scores`` float32 [B], one for each response.

        Raises:
            RewardError: if the function raises, or does not answer one finite number for each response.
        """
        import torch

        return self._score(self._function, batch, "scores", torch.float32)

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

    def _score(self, function: RewardFunction, batch: TensorDict, column: str, dtype: torch.dtype) -> TensorDict:
        import torch
        from tensordict import TensorDict

        scores = torch.tensor(compute_scores(function, *self._texts(batch)), dtype=dtype)
        return TensorDict({column: scores}, batch_size=batch.batch_size)

    def _texts(self, batch: TensorDict) -> tuple[list[str], list[str], list[str]]:
        prompts, responses = (
            self._tokenizer.batch_decode([row.tolist() for row in batch[name].unbind()], skip_special_tokens=True)
            for name in ("prompt_ids", "response_ids")
        )
        return prompts, responses, decode_text(batch["answer"])
