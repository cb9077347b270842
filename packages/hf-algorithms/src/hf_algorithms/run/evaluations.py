"""The sets of `[[evaluation]]` in a run: evaluated when their iteration has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_algorithms.evaluation.responses import ResponseScorer, name_metrics
from hf_algorithms.evaluation.sets import evaluate_set
from hf_algorithms.run.deadlines import evaluation_deadline

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.preflight.evaluation_sets import EvaluationInputs
    from hf_algorithms.preflight.inputs import ModelInputs
    from hf_algorithms.roles import Roles
    from hf_controller import Executor

__all__ = ["RunEvaluations"]


@dataclass
class RunEvaluations:
    """Evaluates the sets of a run; their metric functions run in processes of their own.

    Attributes:
        config: of the run.
        inputs: of the run.
        executor: of the run.
        roles: of the run.
        search_path: folders where modules of metrics are looked for first.
    """

    config: Config
    inputs: ModelInputs
    executor: Executor
    roles: Roles
    search_path: Sequence[str] = ()
    _scorers: dict[str, ResponseScorer] = field(default_factory=dict, init=False)

    def evaluate_due(self, iteration: int, *, is_last: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns the metrics and the samples of the sets whose turn it is after an iteration.

        Raises:
            RewardError: if a metric function fails, or scores no row of a set.
        """
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for each in self.inputs.evaluations:
            if not is_last and iteration % (each.config.every or self.config.run.eval_every):
                continue
            with self.executor.deadline(evaluation_deadline(self.config)):
                result = evaluate_set(
                    each.config.name,
                    each.data,
                    executor=self.executor,
                    group=self.roles.having("generate_sequences"),
                    turns=self.inputs.turns,
                    sampling=each.build_sampling(self.config, stop_ids=self.inputs.stop_ids),
                    scorer=self._find_scorer(each),
                    keep=samples.extend,
                )
            metrics |= result.to_metrics()
        return metrics, samples

    def close(self) -> None:
        """Ends the processes of the metric functions."""
        for scorer in self._scorers.values():
            scorer.close()

    def _find_scorer(self, evaluation: EvaluationInputs) -> ResponseScorer:
        """Built when a set is first evaluated, and kept."""
        name = evaluation.config.name
        if name not in self._scorers:
            reward = self.config.reward
            self._scorers[name] = ResponseScorer(
                name_metrics(evaluation.functions, key="metrics"),
                self.inputs.turns,
                search_path=self.search_path,
                answer_name=self.config.data.answer_field or "answer",
                num_processes=reward.processes,
                allowed_hosts=reward.allowed_hosts,
            )
        return self._scorers[name]
