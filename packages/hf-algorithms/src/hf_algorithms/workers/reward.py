"""Rewards and costs: roles whose workers call functions on responses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import decode_responses, load_tokenizer
from hf_algorithms.jagged import decode_text, list_rows
from hf_algorithms.rewards import (
    FunctionSpec,
    Samples,
    ScoredSamples,
    ScoringFunctions,
    TrainerState,
    combine_scores,
)
from hf_controller import Worker, WorkerContext
from hf_protocols import RANK_ZERO, ConfigError, RewardError, register
from hf_protocols.validation import show

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.config import CostConfig, RewardConfig
    from hf_algorithms.workers._model import Metrics
    from hf_algorithms.workers._setup import RoleSetup

__all__ = ["EVALUATED", "CostWorker", "RewardWorker"]

_READS = ("prompt_ids", "response_ids", "answer", "sample_id?", "group_id?", "finish_reason?", "row_extra?")
_SCORED = (*_READS, "model_scores?")

_OWN_NUMBERS = frozenset({"mean", "unscorable", "failed"})
"""Numbers of every function, in metrics."""

EVALUATED = ("compute_metric", "collect_samples")
"""Methods that read a model's scores only where evaluation averages them."""


class _FunctionWorker(Worker):
    """One rank of a role that calls functions of texts; it needs no model and no process group.

    Its methods run on rank 0 alone: so no group of responses is split over ranks, and the pool of rank 0 has the cores.

    Args:
        tokenizer: directory or hub name, to read texts from token ids.
        stop_ids: tokens at which responses end, which no text has.
        functions: that score responses; their weighted sum counts. None of them where a model alone scores.
        search_path: folders where the functions' modules are looked for first.
        answer_name: of the answers in the data.
        num_processes: that call functions; by default as many as there are cores.
        metric: function that scores responses in evaluations; None: a model's scores count there.
        model_weight: of the column `model_scores`, which another role's model computes; None without such a model.
    """

    needs_process_group = False
    phase = "score"
    kind = "reward"
    """Of the functions, in messages and before the names of metrics."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        tokenizer: str,
        stop_ids: Sequence[int] = (),
        functions: Sequence[FunctionSpec],
        search_path: Sequence[str],
        answer_name: str = "answer",
        num_processes: int | None = None,
        metric: FunctionSpec | None = None,
        model_weight: float | None = None,
    ) -> None:
        super().__init__(context)
        self._stop_ids = frozenset(stop_ids)
        self._answer_name = answer_name
        self._sums: Metrics = {}
        self._trainer_state = TrainerState()
        self._last: tuple[list[tuple[int, ...]], list[ScoredSamples]] | None = None
        self._scores: dict[tuple[int, ...], dict[str, float]] = {}
        self._is_drained = False
        self._model_weight = model_weight
        self._num_functions = len(functions)
        self._has_metric = metric is not None
        self._functions: ScoringFunctions | None = None
        specs = [*functions, *([] if metric is None else [metric])]
        if context.rank == 0 and specs:
            self._functions = ScoringFunctions(
                specs, search_path=search_path, num_processes=num_processes, kind=self.kind
            )
        self._tokenizer = load_tokenizer(tokenizer)

    @register(protocol=RANK_ZERO, returns="metrics")
    def drain_metrics(self) -> Metrics:
        """Returns what the functions scored since the last call: `reward/NAME/mean` of each, and its further numbers.

        Further numbers are means over responses, those of `log_metric` over what was logged.

        `reward/NAME/unscorable` counts responses that the function did not score, `reward/NAME/failed` those of them
        whose call exceeded its deadline or ended its process. `reward/model/mean` is a model's.
        """
        found, self._sums = self._sums, {}
        self._is_drained = True
        return found

    @register(protocol=RANK_ZERO, returns="object", reads=("sample_id",))
    def recall_scores(self, batch: TensorDict) -> list[dict[str, float]]:
        """Returns the scores of each response by the function's name, or `model`, as they were when they counted.

        Calls no function. Known are the responses that were scored between the last two calls of `drain_metrics`, or
        since; a response that is not known, or that a function did not score, lacks the name.
        """
        return [self._scores.get(tuple(each), {}) for each in batch["sample_id"].tolist()]

    @register(protocol=RANK_ZERO, returns="object")
    def note_progress(self, state: TrainerState) -> None:
        """Takes the progress of the run, which functions of TRL's convention may ask for."""
        self._trainer_state = state

    def _score(self, batch: TensorDict, *, is_counted: bool) -> torch.Tensor:
        """The weighted sum of the functions' scores and the model's, float32 [B]."""
        import torch

        samples = self._read(batch)
        scored: list[ScoredSamples] = []
        specs: Sequence[FunctionSpec] = ()
        if self._num_functions:
            functions = self._require_functions()
            specs = functions.specs[: self._num_functions]
            scored = functions.score(samples, range(self._num_functions))
        if is_counted:
            for spec, each in zip(specs, scored, strict=True):
                self._count(spec.name, each)
            self._last = ([tuple(each) for each in samples.sample_ids], scored)
            self._keep_scores(batch, self._last[0], dict(zip((spec.name for spec in specs), scored, strict=True)))
        parts = {
            spec.name: (spec.weight, torch.tensor(each.scores, dtype=torch.float64))
            for spec, each in zip(specs, scored, strict=True)
        }
        if self._model_weight is not None:
            parts["model"] = (self._model_weight, batch["model_scores"])
            if is_counted:
                self._add("model", "mean", batch["model_scores"].tolist())
        total = combine_scores(parts, required=("model",) if "model" in parts else ())
        for spec, each in zip(specs, scored, strict=True):
            if spec.weight:
                total[torch.tensor(each.failed, dtype=torch.bool)] = torch.nan
        return total.float()

    def _keep_scores(
        self, batch: TensorDict, ids: Sequence[tuple[int, ...]], scored: Mapping[str, ScoredSamples]
    ) -> None:
        if self._is_drained:
            self._scores, self._is_drained = {}, False
        columns = {name: each.scores for name, each in scored.items()}
        if self._model_weight is not None:
            columns["model"] = batch["model_scores"].tolist()
        for row, sample in enumerate(ids):
            known = {name: float(values[row]) for name, values in columns.items()}
            self._scores[sample] = {name: value for name, value in known.items() if math.isfinite(value)}

    def _count(self, name: str, scored: ScoredSamples) -> None:
        """Adds to the metrics: means over the responses that have a number, and numbers of responses."""
        self._add(name, "mean", scored.scores)
        for key, values in scored.metrics.items():
            self._add(name, _rename(key), values)
        for key, (total, number) in scored.logged.items():
            before, count = self._sums.get(f"{self.kind}/{name}/{_rename(key)}", (0.0, 0.0))
            self._sums[f"{self.kind}/{name}/{_rename(key)}"] = (before + total, count + number)
        numbers = {"unscorable": len(scored.scores) - sum(scored.valid), "failed": sum(scored.failed)}
        for key, number in numbers.items():
            before, _ = self._sums.get(f"{self.kind}/{name}/{key}", (0.0, 1.0))
            self._sums[f"{self.kind}/{name}/{key}"] = (before + number, 1.0)

    def _add(self, name: str, key: str, values: Sequence[float]) -> None:
        known = [value for value in values if not math.isnan(value)]
        before, count = self._sums.get(f"{self.kind}/{name}/{key}", (0.0, 0.0))
        self._sums[f"{self.kind}/{name}/{key}"] = (before + sum(known), count + len(known))

    def _require_functions(self) -> ScoringFunctions:
        assert self._functions is not None, "methods run on rank 0, and only these of roles with functions"
        return self._functions

    def _read(self, batch: TensorDict) -> Samples:
        from hf_algorithms.advantages.shaping import TRUNCATED

        ids = {name: list_rows(batch[name]) for name in ("prompt_ids", "response_ids")}
        samples = Samples(
            prompts=decode_responses(self._tokenizer, ids["prompt_ids"]),
            responses=decode_responses(self._tokenizer, ids["response_ids"], stop_ids=self._stop_ids),
            answers=decode_text(batch["answer"]),
            prompt_ids=ids["prompt_ids"],
            response_ids=ids["response_ids"],
            truncated=(batch["finish_reason"] == TRUNCATED).tolist() if "finish_reason" in batch else (),
            groups=batch["group_id"].tolist() if "group_id" in batch else (),
            sample_ids=batch["sample_id"].tolist() if "sample_id" in batch else (),
            answer_name=self._answer_name,
            trainer_state=self._trainer_state,
        )
        if "row_extra" not in batch:
            return samples
        messages, answers, columns = zip(*map(json.loads, decode_text(batch["row_extra"])), strict=True)
        return replace(samples, messages=messages, answers=answers, columns=columns)


class RewardWorker(_FunctionWorker):
    """One rank of the reward."""

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        reward = setup.config.reward
        if reward.evaluates_model:
            return _configure(setup, reward)
        metric = FunctionSpec(name="metric", function=reward.metric, allowed_hosts=reward.allowed_hosts)
        return _configure(setup, reward) | {"metric": metric}

    @register(protocol=RANK_ZERO, reads=_SCORED, writes=("scores",))
    def compute_reward(self, batch: TensorDict, *, is_counted: bool = True) -> TensorDict:
        """`scores` float32 [B]: the weighted sum of the functions' scores; NaN for a response without a score.

        A function that returns None or NaN for a response has no part in its sum. A response has no score where no
        function of a weight other than 0 scores it, or a call exceeded its deadline or ended its process. A reward
        model's score times its weight is added to the sum.

        Args:
            batch: responses.
            is_counted: they count in `drain_metrics`.

        Raises:
            RewardError: if a function raises, or does not answer one number, NaN or None for each response.
        """
        from tensordict import TensorDict

        return TensorDict({"scores": self._score(batch, is_counted=is_counted)}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, reads=_READS, writes=("named_scores",))
    def compute_named_reward(self, batch: TensorDict, name: str) -> TensorDict:
        """`named_scores` float64 [B]: the scores of one function alone; NaN for a response without one.

        For the batch that `compute_reward` has just scored, its scores are used and nothing is called again.

        Raises:
            ConfigError: if no function has this name.
            RewardError: as `compute_reward` does.
        """
        import torch
        from tensordict import TensorDict

        specs = self._functions.specs[: self._num_functions] if self._functions is not None else ()
        names = [spec.name for spec in specs]
        if name not in names:
            raise ConfigError(f"no reward is named {show(name)}. Use one of {', '.join(names) or 'none'}")
        functions = self._require_functions()
        samples = self._read(batch)
        ids = [tuple(each) for each in samples.sample_ids]
        if self._last is not None and ids and self._last[0] == ids:
            scored = self._last[1][names.index(name)]
        else:
            (scored,) = functions.score(samples, [names.index(name)])
        scores = torch.tensor(scored.scores, dtype=torch.float64)
        return TensorDict({"named_scores": scores}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, reads=_SCORED, writes=("metric_scores",))
    def compute_metric(self, batch: TensorDict) -> TensorDict:
        """`metric_scores` float64 [B]: what the metric function counts for each response, or a model's scores.

        A response whose call exceeded its deadline or ended its process counts 0. NaN where the row has no answer and
        the function returns None.

        Raises:
            RewardError: if the function raises, or does not return one number for each response to a row with an
                answer.
        """
        import torch
        from tensordict import TensorDict

        measured, _ = self._measure(batch, self._read(batch))
        scores = torch.tensor(measured, dtype=torch.float64)
        return TensorDict({"metric_scores": scores}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, returns="object", reads=_SCORED)
    def collect_samples(self, batch: TensorDict) -> list[dict[str, Any]]:
        """Prompt, response, answer and score of every row, as texts; the score is None where there is none.

        `extra` has what functions gave `log_extra`.
        """
        samples = self._read(batch)
        measured, logged = self._measure(batch, samples)
        scores = [None if math.isnan(score) else score for score in measured]
        columns = self._collect_columns(samples, logged)
        rows = zip(samples.prompts, samples.responses, samples.answers, scores, strict=True)
        found: list[dict[str, Any]] = [
            dict(zip(("prompt", "response", "answer", "score"), row, strict=True)) for row in rows
        ]
        for row, sample in enumerate(found if columns else ()):
            sample["extra"] = {name: values[row] for name, values in columns.items()}
        return found

    def _collect_columns(self, samples: Samples, logged: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Columns of `log_extra`: those of the metric, then of other functions that name it, which are called here."""
        columns = dict(logged)
        if self._functions is None:
            return columns
        specs = self._functions.specs
        metric = specs[self._num_functions].function if self._has_metric else None
        naming = self._functions.find_naming("log_extra")
        chosen = [number for number in range(self._num_functions) if number in naming]
        chosen = [number for number in chosen if specs[number].function != metric]
        for number, scored in zip(chosen, self._functions.score(samples, chosen), strict=True):
            for name, values in scored.columns.items():
                columns[f"{specs[number].name}/{name}" if name in columns else name] = values
        return columns

    def _measure(self, batch: TensorDict, samples: Samples) -> tuple[list[float], Mapping[str, list[Any]]]:
        """The metric of every response, and the columns that the function logs."""
        if not self._has_metric:
            return batch["model_scores"].tolist(), {}
        functions = self._require_functions()
        (scored,) = functions.score(samples, [self._num_functions])
        for row, (score, failed) in enumerate(zip(scored.scores, scored.failed, strict=True)):
            if math.isnan(score) and not failed and samples.answers[row] is not None:
                raise RewardError(
                    f"{functions.describe(self._num_functions)} returned None or NaN for {samples.describe(row)}. "
                    "Return a number: a metric counts every response"
                )
        scores = [0.0 if failed else score for score, failed in zip(scored.scores, scored.failed, strict=True)]
        return scores, scored.columns


class CostWorker(_FunctionWorker):
    """One rank of the cost of a constraint."""

    kind = "cost"

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        return _configure(setup, setup.config.cost)

    @register(protocol=RANK_ZERO, reads=_SCORED, writes=("costs",))
    def compute_cost(self, batch: TensorDict) -> TensorDict:
        """`costs` float32 [B], above 0 for what is unwanted: a weighted sum, as `RewardWorker.compute_reward` forms it.

        Raises:
            RewardError: if a function raises, or does not answer one number, NaN or None for each response.
        """
        from tensordict import TensorDict

        return TensorDict({"costs": self._score(batch, is_counted=True)}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, returns="object", reads=("costs",))
    def list_costs(self, batch: TensorDict) -> list[float]:
        """Returns the costs as numbers, for a multiplier on the controller."""
        costs: list[float] = batch["costs"].tolist()
        return costs


def _rename(key: str) -> str:
    """The name of a function's own number in metrics."""
    return f"logged_{key}" if key in _OWN_NUMBERS else key


def _configure(setup: RoleSetup, scoring: RewardConfig | CostConfig) -> dict[str, Any]:
    functions = [
        FunctionSpec(**each.model_dump(), allowed_hosts=scoring.allowed_hosts) for each in scoring.list_functions()
    ]
    return {
        "tokenizer": setup.model.tokenizer_path,
        "stop_ids": setup.stop_ids,
        "functions": functions,
        "search_path": list(setup.search_path),
        "answer_name": setup.config.data.answer_field or "answer",
        "num_processes": scoring.processes,
        "model_weight": None if scoring.model is None else scoring.model.weight,
    }
