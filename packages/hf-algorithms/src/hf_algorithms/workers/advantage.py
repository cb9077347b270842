"""Advantages: one process that sees the whole batch, and only its [B, T] columns (design of the data flow)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_algorithms.jagged import pad_rows, unpad_rows
from hf_algorithms.users_code import describe_raised
from hf_algorithms.workers._model import Metrics
from hf_controller import Worker
from hf_protocols import FROM_ARGUMENT, RANK_ZERO, BatchError, register
from hf_protocols.foreign_code import raised_as
from hf_protocols.validation import describe_names, show

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.advantages import Estimator, FilterMetric, LengthTerm

__all__ = ["AdvantageWorker"]


class AdvantageWorker(Worker):
    """Numerical work over a whole batch: whitening and groups see every row."""

    needs_process_group = False
    phase = "advantages"

    @register(protocol=RANK_ZERO, reads=("response_mask",), writes=FROM_ARGUMENT)
    def compute_advantages(self, batch: TensorDict, estimator: Estimator) -> TensorDict:
        """Returns the columns that `estimator.writes` names, computed from those that `estimator.reads` names.

        The estimator gets padded columns [B, T], or [B] where a column has one value a row. The result is jagged.

        Raises:
            BatchError: if the estimator raises, with the place in its code, or returns other columns than it declares,
                or values that are not real and finite or of another shape.
        """
        from tensordict import TensorDict

        padded = {str(name): pad_rows(batch[name]) for name, _ in batch.items()}
        padded["response_mask"] = padded["response_mask"].bool()
        found = _estimate(estimator, padded)
        columns = {
            name: value if value.dim() == 1 else unpad_rows(value, batch["response_mask"])
            for name, value in found.items()
        }
        return TensorDict(columns, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, reads=("response_mask", "group_id", "finish_reason"), writes=("group_tokens",))
    def count_group_tokens(self, batch: TensorDict, *, overlong_filter: bool = False) -> TensorDict:
        """Returns `group_tokens` float64 [B]: the trained tokens of each row's whole group.

        With `overlong_filter` those of responses that were cut by their length do not count.
        """
        from tensordict import TensorDict

        from hf_algorithms.advantages.shaping import TRUNCATED
        from hf_algorithms.losses import count_group_tokens

        mask = pad_rows(batch["response_mask"]).bool()
        if overlong_filter:
            mask &= (batch["finish_reason"] != TRUNCATED)[:, None]
        tokens = count_group_tokens(mask, batch["group_id"])
        return TensorDict({"group_tokens": tokens}, batch_size=batch.batch_size)

    @register(protocol=RANK_ZERO, reads=("response_mask", "scores"), writes=("scores",))
    def add_length_term(self, batch: TensorDict, term: LengthTerm) -> TensorDict:
        """Returns `scores` [B] plus DAPO's length term."""
        import torch
        from tensordict import TensorDict

        lengths = torch.tensor([len(row) for row in batch["response_mask"].unbind()])
        return TensorDict({"scores": term(batch["scores"], lengths)}, batch_size=batch.batch_size)

    @register(
        protocol=RANK_ZERO, returns="object", reads=("response_mask", "returns", "next_returns?", "scores?", "costs?")
    )
    def measure_returns(self, batch: TensorDict) -> dict[str, float]:
        """Returns the moments of the returns; see `hf_algorithms.value_scale.measure_returns`.

        A row whose score or cost is NaN is left out: its returns are the critic's own values.
        """
        import torch

        from hf_algorithms.value_scale import measure_returns

        returns, mask = pad_rows(batch["returns"]), pad_rows(batch["response_mask"]).bool()
        if "next_returns" in batch:
            beyond = batch["next_returns"][:, None]
            returns, mask = torch.cat([returns, beyond], 1), torch.cat([mask, ~beyond.isnan()], 1)
        for name in ("scores", "costs"):
            if name in batch:
                mask = mask & ~batch[name].isnan()[:, None]
        return measure_returns(returns, mask)

    @register(protocol=RANK_ZERO, returns="object", reads=("scores", "group_id"))
    def select_groups(self, batch: TensorDict, metric: FilterMetric | None = None) -> list[int]:
        """Returns the ids of the groups whose scores differ, ascending; see `hf_algorithms.advantages.filters`.

        Args:
            batch: responses.
            metric: number of a response by which they differ, in place of the score.
        """
        from hf_algorithms.advantages import select_groups

        numbers = batch["scores"]
        if metric is not None:
            numbers = metric({name: pad_rows(batch[name]) for name in metric.reads})
        kept: list[int] = select_groups(numbers, batch["group_id"]).tolist()
        return kept

    @register(
        protocol=RANK_ZERO,
        returns="metrics",
        reads=(
            "response_mask",
            "scores",
            "group_id?",
            "finish_reason?",
            "old_logprobs?",
            "ref_logprobs?",
            "rollout_logprobs?",
            "teacher_logprobs?",
            "baseline_scores?",
        ),
    )
    def compute_metrics(
        self, batch: TensorDict, *, compares_sampler: bool = True, counts_responses: bool = True
    ) -> Metrics:
        """Means over responses: score, divergence from the reference, tokens; and the sampler's mismatch.

        Without `counts_responses` scores, groups, tokens and cuts are left out: they were counted before.

        What needs a column that is absent is left out. `response/truncated` is the share of responses that were cut by
        their length; for scores and groups see `hf_algorithms.advantages.compute_score_metrics`.

        `kl/k1`, `kl/k2` and `kl/k3` estimate the KL to the reference in nats per trained token (see
        `estimate_kl`); `kl_sequence/k1` and `kl_sequence/k3` are sums over the trained tokens of a response. They
        are those of the policy before the update; without `old_logprobs` here the update itself reports them.
        `response/tokens` counts trained tokens.

        `distillation/kl` is the mean over trained tokens of the policy's log-prob less the teacher's.

        `rollout/logprob_gap` is the mean over trained tokens of |sampler's log-prob - trainer's|, `..._max` the
        largest, `..._share` the share of tokens above `GAP_BOUND`; for `rollout/mismatch_k3` and
        `rollout/weight_*` see `measure_mismatch`. They are left out where the sampler's log-probs were taken as old
        ones: then there is nothing to compare before the update. Means over tokens are left out where
        there is no trained token.
        """
        import torch

        from hf_algorithms.advantages import compute_score_metrics
        from hf_algorithms.advantages.shaping import TRUNCATED
        from hf_algorithms.kl import estimate_kl
        from hf_algorithms.losses import GAP_BOUND, measure_mismatch

        rows = float(len(batch))
        mask = pad_rows(batch["response_mask"]).bool()
        names = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs")
        old, reference, sampled, teacher = (pad_rows(batch[name])[mask] if name in batch else None for name in names)
        tokens = float(mask.sum())
        metrics: Metrics = {}
        if counts_responses:
            metrics["response/tokens"] = (tokens, rows)
            columns = ("scores", "group_id", "baseline_scores")
            metrics |= compute_score_metrics({name: batch[name] for name in columns if name in batch})
            if "finish_reason" in batch:
                metrics["response/truncated"] = (float((batch["finish_reason"] == TRUNCATED).sum()), rows)
        if old is not None and reference is not None:
            sums = {name: float(each.sum()) for name, each in estimate_kl(old, reference).items()}
            metrics |= {f"kl_sequence/{name}": (sums[name], rows) for name in ("k1", "k3")}
            if tokens:
                metrics |= {f"kl/{name}": (each, tokens) for name, each in sums.items()}
        if tokens and old is not None and teacher is not None:
            metrics["distillation/kl"] = (float((old - teacher).sum()), tokens)
        if compares_sampler and tokens and old is not None and sampled is not None:
            gaps = (sampled - old).abs()
            of_tokens = measure_mismatch(old, sampled, torch.ones_like(old, dtype=torch.bool), None)
            metrics |= {name: part for name, part in of_tokens.items() if name != "rollout/masked"}
            metrics["rollout/logprob_gap"] = (float(gaps.sum()), tokens)
            metrics["rollout/logprob_gap_max"] = (float(gaps.max()), 1.0)
            metrics["rollout/logprob_gap_share"] = (float((gaps > GAP_BOUND).sum()), tokens)
        return metrics


def _estimate(estimator: Estimator, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Calls an estimator, which may be user code, and checks what it returns."""
    import torch

    from hf_algorithms.advantages import check_estimator

    check_estimator(estimator)
    label = f"estimator {type(estimator).__name__}"

    def describe(error: BaseException) -> BatchError:
        undeclared = isinstance(error, KeyError) and error.args and error.args[0] not in columns
        hint = f"\n  its reads are {describe_names(estimator.reads)}" if undeclared else ""
        return BatchError(f"{label} raised {describe_raised(error)}{hint}")

    with raised_as(describe):
        found: object = estimator(columns)
    if not isinstance(found, Mapping):
        raise BatchError(f"{label}: it returned {show(found)}. Return a dict of tensors by the names of writes")
    if set(found) != set(estimator.writes):
        raise BatchError(
            f"{label}: it returned {', '.join(sorted(map(str, found))) or 'no columns'} and declares "
            f"{', '.join(sorted(estimator.writes))}. Return what writes names"
        )
    mask, checked = columns["response_mask"], {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise BatchError(f"{label}: {name} is {show(value)} ({type(value).__name__}). Return a tensor")
        if value.shape not in (mask.shape[:1], mask.shape):
            rows, width = mask.shape
            raise BatchError(
                f"{label}: {name} has the shape {tuple(value.shape)}. Return one value for each row, ({rows},), or for "
                f"each token, ({rows}, {width})"
            )
        if value.is_complex() or value.dtype == torch.bool:
            raise BatchError(f"{label}: {name} has dtype {value.dtype}. Return real numbers")
        trained = value if value.dim() == 1 else value.masked_fill(~mask, 0)
        of_rows = value.dim() == 1
        # NaN stands for a row without a value.
        wrong = trained.isinf() if of_rows and name != "advantages" else ~trained.isfinite()
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise BatchError(
                f"{label}: {name} of row {row} is infinite or not a number. Look at the columns that it reads there"
            )
        if of_rows and name == "advantages":
            trained = trained[:, None].expand_as(mask).masked_fill(~mask, 0)  # losses weigh tokens
        checked[name] = trained
    return checked
