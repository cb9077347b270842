"""Bad input of estimators: rows without a score, groups of one, equal scores, and responses without a token."""

from __future__ import annotations

import pytest
import torch

from hf_algorithms.advantages import GAE, Estimator, GroupAdvantage, LagrangianAdvantage, ReinforceAdvantage
from hf_protocols import BatchError

NAN = float("nan")
T = 3

GROUPS: dict[str, Estimator] = {
    "grpo": GroupAdvantage(),
    "dr_grpo": GroupAdvantage(scale="none"),
    "rloo": GroupAdvantage(baseline="leave_one_out", scale="none"),
    "maxrl": GroupAdvantage(scale="mean"),
    "opo": GroupAdvantage(baseline="length", scale="none"),
}
OTHERS: dict[str, Estimator] = {
    "ppo": GAE(whiten=False),
    "ppo, whitened": GAE(),
    "reinforce_pp": ReinforceAdvantage(whiten=True),
    "reinforce_pp_baseline": ReinforceAdvantage(baseline="group", whiten=True),
    "remax": ReinforceAdvantage(baseline="greedy"),
    "safe_rlhf": LagrangianAdvantage(multiplier=2.0, kl_coefficient=0.0),
}


def columns(scores: list[float], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows 2k and 2k + 1 answer one prompt; where the mask is False stands NaN."""
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    rng = torch.Generator().manual_seed(0)
    names = ("values", "cost_values", "old_logprobs", "ref_logprobs")
    found = {name: torch.randn(len(scores), T, generator=rng).masked_fill(~mask, NAN) for name in names}
    return found | {
        "response_mask": mask,
        "scores": torch.tensor(scores),
        "costs": torch.tensor(scores).neg(),
        "baseline_scores": torch.full((len(scores),), 0.25),
        "group_id": torch.arange(len(scores)) // 2,
        "finish_reason": torch.zeros(len(scores), dtype=torch.int64),
    }


@pytest.mark.parametrize("name", [*GROUPS, *OTHERS])
def test_a_row_without_a_score_or_token_has_advantage_zero(name: str) -> None:
    estimator = (GROUPS | OTHERS)[name]
    scores, lengths = [1.0, 0.0, NAN, 0.5, 1.0, 0.0], [3, 2, 3, 2, 0, 1]
    found = estimator(columns(scores, lengths))
    for column in found.values():
        assert column.isfinite().all()
        assert not column[~columns(scores, lengths)["response_mask"]].any()
    assert not found["advantages"][2].any()
    assert found["advantages"][0].any()


@pytest.mark.parametrize("name", GROUPS)
def test_equal_scores_have_advantage_zero(name: str) -> None:
    found = GROUPS[name](columns([0.7, 0.7, -2.0, -2.0], [3, 2, 1, 3]))["advantages"]
    torch.testing.assert_close(found, torch.zeros(4, T), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_one_is_refused(name: str) -> None:
    batch = columns([1.0, 0.0, 1.0], [3, 2, 1])
    with pytest.raises(BatchError, match="group"):
        GROUPS[name](batch)
