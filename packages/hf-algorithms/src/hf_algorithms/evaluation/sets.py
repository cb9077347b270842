"""One evaluated set: responses to its rows, what metric functions make of them, and the rows of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_algorithms.evaluation.metric_summary import CORRECT, MetricSummary, summarize_scores
from hf_algorithms.evaluation.responses import Response, ResponseScorer, draw_responses
from hf_protocols import RewardError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.data import PromptDataset, TurnFormat
    from hf_controller import Executor, WorkerGroup
    from hf_engine import SamplingParams

__all__ = ["SetResult", "evaluate_set"]

_SampleRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """The numbers of one set.

    Attributes:
        name: of the set.
        rows: that were generated from.
        samples: responses to each.
        response_tokens: mean over responses.
        truncated: share of the responses that the limit of tokens cut.
        metrics: by name.
    """

    name: str
    rows: int
    samples: int
    response_tokens: float
    truncated: float
    metrics: Mapping[str, MetricSummary]

    def to_metrics(self) -> dict[str, float]:
        """The numbers by name: `eval/SET/METRIC`, and with several samples `/avg@K` and `/pass@K`."""
        return {
            f"eval/{self.name}/{metric}{end}": value
            for metric, summary in self.metrics.items()
            for end, value in summary.to_metrics().items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "rows": self.rows,
            "samples": self.samples,
            "response_tokens": self.response_tokens,
            "truncated": self.truncated,
            "metrics": {metric: summary.to_dict() for metric, summary in self.metrics.items()},
        }

    def list_notes(self) -> list[str]:
        """Lines about rows that do not count, and about metrics without pass@k."""
        lines = []
        for metric, summary in self.metrics.items():
            if summary.unscorable:
                lines.append(f"{self.name}: {metric} has no score for {summary.unscorable} rows, which do not count")
            if summary.samples > 1 and not summary.pass_at:
                lines.append(
                    f"{self.name}: {metric} has no pass@k: its scores are from {summary.least:g} to "
                    f"{summary.largest:g}, not from 0 to {CORRECT:g}"
                )
        return lines


def evaluate_set(
    name: str,
    data: PromptDataset,
    *,
    executor: Executor,
    group: WorkerGroup,
    turns: TurnFormat,
    sampling: SamplingParams,
    scorer: ResponseScorer,
    keep: Callable[[list[_SampleRow]], None],
) -> SetResult:
    """Generates from every row of a set and scores the responses.

    Args:
        name: of the set.
        data: its rows.
        executor: of the group.
        group: whose worker has `generate_sequences`.
        turns: of the model.
        sampling: how responses are drawn.
        scorer: of the metrics.
        keep: called with the samples of some rows, one for each response, as soon as they are scored.

    Raises:
        RewardError: if a metric function fails, or scores no row; the samples were kept before.
    """
    scores: dict[str, list[list[float]]] = {}
    num_tokens = num_cut = 0
    for indices, responses in draw_responses(executor, group, data, sampling, turns):
        found = scorer.score(data, indices, responses)
        for metric, rows in found.items():
            scores.setdefault(metric, []).extend(rows)
        num_tokens += sum(len(each.token_ids) for row in responses for each in row)
        num_cut += sum(each.finish_reason == "length" for row in responses for each in row)
        keep(_list_samples(name, data, indices, responses, found))
    summaries: dict[str, MetricSummary] = {}
    for metric, rows in scores.items():
        summary = summarize_scores(rows)
        if summary is None:
            raise RewardError(
                f"metric {show(metric)} scored none of the {len(rows)} rows of the set {show(name)}. Add answers to "
                "the rows, or use a function that needs no answers"
            )
        summaries[metric] = summary
    num_responses = len(data) * sampling.n
    return SetResult(
        name=name,
        rows=len(data),
        samples=sampling.n,
        response_tokens=num_tokens / num_responses,
        truncated=num_cut / num_responses,
        metrics=summaries,
    )


def _list_samples(
    name: str,
    data: PromptDataset,
    indices: Sequence[int],
    responses: Sequence[Sequence[Response]],
    scores: Mapping[str, Sequence[Sequence[float]]],
) -> list[_SampleRow]:
    """A mapping for each response; a score is None where there is none."""
    samples: list[_SampleRow] = []
    for row, (index, drawn) in enumerate(zip(indices, responses, strict=True)):
        given = data.row(index)
        for number, response in enumerate(drawn):
            found = {metric: rows[row][number] for metric, rows in scores.items()}
            known = {metric: score if score == score else None for metric, score in found.items()}
            samples.append(
                {
                    "set": name,
                    "row": index,
                    "sample": number,
                    "prompt": given.prompt,
                    "response": response.text,
                    "answer": given.answer,
                    "score": next(iter(known.values()), None),
                    "scores": known,
                    "finish_reason": response.finish_reason,
                    "tokens": len(response.token_ids),
                }
            )
    return samples
