"""Aggregations against loops over rows, and their independence of how rows are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_algorithms.jagged import to_jagged
from hf_algorithms.losses import (
    Aggregation,
    Clip,
    Correction,
    KLTerm,
    PolicyLoss,
    SequenceClip,
    SupervisedLoss,
    ValueLoss,
    count_group_tokens,
)
from hf_protocols import BatchError, ConfigError, merge_metrics

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean")


def build(mode: Any, **options: Any) -> Aggregation:
    return Aggregation(mode=mode, constant=7.0 if mode == "constant" else None, **options)


def reference(mode: str, losses: np.ndarray, mask: np.ndarray, group: np.ndarray, constant: float = 7.0) -> float:
    rows = [losses[i][mask[i]] for i in range(len(mask))]
    trained = [row for row in rows if len(row)]
    if mode == "token-mean":
        return sum(row.sum() for row in rows) / sum(len(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return sum(row.sum() / len(row) for row in trained) / len(trained)
    if mode == "seq-mean-token-sum":
        return sum(row.sum() for row in trained) / len(trained)
    if mode == "constant":
        return sum(row.sum() for row in rows) / (len(rows) * constant)
    of_groups = []
    for each in sorted(set(group)):
        tokens = np.concatenate([rows[i] for i in range(len(rows)) if group[i] == each])
        if len(tokens):
            of_groups.append(tokens.sum() / len(tokens))
    return sum(of_groups) / len(of_groups)


def make_columns(seed: int, num_rows: int = 9, width: int = 8) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Ragged rows with holes; groups of unequal size in mixed order; one group and one more row are not trained."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 0.3) -> torch.Tensor:
        return scale * torch.randn(num_rows, width, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]) & (torch.rand(num_rows, width, generator=generator) < 0.8)
    mask[:, 0] = True
    group = torch.tensor([4, 1, 4, 2, 1, 4, 3, 2, 1])[:num_rows]
    mask[group == 3] = False
    mask[1] = False
    columns = {name: draw() for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "returns", "values")}
    columns |= {"advantages": draw(1.0), "response_mask": mask, "group_id": group}
    columns["group_tokens"] = count_group_tokens(mask, group)
    columns["finish_reason"] = torch.tensor([0, 1, 0, 1, 0, 0, 0, 0, 1])[:num_rows]
    return columns, draw()


def pick(columns: dict[str, torch.Tensor], rows: Sequence[int], width: int) -> dict[str, torch.Tensor]:
    """Some rows, padded with garbage or cut to a width of their own."""
    picked = {}
    for name, column in columns.items():
        part = column[list(rows)]
        if part.ndim == 2:
            beyond = False if part.dtype == torch.bool else math.nan
            extra = part.new_full((len(rows), width), beyond)
            part = torch.cat([part, extra], 1)[:, : max(width, column.shape[1])]
        picked[name] = part
    return picked


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", MODES)
def test_aggregations_follow_their_formulas(mode: str, seed: int) -> None:
    columns, losses = make_columns(seed)
    aggregation = build(mode)
    mask = columns["response_mask"]
    total = float((aggregation.weigh(mask, columns) * losses).sum())
    wanted = reference(mode, losses.numpy(), mask.numpy(), columns["group_id"].numpy())
    assert total / aggregation.count(columns) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("token-mean", 0.2), ("seq-mean-token-mean", 0.5), ("seq-mean-token-sum", 1.0), ("constant", 0.1)],
)
def test_rows_of_two_and_eight_tokens(mode: Any, wanted: float) -> None:
    """Loss 1 on the first row and 0 on the second."""
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    aggregation = Aggregation(mode=mode, constant=10 if mode == "constant" else None)
    losses = torch.tensor([[1.0], [0.0]]).expand(2, 8)
    total = float((aggregation.weigh(mask, {}) * losses).sum())
    assert total / aggregation.count({"response_mask": mask}) == pytest.approx(wanted, rel=1e-12)


def losses_of(mode: str) -> dict[str, Callable[[], Any]]:
    aggregation = build(mode)
    correction = Correction(kind="sequence_mask", low=0.9, high=1.3)
    return {
        "policy": lambda: PolicyLoss(
            surrogate=Clip(low=0.1, high=0.2, ratio_cap=1.3),
            aggregation=aggregation,
            correction=correction,
            kl=KLTerm(coefficient=0.1),
        ),
        "sequence": lambda: PolicyLoss(surrogate=SequenceClip(low=0.05, high=0.05), aggregation=aggregation),
        "current": lambda: PolicyLoss(aggregation=aggregation, old="current"),
        "value": lambda: ValueLoss(clip=0.2, aggregation=aggregation),
        "supervised": lambda: SupervisedLoss(aggregation=aggregation),
    }


def run_split(
    loss: Any, columns: dict[str, torch.Tensor], output: torch.Tensor, parts: Sequence[Sequence[int]]
) -> tuple[float, np.ndarray, dict[str, tuple[float, float]]]:
    """Acts as an engine: backward passes of micro-batches, divided by the sum of the ranks' counts."""
    own = output.clone().requires_grad_()
    name = "values" if isinstance(loss, ValueLoss) else "logprobs"
    total = count = 0.0
    metrics: dict[str, tuple[float, float]] = {}
    for k, rows in enumerate(parts):
        width = k % 3
        micro_batch = pick(columns, rows, width)
        padded = torch.cat([own[list(rows)], output.new_full((len(rows), width), math.nan)], 1)
        outputs = {name: padded[:, : micro_batch["response_mask"].shape[1]]}
        found, answered = loss(outputs, micro_batch)
        found.backward()
        total += float(found.detach())
        count += loss.count(micro_batch)
        metrics = merge_metrics([metrics, answered])
    assert own.grad is not None
    return total / count, own.grad.numpy() / count, metrics


@pytest.mark.parametrize("name", ["policy", "sequence", "current", "value", "supervised"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10)
@given(order=st.permutations(range(9)), cuts=st.sets(st.integers(1, 8), max_size=5), seed=st.integers(0, 50))
def test_losses_do_not_depend_on_how_rows_are_split(
    name: str, mode: str, order: list[int], cuts: set[int], seed: int
) -> None:
    loss = losses_of(mode)[name]()
    columns, output = make_columns(seed)
    edges = [0, *sorted(cuts), 9]
    parts = [order[start:end] for start, end in pairwise(edges)]
    whole, whole_gradient, whole_metrics = run_split(loss, columns, output, [range(9)])
    value, gradient, metrics = run_split(loss, columns, output, parts)
    assert value == pytest.approx(whole, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-10, atol=1e-14)
    assert metrics.keys() == whole_metrics.keys()
    for key, pair in metrics.items():
        np.testing.assert_allclose(pair, whole_metrics[key], rtol=1e-10, atol=1e-12, err_msg=key)


def test_rows_without_trained_tokens_count_in_constant_mode_only() -> None:
    columns, _ = make_columns(0)
    rows = columns["response_mask"].any(1)
    trained = {name: column[rows] for name, column in columns.items()}
    for mode in MODES:
        difference = build(mode).count(columns) - build(mode).count(trained)
        assert difference == (int((~rows).sum()) * 7.0 if mode == "constant" else 0.0)
    assert build("prompt-mean").count(columns) == pytest.approx(3.0)


@pytest.mark.parametrize("mode", MODES)
def test_overlong_filter_masks_responses_cut_by_length(mode: str) -> None:
    columns, losses = make_columns(2)
    kept = columns["response_mask"] & (columns["finish_reason"] == 0)[:, None]
    columns["group_tokens"] = count_group_tokens(kept, columns["group_id"])
    filtering = build(mode, overlong_filter=True)
    assert "finish_reason" in filtering.reads
    mask = filtering.select(columns)
    assert bool((mask == kept).all())
    total = float((filtering.weigh(mask, columns) * losses).sum())
    wanted = reference(mode, losses.numpy(), kept.numpy(), columns["group_id"].numpy())
    assert total / filtering.count(columns) == pytest.approx(wanted, rel=1e-12)
    loss = PolicyLoss(aggregation=filtering)
    value, gradient, metrics = run_split(loss, columns, losses, [range(9)])
    again, _, _ = run_split(PolicyLoss(aggregation=build(mode)), {**columns, "response_mask": kept}, losses, [range(9)])
    assert value == pytest.approx(again, rel=1e-12)
    assert not gradient[~kept.numpy()].any()
    assert metrics["clip_low"][1] == float(kept.sum())


@pytest.mark.parametrize("mode", MODES)
def test_counts_take_jagged_columns(mode: str) -> None:
    columns, _ = make_columns(3)
    rows = [row[: 3 + i % 4] for i, row in enumerate(columns["response_mask"])]
    short = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded = {**columns, "response_mask": short}
    assert build(mode).count({**padded, "response_mask": to_jagged(rows)}) == build(mode).count(padded)


def test_group_tokens_go_by_identity_and_not_by_position() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [False, False, False]])
    tokens = count_group_tokens(mask, torch.tensor([9, -2, 9, 5]))
    assert tokens.tolist() == [5.0, 1.0, 5.0, 0.0]


def test_a_part_of_a_group_counts_its_part() -> None:
    columns, _ = make_columns(4)
    shares = [build("prompt-mean").count(pick(columns, [i], 0)) for i in range(9)]
    assert sum(shares) == pytest.approx(3.0)
    assert all(0 <= share <= 1 for share in shares)


def test_aggregations_refuse_what_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match="aggregation='mean' is not one of"):
        Aggregation(mode="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss_denominator=None"):
        Aggregation(mode="constant")
    with pytest.raises(ConfigError, match=r"loss_denominator=5\.0: aggregation='token-mean' divides by no constant"):
        Aggregation(constant=5.0)
    columns, _ = make_columns(0)
    columns["group_tokens"][2] = 0.0
    with pytest.raises(BatchError, match=r"group_tokens\[2\]=0.0: is below the row's \d+ trained tokens"):
        build("prompt-mean").count(columns)
