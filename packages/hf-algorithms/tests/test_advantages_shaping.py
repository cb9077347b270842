"""Shaping of scores, the filter of dynamic sampling, and metrics of groups, against hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_algorithms.advantages import (
    GroupAdvantage,
    LengthTerm,
    clip_scores,
    compute_score_metrics,
    select_groups,
    subtract_missing_eos,
)
from hf_protocols.errors import ConfigError

NAN = float("nan")
SCORES = torch.tensor([3.0, -2.0, NAN, 0.5], dtype=torch.float64)


def test_length_term_falls_over_the_buffer() -> None:
    """DAPO's numbers: 16384 tokens are free, and 4096 more lead to -1."""
    lengths = torch.tensor([1, 16384, 17408, 18432, 20480, 30000])
    scores = torch.ones(6, dtype=torch.float64)
    found = LengthTerm(max_tokens=20480, buffer=4096)(scores, lengths)
    assert found.tolist() == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert LengthTerm(max_tokens=20480, buffer=4096, factor=2.0)(scores, lengths).tolist()[2:4] == [0.5, 0.0]


def test_length_term_follows_the_papers_three_cases() -> None:
    lengths = torch.arange(0, 15)
    found = LengthTerm(max_tokens=10, buffer=4, factor=0.5)(torch.zeros(15, dtype=torch.float64), lengths)
    wanted = [0.0 if n <= 6 else 0.5 * (6 - n) / 4 if n <= 10 else -0.5 for n in range(15)]
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_length_term_refuses_a_buffer_out_of_range(buffer: int) -> None:
    message = f"algorithm.overlong_buffer = {buffer}: is not between 1 and the 10 tokens of a response"
    with pytest.raises(ConfigError, match=message):
        LengthTerm(max_tokens=10, buffer=buffer)


def test_clip_and_missing_eos_change_their_rows_only() -> None:
    np.testing.assert_allclose(clip_scores(SCORES, 1.0), [1.0, -1.0, NAN, 0.5])
    assert clip_scores(SCORES, None) is SCORES
    found = subtract_missing_eos(SCORES, torch.tensor([1, 0, 1, 1]), 2.0)
    np.testing.assert_allclose(found, [1.0, -2.0, NAN, -1.5])
    assert subtract_missing_eos(SCORES, torch.ones(4), None) is SCORES


METRIC = {
    4: [0.0, 0.0, 0.0],
    9: [1.0, 0.0, 1.0],
    -2: [NAN, 0.5, NAN],
    3: [0.1, 0.1, NAN],
    7: [0.1, 0.2, NAN],
    1: [1.0],
    0: [NAN, NAN],
}


def shuffled_metric(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [(group, value) for group, values in METRIC.items() for value in values]
    order = np.random.default_rng(seed).permutation(len(rows))
    group_id = torch.tensor([rows[place][0] for place in order])
    return torch.tensor([rows[place][1] for place in order]), group_id


@pytest.mark.parametrize("seed", range(3))
def test_filter_keeps_whole_groups_that_differ(seed: int) -> None:
    metric, group_id = shuffled_metric(seed)
    kept = select_groups(metric, group_id)
    assert kept.dtype == torch.int64
    assert kept.tolist() == [7, 9]
    assert int(torch.isin(group_id, kept).sum()) == 6


def test_filter_of_nothing_keeps_nothing() -> None:
    assert select_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
    assert select_groups(torch.ones(3), torch.zeros(3, dtype=torch.int64)).tolist() == []


def test_filtered_groups_have_no_advantage() -> None:
    """Dropped is what gives a gradient of zero anyway, except for a score that is only in the metric."""
    metric, group_id = shuffled_metric(0)
    columns = {"scores": metric, "group_id": group_id, "response_mask": torch.ones(len(metric), 1)}
    advantages = GroupAdvantage(group_of_one="zero")(columns)["advantages"][:, 0]
    learns = {int(group) for group, advantage in zip(group_id, advantages, strict=True) if advantage != 0}
    assert learns == set(select_groups(metric, group_id).tolist())


def test_score_metrics_count_groups_and_unscored_rows() -> None:
    metric, group_id = shuffled_metric(1)
    known = [value for values in METRIC.values() for value in values if value == value]
    found = compute_score_metrics({"scores": metric.double(), "group_id": group_id})
    assert found["reward/unscorable"] == (6.0, 1.0)
    assert found["reward/mean"] == pytest.approx((sum(known), 12.0), abs=1e-6)
    assert found["reward/std"] == pytest.approx((np.std(known, ddof=1), 1.0), abs=1e-6)
    assert found["group/zero_variance"] == (2.0, 4.0)


def test_score_metrics_leave_out_what_is_undefined() -> None:
    nothing = compute_score_metrics({"scores": torch.tensor([NAN, NAN]), "group_id": torch.tensor([0, 0])})
    assert nothing == {"reward/unscorable": (2.0, 1.0)}
    assert compute_score_metrics({"scores": torch.zeros(0)}) == {"reward/unscorable": (0.0, 1.0)}
    one = compute_score_metrics({"scores": torch.tensor([2.0])})
    assert one == {"reward/unscorable": (0.0, 1.0), "reward/mean": (2.0, 1.0), "reward/std": (0.0, 1.0)}
