"""GAE and the Lagrangian advantages against loops in numpy float64, one response and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.advantages import GAE, LagrangianAdvantage, ReinforceAdvantage, whiten
from hf_protocols.errors import BatchError, ConfigError

NAN = float("nan")
PER_TOKEN = ("old_logprobs", "ref_logprobs", "values", "cost_values")


def random_batch(seed: int, rows: int = 9, width: int = 7) -> dict[str, torch.Tensor]:
    """Ragged rows with holes; one without a trained token, one with a single one, two without a score or a cost.

    Where the mask is False stand NaN and infinity.
    """
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[1] = False
    mask[2] = np.arange(width) == width // 2
    mask[3] = True
    spoiled = np.where(rng.random((rows, width)) < 0.5, np.nan, np.inf)
    columns = {name: np.where(mask, rng.normal(size=(rows, width)), spoiled) for name in PER_TOKEN}
    columns |= {name: rng.normal(size=rows) * 4 for name in ("scores", "costs", "next_values", "next_cost_values")}
    columns["scores"][4] = columns["costs"][5] = np.nan
    columns["finish_reason"] = rng.integers(0, 2, rows)
    columns["finish_reason"][:4] = 1
    return {"response_mask": torch.from_numpy(mask)} | {
        name: torch.from_numpy(column) for name, column in columns.items()
    }


def kl_of(d: float, estimator: str) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def gae_row(rewards: list[float], values: list[float], beyond: float, gamma: float, lam: float) -> list[float]:
    """A_t as the explicit double sum over residuals; the lists hold trained tokens only."""
    following = [*values[1:], beyond]
    delta = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


def reference_rows(
    batch: dict[str, torch.Tensor], options: dict[str, Any], *, lam: float, score: str = "scores", sign: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages before whitening and returns, [B, T]; rows whose score is NaN have advantages 0."""
    mask, shape = batch["response_mask"].numpy(), batch["response_mask"].shape
    values_name = "values" if score == "scores" else "cost_values"
    advantages, returns = np.zeros(shape), np.zeros(shape)
    for row in range(shape[0]):
        places = [t for t in range(shape[1]) if mask[row, t]]
        if not places:
            continue
        column = {name: [float(batch[name][row, t]) for t in places] for name in PER_TOKEN}
        values = column[values_name]
        r = float(batch[score][row])
        if options.get("reward_clip"):
            r = max(-options["reward_clip"], min(options["reward_clip"], r)) if not math.isnan(r) else r
        truncated = int(batch["finish_reason"][row]) == 1
        if options.get("missing_eos_penalty") and truncated:
            r -= options["missing_eos_penalty"]
        pairs = zip(column["old_logprobs"], column["ref_logprobs"], strict=True)
        k = options.get("kl_coefficient", 0.0)
        rewards = [-sign * k * kl_of(old - ref, options.get("kl_estimator", "k1")) for old, ref in pairs]
        rewards[-1] += r
        if options.get("token_clip"):
            rewards = [max(-options["token_clip"], min(options["token_clip"], each)) for each in rewards]
        beyond = 0.0
        if options.get("bootstrap") == "value" and truncated:
            beyond = float(batch[f"next_{values_name}"][row]) if f"next_{values_name}" in batch else values[-1]
        found = [0.0] * len(places) if math.isnan(r) else gae_row(rewards, values, beyond, options["gamma"], lam)
        for t, advantage, value in zip(places, found, values, strict=True):
            advantages[row, t], returns[row, t] = advantage, advantage + value
    return advantages, returns


def whiten_reference(advantages: np.ndarray, population: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    chosen = [advantages[place] for place in zip(*population.nonzero(), strict=True)]
    mean = sum(chosen) / len(chosen)
    variance = sum((each - mean) ** 2 for each in chosen) / (len(chosen) - ddof)
    return np.where(population, (advantages - mean) / math.sqrt(variance + eps), 0.0)


GAE_OPTIONS: list[dict[str, Any]] = [
    {"gamma": 1.0, "gae_lambda": 0.95},
    {"gamma": 0.9, "gae_lambda": 0.0, "kl_coefficient": 0.3, "kl_estimator": "k2"},
    {
        "gamma": 0.9,
        "gae_lambda": 1.0,
        "kl_coefficient": 0.3,
        "kl_estimator": "k3",
        "whiten_ddof": 1,
        "whiten_eps": 1e-3,
    },
    {"gamma": 1.0, "gae_lambda": 0.5, "value_lambda": 1.0, "kl_coefficient": 0.1, "bootstrap": "value"},
    {"gamma": 0.8, "gae_lambda": 0.7, "reward_clip": 1.5, "missing_eos_penalty": 2.0, "whiten": False},
    {"gamma": 0.8, "gae_lambda": 0.7, "value_lambda": 0.2, "bootstrap": "value", "missing_eos_penalty": 1.0},
]


@pytest.mark.parametrize("options", GAE_OPTIONS, ids=range(len(GAE_OPTIONS)))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_column", [False, True])
def test_gae_is_what_the_loops_compute(options: dict[str, Any], seed: int, with_column: bool) -> None:
    batch = random_batch(seed)
    if not with_column:
        del batch["next_values"]
    found = GAE(**options)(batch)
    advantages, _ = reference_rows(batch, options, lam=options["gae_lambda"])
    _, returns = reference_rows(batch, options, lam=options.get("value_lambda", options["gae_lambda"]))
    if options.get("whiten", True):
        population = batch["response_mask"].numpy() & ~np.isnan(batch["scores"].numpy())[:, None]
        ddof, eps = options.get("whiten_ddof", 0), options.get("whiten_eps", 1e-8)
        advantages = whiten_reference(advantages, population, ddof, eps)
    np.testing.assert_allclose(found["advantages"], advantages, atol=1e-10)
    np.testing.assert_allclose(found["returns"], returns, atol=1e-10)


@pytest.mark.parametrize("options", GAE_OPTIONS, ids=range(len(GAE_OPTIONS)))
@pytest.mark.parametrize("seed", range(4))
def test_a_score_after_the_response_is_one_more_step(options: dict[str, Any], seed: int) -> None:
    """The rows with room as rows that are one token longer, whose own reward is the score."""
    options = {name: value for name, value in options.items() if name != "bootstrap"}
    batch = random_batch(seed)
    has_room = np.arange(9) % 2 == 1  # of them one row without a trained token
    batch["next_values"] = torch.where(torch.tensor(has_room), batch["next_values"], NAN)
    found = GAE(**options, reward_position="after")(batch)
    assert tuple(found) == ("advantages", "returns", "next_returns")
    longer = dict(batch)
    has_room &= batch["response_mask"].numpy().any(1)
    for name in PER_TOKEN:
        last = batch["next_values"] if name == "values" else torch.zeros(9, dtype=torch.float64)
        longer[name] = torch.cat([batch[name], last[:, None]], 1)
    longer["response_mask"] = torch.cat([batch["response_mask"], torch.tensor(has_room)[:, None]], 1)
    advantages, _ = reference_rows(longer, options, lam=options["gae_lambda"])
    _, returns = reference_rows(longer, options, lam=options.get("value_lambda", options["gae_lambda"]))
    np.testing.assert_allclose(found["next_returns"], np.where(has_room, returns[:, 7], np.nan), atol=1e-10)
    advantages = advantages[:, :7]
    if options.get("whiten", True):
        population = batch["response_mask"].numpy() & ~np.isnan(batch["scores"].numpy())[:, None]
        advantages = whiten_reference(
            advantages, population, options.get("whiten_ddof", 0), options.get("whiten_eps", 1e-8)
        )
    np.testing.assert_allclose(found["advantages"], advantages, atol=1e-10)
    np.testing.assert_allclose(found["returns"], returns[:, :7], atol=1e-10)


LAGRANGIAN_OPTIONS: list[dict[str, Any]] = [
    {"multiplier": 0.0, "gamma": 1.0, "gae_lambda": 0.95},
    {"multiplier": 1.7, "gamma": 0.9, "gae_lambda": 0.5, "kl_coefficient": 0.4},
    {"multiplier": 5.0, "gamma": 0.9, "gae_lambda": 1.0, "kl_coefficient": 0.0, "bootstrap": "value"},
    {"multiplier": 1.0, "gamma": 1.0, "gae_lambda": 0.9, "kl_coefficient": 3.0, "token_clip": 1.25, "whiten": True},
]


@pytest.mark.parametrize("options", LAGRANGIAN_OPTIONS, ids=range(len(LAGRANGIAN_OPTIONS)))
@pytest.mark.parametrize("seed", range(4))
def test_lagrangian_is_what_the_loops_compute(options: dict[str, Any], seed: int) -> None:
    batch = random_batch(seed)
    found = LagrangianAdvantage(**options)(batch)
    asked = {"kl_coefficient": 0.02, "token_clip": 50.0, **options}
    scored = ~np.isnan(batch["scores"].numpy() + batch["costs"].numpy())[:, None]
    of_rewards, _ = reference_rows(batch, asked, lam=options["gae_lambda"])
    of_costs, _ = reference_rows(batch, asked, lam=options["gae_lambda"], score="costs", sign=-1)
    of_rewards, of_costs = of_rewards * scored, of_costs * scored
    combined = (of_rewards - options["multiplier"] * of_costs) / (1 + options["multiplier"])
    mask = batch["response_mask"].numpy()
    if options.get("whiten"):
        combined = whiten_reference(combined, mask & scored, 0, 1e-8)
    np.testing.assert_allclose(found["advantages"], combined, atol=1e-10)
    for name, values, advantages in (("returns", "values", of_rewards), ("cost_returns", "cost_values", of_costs)):
        wanted = advantages + np.where(mask, batch[values].numpy(), 0.0)
        np.testing.assert_allclose(found[name], wanted, atol=1e-10)


def test_lagrangian_pays_the_kl_with_one_weight() -> None:
    """Without critics and scores A is -beta times the KL still to come, for any multiplier."""
    batch = random_batch(0) | {name: torch.zeros(9, dtype=torch.float64) for name in ("scores", "costs")}
    batch |= {name: torch.zeros(9, 7, dtype=torch.float64) for name in ("values", "cost_values")}
    first, second = (
        LagrangianAdvantage(multiplier=each, kl_coefficient=0.5, token_clip=None)(batch)["advantages"]
        for each in (0.0, 30.0)
    )
    assert first.abs().max() > 0.1
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", [GAE(kl_coefficient=0.1), LagrangianAdvantage(multiplier=1.0)])
def test_what_is_masked_changes_nothing(estimator: Any) -> None:
    batch = random_batch(1)
    mask = batch["response_mask"]
    other = batch | {name: batch[name].masked_fill(~mask, 7.0) for name in PER_TOKEN}
    for name, column in estimator(batch).items():
        assert torch.equal(column, estimator(other)[name])
        assert not column[~mask].any()


@pytest.mark.parametrize("estimator", [GAE(), LagrangianAdvantage(multiplier=1.0, whiten=True)])
def test_a_row_without_a_score_does_not_touch_the_others(estimator: Any) -> None:
    batch = random_batch(2)
    with_nan = estimator(batch)
    kept = [row for row in range(9) if row not in (4, 5)] if "costs" in estimator.reads else [0, 1, 2, 3, 5, 6, 7, 8]
    without = estimator({name: column[kept] for name, column in batch.items()})
    for name, column in without.items():
        torch.testing.assert_close(with_nan[name][kept], column, rtol=0, atol=1e-12)
    assert not with_nan["advantages"][4].any()
    wanted = batch["values"][4].masked_fill(~batch["response_mask"][4], 0.0)
    assert torch.equal(with_nan["returns"][4], wanted)


@pytest.mark.parametrize(
    ("estimator", "reads"),
    [
        (GAE(), ("response_mask", "scores", "values")),
        (
            GAE(kl_coefficient=0.1, bootstrap="value"),
            ("response_mask", "scores", "values", "old_logprobs", "ref_logprobs", "finish_reason", "next_values?"),
        ),
        (GAE(reward_position="after"), ("response_mask", "scores", "values", "next_values")),
        (GAE(missing_eos_penalty=1.0), ("response_mask", "scores", "values", "finish_reason")),
        (
            LagrangianAdvantage(multiplier=1.0),
            ("response_mask", "scores", "costs", "values", "cost_values", "old_logprobs", "ref_logprobs"),
        ),
    ],
)
def test_an_estimator_declares_and_reads_the_same_columns(estimator: Any, reads: tuple[str, ...]) -> None:
    assert estimator.reads == reads
    batch = random_batch(0)
    declared = {name.removesuffix("?"): batch[name.removesuffix("?")] for name in reads}
    found = estimator(declared)
    assert tuple(found) == estimator.writes
    for name in (each for each in reads if not each.endswith("?")):
        lacking = {each: column for each, column in declared.items() if each != name}
        with pytest.raises(BatchError, match=f"reads column '{name}', which is not among"):
            estimator(lacking)


def test_float32_and_narrower_columns_answer_in_float32() -> None:
    batch = random_batch(0)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = {name: column.to(dtype) if column.is_floating_point() else column for name, column in batch.items()}
        assert {column.dtype for column in GAE(kl_coefficient=0.1)(narrow).values()} == {torch.float32}


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_whitening_one_token_or_equal_ones_gives_zeros(ddof: int, eps: float) -> None:
    one = torch.tensor([[5.0, NAN]])
    assert whiten(one, torch.tensor([[True, False]]), ddof=ddof, eps=eps).tolist() == [[0.0, 0.0]]
    assert whiten(torch.full((2, 2), 3.0), torch.ones(2, 2), ddof=ddof, eps=eps).tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("score", [0.1, 100.1, 1000.1, 12345.678])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_whitening_equal_scores_of_any_size_gives_zeros(score: float, eps: float) -> None:
    """The mean of equal float32 numbers, computed in float32, may differ from them by more than the root of eps."""
    batch = {"response_mask": torch.ones(7, 13, dtype=torch.bool), "scores": torch.full((7,), score)}
    found = ReinforceAdvantage(whiten=True, whiten_eps=eps)(batch)["advantages"]
    assert not found.any()


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_keeps_digits_of_values_far_from_zero(ddof: int) -> None:
    values = 3000.0 + 0.01 * torch.randn(400, 13, generator=torch.Generator().manual_seed(0))
    mask = np.ones(values.shape, dtype=bool)
    wanted = whiten_reference(values.double().numpy(), mask, ddof, 1e-8)
    found = whiten(values, torch.from_numpy(mask), ddof=ddof)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(9, 6)}, r"GAE: values has shape \[9, 6\], but response_mask needs \[9, 7\]"),
        ({"scores": torch.zeros(9, 7)}, r"GAE: scores has shape \[9, 7\], but response_mask needs \[9\]"),
        ({"scores": torch.full((9,), float("inf"))}, "GAE: scores=inf of row 0 is infinite"),
        ({"values": torch.full((9, 7), NAN)}, r"GAE: values=nan of token \d of row 0 is not finite"),
        ({"response_mask": torch.ones(9)}, r"GAE: response_mask has shape \[9\], but must be \[B, T\]"),
        ({"finish_reason": torch.zeros(9)}, "GAE: finish_reason has dtype torch.float32, but must hold whole numbers"),
        ({"next_values": torch.full((9,), NAN)}, "next_values=nan of row 0: a truncated response needs a number"),
    ],
)
def test_columns_that_do_not_fit_are_one_error(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        GAE(bootstrap="value")(random_batch(0) | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma=1.5 is not a number from 0 to 1"),
        ({"gae_lambda": NAN}, "gae_lambda=nan is not a number"),
        ({"value_lambda": -1}, "value_lambda=-1 is not a number"),
        ({"kl_coefficient": float("inf")}, "kl_coefficient=inf must be a finite number"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' is not one of 'k1', 'k2', 'k3'"),
        ({"bootstrap": "values"}, "bootstrap='values' is not one of 'zero', 'value'"),
        ({"reward_position": "pad"}, "reward_position='pad' is not one of 'last', 'after'"),
        ({"reward_position": "after", "bootstrap": "value"}, "bootstrap='value': with reward_position='after'"),
        ({"whiten_ddof": 2}, "whiten_ddof=2 is neither 0 nor 1"),
        ({"reward_clip": 0}, "reward_clip=0 must be a finite number above 0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must be"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GAE(**options)
