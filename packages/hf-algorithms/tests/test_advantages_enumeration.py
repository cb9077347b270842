"""Level A: expected gradients by exact enumeration of all groups of a prompt, or all sequences of a policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import comb, sqrt
from typing import Any

import pytest
import torch

from hf_algorithms.advantages import GAE, GroupAdvantage, ReinforceAdvantage

CENTRED = GroupAdvantage(scale="none")
LEAVE_ONE_OUT = GroupAdvantage(baseline="leave_one_out", scale="none")
GRPO = GroupAdvantage()
GRPO_DDOF_0 = GroupAdvantage(std_ddof=0)
NEMO = GroupAdvantage(baseline="leave_one_out", std_over="others", std_on="positive")
MAX_RL = GroupAdvantage(scale="mean")
OPO = GroupAdvantage(baseline="length", scale="none")
REINFORCE_GROUP = ReinforceAdvantage(baseline="group")
REMAX = ReinforceAdvantage(baseline="greedy")
EPS = 1e-6


def compute_factor(estimator: Any, p: float, n: int) -> float:
    """The expected gradient of the policy loss divided by grad p, over all 2^n groups of a Bernoulli prompt.

    A response is one token, right with probability p: d log prob / dp is 1 / p or -1 / (1 - p).
    """
    groups = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=torch.float64)
    probability = (groups * p + (1 - groups) * (1 - p)).prod(1)
    rows = len(groups) * n
    columns = {
        "scores": groups.flatten(),
        "group_id": torch.arange(len(groups)).repeat_interleave(n),
        "baseline_scores": torch.full((rows,), 0.25, dtype=torch.float64),  # any number that does not see the sample
        "response_mask": torch.ones(rows, 1, dtype=torch.bool),
    }
    advantages = estimator(columns)["advantages"].view(-1, n)
    slope = groups / p - (1 - groups) / (1 - p)
    return float((probability * (advantages * slope).mean(1)).sum())


def sum_over_counts(p: float, n: int, advantages: Callable[[int], tuple[float, float]]) -> float:
    """The same factor in closed form: `advantages(k)` are those of a right and a wrong response, of k right ones."""
    total = 0.0
    for k in range(n + 1):
        right, wrong = advantages(k)
        total += comb(n, k) * p**k * (1 - p) ** (n - k) * (k * right / p - (n - k) * wrong / (1 - p)) / n
    return total


def std_of(k: int, n: int, ddof: int) -> float:
    return sqrt(k * (n - k) / n / (n - ddof)) if n > ddof else 0.0


def grpo_in_closed_form(p: float, n: int, ddof: int) -> float:
    def advantages(k: int) -> tuple[float, float]:
        divisor = std_of(k, n, ddof) + EPS
        return (1 - k / n) / divisor, -k / n / divisor

    return sum_over_counts(p, n, advantages)


def nemo_in_closed_form(p: float, n: int) -> float:
    def scale(others: int) -> float:
        std = std_of(others, n - 1, 1)
        return std + EPS if std > 0 else 1.0

    def advantages(k: int) -> tuple[float, float]:
        right = (1 - (k - 1) / (n - 1)) / scale(k - 1) if k else 0.0
        wrong = -k / (n - 1) / scale(k) if k < n else 0.0
        return right, wrong

    return sum_over_counts(p, n, advantages)


CLOSED_FORMS: dict[str, tuple[Any, Callable[[float, int], float]]] = {
    "centred": (CENTRED, lambda p, n: (n - 1) / n),
    "leave_one_out": (LEAVE_ONE_OUT, lambda p, n: 1.0),
    "remax": (REMAX, lambda p, n: 1.0),
    "reinforce_group": (REINFORCE_GROUP, lambda p, n: (n - 1) / n),
    "opo": (OPO, lambda p, n: (n - 1) / n),  # equal lengths
    "grpo": (GRPO, lambda p, n: grpo_in_closed_form(p, n, 1)),
    "grpo_ddof_0": (GRPO_DDOF_0, lambda p, n: grpo_in_closed_form(p, n, 0)),
    "nemo": (NEMO, nemo_in_closed_form),
    "max_rl": (MAX_RL, lambda p, n: sum((1 - p) ** k for k in range(n - 1))),
}

TABLE = {  # p, n: algorithms.md, section 3.2
    (0.1, 4): (0.7500, 1.0, 1.4638, 1.6903, 1.1977, 2.7100),
    (0.3, 4): (0.7500, 1.0, 1.4156, 1.6346, 1.4612, 2.1900),
    (0.5, 4): (0.7500, 1.0, 1.3995, 1.6160, 1.5490, 1.7500),
    (0.1, 8): (0.8750, 1.0, 2.1773, 2.3277, 1.7648, 5.2170),
    (0.3, 8): (0.8750, 1.0, 1.8360, 1.9627, 2.0543, 3.0588),
    (0.9, 8): (0.8750, 1.0, 2.1773, 2.3277, 1.7648, 1.1111),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize(("p", "n"), [*TABLE, (0.7, 2), (0.2, 5)])
def test_expected_gradient_has_its_closed_form(name: str, p: float, n: int) -> None:
    estimator, closed_form = CLOSED_FORMS[name]
    assert compute_factor(estimator, p, n) == pytest.approx(closed_form(p, n), rel=1e-9)


@pytest.mark.parametrize(("p", "n"), TABLE)
def test_expected_gradient_has_the_published_factor(p: float, n: int) -> None:
    estimators = (CENTRED, LEAVE_ONE_OUT, GRPO, GRPO_DDOF_0, NEMO, MAX_RL)
    assert [compute_factor(each, p, n) for each in estimators] == pytest.approx(TABLE[p, n], abs=5.1e-5)


# A policy over tokens end, a, b; a response ends by `end` or at three tokens: 1 + 2 + 4 * 3 sequences.
SEQUENCES = [
    tokens
    for length in (1, 2, 3)
    for tokens in itertools.product(range(3), repeat=length)
    if 0 not in tokens[:-1] and (length == 3 or tokens[-1] == 0)
]
PREFIXES = [(), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]


class EnumeratedPolicy:
    """A table of logits, one row for each prefix; the rewards and the reference are random tables."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (len(PREFIXES), 3)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.reference = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(1)
        self.scores = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
        self.state_values = torch.randn(len(PREFIXES), generator=generator, dtype=torch.float64)
        self.mask = torch.tensor([[t < len(tokens) for t in range(3)] for tokens in SEQUENCES])
        self.states = [[PREFIXES.index(tokens[:t]) for t in range(len(tokens))] for tokens in SEQUENCES]

    def gather(self, table: torch.Tensor) -> torch.Tensor:
        """The log-prob [15, 3] of each sequence's tokens; NaN beyond its end, so that a leak would be seen."""
        rows = [
            [table[state, token] for state, token in zip(states, tokens, strict=True)]
            for states, tokens in zip(self.states, SEQUENCES, strict=True)
        ]
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        return torch.stack([torch.stack(row + [nan] * (3 - len(row))) for row in rows])

    @property
    def logprobs(self) -> torch.Tensor:
        return self.gather(self.logits.log_softmax(1))

    def columns(self) -> dict[str, torch.Tensor]:
        values = self.gather(self.state_values[:, None].expand(-1, 3))
        return {
            "scores": self.scores,
            "response_mask": self.mask,
            "old_logprobs": self.logprobs.detach(),
            "ref_logprobs": self.gather(self.reference),
            "values": values,
            "baseline_scores": torch.full_like(self.scores, 0.3),
            "finish_reason": torch.zeros(len(SEQUENCES), dtype=torch.int64),
        }

    def expect_gradient(self, advantages: torch.Tensor) -> torch.Tensor:
        """E[sum_t A_t grad log pi(token_t)], exactly."""
        logprobs = self.logprobs.masked_fill(~self.mask, 0.0)
        probability = logprobs.sum(1).exp().detach()
        return torch.autograd.grad((probability[:, None] * advantages * logprobs).sum(), self.logits)[0]

    def true_gradient(self, kl_coefficient: float = 0.0) -> torch.Tensor:
        """Of E[score] - coefficient * KL(pi || ref) of whole sequences."""
        logprobs = self.logprobs.masked_fill(~self.mask, 0.0).sum(1)
        reference = self.gather(self.reference).masked_fill(~self.mask, 0.0).sum(1)
        penalised = self.scores - kl_coefficient * (logprobs - reference)
        return torch.autograd.grad((logprobs.exp() * penalised).sum(), self.logits)[0]


def test_sequences_are_all_outcomes_of_the_policy() -> None:
    policy = EnumeratedPolicy()
    assert len(SEQUENCES) == 15
    assert policy.logprobs.masked_fill(~policy.mask, 0.0).sum(1).exp().sum().item() == pytest.approx(1.0)


UNBIASED = {
    "reinforce": ReinforceAdvantage(),
    "remax": ReinforceAdvantage(baseline="greedy"),
    "gae": GAE(gae_lambda=1.0, whiten=False),
    "group": GroupAdvantage(baseline="none", scale="none"),
}


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("values", ["zero", "random"])
def test_expected_gradient_is_the_policy_gradient(name: str, values: str) -> None:
    policy = EnumeratedPolicy()
    columns = policy.columns() | {"group_id": torch.arange(len(SEQUENCES))}
    if values == "zero":
        columns["values"] = torch.zeros_like(columns["values"])
    found = policy.expect_gradient(UNBIASED[name](columns)["advantages"])
    torch.testing.assert_close(found, policy.true_gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "estimator",
    [
        ReinforceAdvantage(kl_coefficient=0.7),
        ReinforceAdvantage(kl_coefficient=0.7, baseline="greedy"),
        GAE(gae_lambda=1.0, whiten=False, kl_coefficient=0.7),
        GroupAdvantage(baseline="none", scale="none", kl_coefficient=0.7),
        GroupAdvantage(baseline="none", scale="none", kl_coefficient=0.7, kl_return="sequence"),
    ],
    ids=["reinforce", "remax", "gae", "group", "group_sequence"],
)
def test_cumulative_kl_has_the_gradient_of_the_divergence(estimator: Any) -> None:
    policy = EnumeratedPolicy()
    columns = policy.columns() | {"group_id": torch.arange(len(SEQUENCES))}
    found = policy.expect_gradient(estimator(columns)["advantages"])
    torch.testing.assert_close(found, policy.true_gradient(0.7), rtol=0, atol=1e-12)


def test_kl_of_the_token_alone_is_biased() -> None:
    """It leaves out how a token changes the divergence of later ones; each token's own part is exact."""
    policy = EnumeratedPolicy()
    estimator = ReinforceAdvantage(kl_coefficient=0.7, kl_return="token")
    gap = policy.expect_gradient(estimator(policy.columns())["advantages"]) - policy.true_gradient(0.7)
    assert gap[0].abs().max() > 1e-2
    last = [PREFIXES.index(prefix) for prefix in PREFIXES if len(prefix) == 2]  # no token comes after the next
    torch.testing.assert_close(gap[last], torch.zeros_like(gap[last]), rtol=0, atol=1e-12)


def test_gae_with_exact_values_is_unbiased_for_any_lambda() -> None:
    policy = EnumeratedPolicy()
    columns = policy.columns()
    probability = policy.logprobs.detach().masked_fill(~policy.mask, 0.0)
    exact = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for state, prefix in enumerate(PREFIXES):
        rows = [row for row, tokens in enumerate(SEQUENCES) if tokens[: len(prefix)] == prefix]
        weights = probability[rows][:, len(prefix) :].sum(1).exp()
        exact[state] = (weights * policy.scores[rows]).sum()
    columns["values"] = policy.gather(exact[:, None].expand(-1, 3))
    for gae_lambda in (0.0, 0.5, 1.0):
        found = policy.expect_gradient(GAE(gae_lambda=gae_lambda, whiten=False)(columns)["advantages"])
        torch.testing.assert_close(found, policy.true_gradient(), rtol=0, atol=1e-12)


# A chain: each token ends the response with probability q, and ending pays 1. The response is cut at M tokens.
Q, GAMMA, M = 0.2, 0.9, 3
V = Q / (1 - GAMMA * (1 - Q))  # of the uncut chain, before any token


def chain_columns(kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The probability of each outcome: an end at token 1 to M, then the cut one; and its columns with exact values."""
    lengths = [*range(1, M + 1), M]
    probability = [Q * (1 - Q) ** (length - 1) for length in lengths[:-1]] + [(1 - Q) ** M]
    mask = torch.tensor([[t < length for t in range(M)] for length in lengths])
    columns = {
        "scores": torch.tensor([1.0] * M + [0.0], dtype=torch.float64),
        "finish_reason": torch.tensor([0] * M + [1]),
        "response_mask": mask,
        "values": torch.full((M + 1, M), V, dtype=torch.float64).masked_fill(~mask, torch.nan),
    }
    if kind == "column":
        columns["next_values"] = torch.tensor([torch.nan] * M + [V], dtype=torch.float64)
    return torch.tensor(probability, dtype=torch.float64), columns


@pytest.mark.parametrize("kind", ["nearest", "column"])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_bootstrap_at_a_cut_is_unbiased(kind: str, gae_lambda: float) -> None:
    """E[return of the first token] is V, and each visited state's expected gradient of q is 1 - gamma V."""
    probability, columns = chain_columns(kind)
    estimator = GAE(gamma=GAMMA, gae_lambda=gae_lambda, whiten=False, bootstrap="value")
    found = estimator(columns)
    assert float(probability @ found["returns"][:, 0]) == pytest.approx(V, abs=1e-12)
    ends = torch.tensor([[t + 1 == length for t in range(M)] for length in [*range(1, M + 1), M + 1]])
    slope = torch.where(ends, 1 / Q, -1 / (1 - Q)).masked_fill(~columns["response_mask"], 0.0)
    visits = sum((1 - Q) ** t for t in range(M))
    gradient = float(probability @ (found["advantages"] * slope).sum(1))
    assert gradient == pytest.approx(visits * (1 - GAMMA * V), abs=1e-12)


def test_zero_at_a_cut_is_biased_by_what_was_cut() -> None:
    probability, columns = chain_columns("nearest")
    found = GAE(gamma=GAMMA, gae_lambda=1.0, whiten=False, bootstrap="zero")(columns)
    decay = (GAMMA * (1 - Q)) ** M
    expected = V * (1 - decay)  # the discounted chance to end within M tokens
    assert float(probability @ found["returns"][:, 0]) == pytest.approx(expected, abs=1e-12)
    assert V - expected > 0.1
