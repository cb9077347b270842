"""Surrogates against formulas of single rows in numpy, and their gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.losses import (
    CISPO,
    DPPOTV,
    GMPO,
    SAPO,
    Aggregation,
    Clip,
    Correction,
    KLTerm,
    PolicyLoss,
    Reinforce,
    SequenceClip,
    SequenceProductClip,
    Surrogate,
)
from hf_protocols import BatchError, ConfigError

Row = Callable[..., np.ndarray]


def clip(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    ratio = np.exp(x - old)
    return np.array([max(-a[t] * r, -a[t] * min(max(r, 0.8), 1.28)) for t, r in enumerate(ratio)])


def dual(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    plain = clip(x, frozen, old, mu, a)
    return np.array([min(each, -a[t] * 1.6) if a[t] < 0 else each for t, each in enumerate(plain)])


def capped(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    ratio = np.exp(x - old)
    for t, each in enumerate(frozen - old):
        if each > math.log(1.5):
            ratio[t] = 1.5 * math.exp(x[t] - frozen[t])
    return np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2))


def sequence(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    ratio = math.exp(sum(x - old) / len(x))
    return np.array([-min(ratio * each, min(max(ratio, 0.9), 1.15) * each) for each in a])


def product(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    ratio = math.exp(sum(x - old))
    return np.array([-min(ratio * each, min(max(ratio, 0.7), 1.4) * each) / len(x) for each in a])


def cispo(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    return -np.clip(np.exp(frozen - old), 0.8, 1.3) * a * x


def sapo(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    tau = np.array([2.0 if each > 0 else 3.0 for each in a])
    return -4 / tau / (1 + np.exp(-tau * (np.exp(x - old) - 1))) * a


def gmpo(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    # Equation 4: the sign of A turns min into max.
    sign = np.sign(a)
    kept = sign * np.minimum(sign * (x - old), sign * np.clip(x - old, -0.2, 0.3))
    return -a * np.exp(kept.mean())


def dppo(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    loss = np.zeros(len(x))
    for t in range(len(x)):
        change = math.exp(frozen[t]) - math.exp(mu[t])
        if (a[t] > 0 and change <= 0.03) or (a[t] <= 0 and change >= -0.03):
            loss[t] = -a[t] * min(math.exp(frozen[t] - old[t]), 1.5) * x[t]
    return loss


def reinforce(x: np.ndarray, frozen: np.ndarray, old: np.ndarray, mu: np.ndarray, a: np.ndarray) -> np.ndarray:
    return -a * x


OF_TOKENS: dict[str, tuple[Surrogate, Row]] = {
    "clip": (Clip(low=0.2, high=0.28), clip),
    "dual": (Clip(low=0.2, high=0.28, dual=1.6), dual),
    "capped": (Clip(ratio_cap=1.5), capped),
    "cispo": (CISPO(low=0.2, high=0.3), cispo),
    "sapo": (SAPO(tau_positive=2.0, tau_negative=3.0), sapo),
    "dppo": (DPPOTV(threshold=0.03, ratio_cap=1.5), dppo),
    "reinforce": (Reinforce(), reinforce),
}
OF_SEQUENCES: dict[str, tuple[Surrogate, Row]] = {
    "sequence": (SequenceClip(low=0.1, high=0.15), sequence),
    "product": (SequenceProductClip(low=0.3, high=0.4), product),
    "gmpo": (GMPO(low=0.2, high=0.3), gmpo),
}
ALL = OF_TOKENS | OF_SEQUENCES
COLUMNS = ("old_logprobs", "rollout_logprobs", "advantages")


def make_batch(seed: int, *, one_advantage: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Ragged rows with holes, one of them without a trained token; other places hold NaN."""
    generator = np.random.default_rng(seed)
    mask = generator.random((6, 9)) < 0.6
    mask[2] = False
    mask[3] = np.arange(9) == 4
    logprobs = generator.normal(-2, 0.7, (6, 9))
    columns = {
        "old_logprobs": logprobs + generator.normal(0, 0.3, (6, 9)) + generator.normal(0, 0.2, (6, 1)),
        "rollout_logprobs": logprobs + generator.normal(0, 0.3, (6, 9)),
        "advantages": generator.normal(0, 1, (6, 1 if one_advantage else 9)) * np.ones((6, 9)),
        "ref_logprobs": logprobs + generator.normal(0, 0.3, (6, 9)),
    }
    dirty = {name: torch.tensor(np.where(mask, column, np.nan)) for name, column in columns.items()}
    return torch.tensor(np.where(mask, logprobs, np.nan)), {**dirty, "response_mask": torch.tensor(mask)}


def reference_sum(row_loss: Row, x: np.ndarray, frozen: np.ndarray, batch: dict[str, torch.Tensor]) -> float:
    """Sum over rows of the mean over trained tokens."""
    mask = batch["response_mask"].numpy()
    columns = [batch[name].numpy() for name in COLUMNS]
    rows = [i for i in range(len(mask)) if mask[i].any()]
    picked = [[each[i][mask[i]] for each in (x, frozen, *columns)] for i in rows]
    return sum(float(row_loss(*each).mean()) for each in picked)


def gradient_of(
    loss: Callable[..., Any], logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[float, dict[str, tuple[float, float]], np.ndarray]:
    own = logprobs.clone().requires_grad_()
    found, metrics = loss({"logprobs": own}, batch)
    found.backward()
    assert own.grad is not None
    return float(found.detach()), metrics, own.grad.numpy()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ALL)
def test_surrogates_follow_their_formulas(name: str, seed: int) -> None:
    """The reference of a sequence's ratio is the paper's form, through which the gradient reaches all its tokens."""
    surrogate, row_loss = ALL[name]
    logprobs, batch = make_batch(seed, one_advantage=name in OF_SEQUENCES)
    loss = PolicyLoss(surrogate=surrogate, aggregation=Aggregation(mode="seq-mean-token-mean"))
    value, metrics, gradient = gradient_of(loss, logprobs, batch)
    point = logprobs.numpy()
    np.testing.assert_allclose(value, reference_sum(row_loss, point, point, batch), rtol=1e-12)
    assert metrics["policy_loss"] == (value, 5.0)
    assert loss.count(batch) == 5.0
    for index in np.argwhere(batch["response_mask"].numpy()):
        step = np.zeros_like(point)
        step[tuple(index)] = 1e-6
        higher, lower = (reference_sum(row_loss, point + each, point, batch) for each in (step, -step))
        np.testing.assert_allclose(gradient[tuple(index)], (higher - lower) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["clip", "sapo", "reinforce", "dual"])
def test_gradients_of_smooth_parts_pass_gradcheck(name: str) -> None:
    logprobs, batch = make_batch(1, one_advantage=False)
    loss = PolicyLoss(surrogate=ALL[name][0])
    clean = {key: column.nan_to_num() if column.is_floating_point() else column for key, column in batch.items()}
    own = logprobs.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss({"logprobs": x}, clean)[0], (own,))


def test_product_of_ratios_is_a_mean_over_sequences() -> None:
    """As TRL's RLOO computes it: one clipped ratio for each sequence."""
    logprobs, batch = make_batch(5, one_advantage=True)
    loss = PolicyLoss(
        surrogate=SequenceProductClip(low=0.3, high=0.4), aggregation=Aggregation(mode="seq-mean-token-sum")
    )
    value, _, _ = gradient_of(loss, logprobs, batch)
    wanted = 0.0
    for i, row in enumerate(batch["response_mask"].numpy()):
        if row.any():
            ratio = math.exp(float((logprobs - batch["old_logprobs"])[i][row].sum()))
            a = float(batch["advantages"][i][row][0])
            wanted += -min(ratio * a, min(max(ratio, 0.7), 1.4) * a)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", ALL)
def test_all_surrogates_have_one_gradient_at_ratio_one(name: str, mode: Any) -> None:
    logprobs, batch = make_batch(6, one_advantage=False)
    same = {**batch, "old_logprobs": logprobs, "rollout_logprobs": logprobs}
    loss = PolicyLoss(surrogate=ALL[name][0], aggregation=Aggregation(mode=mode))
    _, metrics, gradient = gradient_of(loss, logprobs, same)
    _, _, current = gradient_of(
        PolicyLoss(surrogate=ALL[name][0], aggregation=loss.aggregation, old="current"), logprobs, same
    )
    mask = batch["response_mask"].numpy()
    tokens = mask.sum(1, keepdims=True).clip(1)
    weights = mask / tokens if mode == "seq-mean-token-mean" else mask
    wanted = np.where(mask, -batch["advantages"].numpy() * weights, 0.0)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(current, wanted, rtol=1e-12, atol=1e-15)
    assert metrics["clip_low"][0] == metrics["clip_high"][0] == metrics["update_kl"][0] == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("name", ALL)
def test_what_stands_at_masked_tokens_changes_nothing(name: str, garbage: float) -> None:
    logprobs, batch = make_batch(7, one_advantage=False)
    mask = batch["response_mask"]
    loss = PolicyLoss(
        surrogate=ALL[name][0],
        aggregation=Aggregation(mode="seq-mean-token-mean"),
        correction=Correction(kind="sequence_mask", low=0.5, high=3.0),
        kl=KLTerm(coefficient=0.3, estimator="k3"),
    )

    def fill(value: float) -> tuple[float, dict[str, tuple[float, float]], np.ndarray]:
        dirty = {key: each.masked_fill(~mask, value) for key, each in batch.items() if each.is_floating_point()}
        return gradient_of(loss, logprobs.masked_fill(~mask, value), {**dirty, "response_mask": mask})

    (value, metrics, gradient), (wanted, wanted_metrics, wanted_gradient) = fill(garbage), fill(-0.5)
    assert value == pytest.approx(wanted, abs=1e-12)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-12)
    assert not gradient[~mask.numpy()].any()
    assert metrics.keys() == wanted_metrics.keys()
    for key, pair in metrics.items():
        np.testing.assert_allclose(pair, wanted_metrics[key], atol=1e-12)


@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ALL)
def test_gradients_stay_finite_for_any_ratio(name: str, advantage: float, log_ratio: float) -> None:
    logprobs = torch.tensor([[-0.5, -0.5]])
    batch = {
        "old_logprobs": logprobs - log_ratio,
        "rollout_logprobs": logprobs - log_ratio,
        "advantages": torch.full((1, 2), advantage),
        "response_mask": torch.ones(1, 2, dtype=torch.bool),
    }
    value, _, gradient = gradient_of(PolicyLoss(surrogate=ALL[name][0]), logprobs, batch)
    assert math.isfinite(value) and np.isfinite(gradient).all()


def test_clips_are_counted_where_they_change_the_loss() -> None:
    ratios = torch.tensor([[0.5, 0.5, 1.0, 2.0, 2.0, 4.0, 2.0]])
    batch = {
        "old_logprobs": torch.zeros(1, 7),
        "advantages": torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 0.0]]),
        "response_mask": torch.ones(1, 7, dtype=torch.bool),
    }
    _, metrics, gradient = gradient_of(PolicyLoss(surrogate=Clip(dual=3.0)), ratios.log(), batch)
    assert [metrics[f"clip_{side}"] for side in ("low", "high", "dual")] == [(1.0, 7.0)] * 3
    np.testing.assert_allclose(gradient, [[-0.5, 0.0, -1.0, 0.0, 2.0, 0.0, 0.0]], rtol=1e-6)
    _, metrics, gradient = gradient_of(PolicyLoss(surrogate=CISPO(low=0.2, high=0.5)), ratios.log(), batch)
    assert [metrics[f"clip_{side}"] for side in ("low", "high")] == [(2.0, 7.0), (4.0, 7.0)]
    np.testing.assert_allclose(gradient, [[-0.8, 0.8, -1.0, -1.5, 1.5, 1.5, 0.0]], rtol=1e-6)


def test_dppo_takes_the_anchor_that_it_is_given() -> None:
    batch = {
        "old_logprobs": torch.tensor([[0.5, 0.5]]).log(),
        "rollout_logprobs": torch.tensor([[0.1, 0.9]]).log(),
        "advantages": torch.tensor([[1.0, -1.0]]),
        "response_mask": torch.ones(1, 2, dtype=torch.bool),
    }
    for anchor, wanted in (("sampler", [[0.0, 0.0]]), ("old", [[-1.0, 1.0]])):
        surrogate = DPPOTV(threshold=0.2, anchor=anchor)  # type: ignore[arg-type]
        _, _, gradient = gradient_of(PolicyLoss(surrogate=surrogate), batch["old_logprobs"], batch)
        np.testing.assert_allclose(gradient, wanted)
    assert "rollout_logprobs" not in PolicyLoss(surrogate=DPPOTV(anchor="old")).reads


def test_a_loss_reads_what_its_parts_need() -> None:
    assert PolicyLoss().reads == ("response_mask", "advantages", "old_logprobs")
    assert PolicyLoss(surrogate=Reinforce()).reads == ("response_mask", "advantages", "old_logprobs?")
    current = PolicyLoss(old="current", kl=KLTerm(coefficient=0.1))
    assert current.reads == ("response_mask", "advantages", "rollout_logprobs?", "ref_logprobs")
    corrected = PolicyLoss(old="current", correction=Correction(kind="tis"))
    assert corrected.reads == ("response_mask", "advantages", "rollout_logprobs")
    assert PolicyLoss(correction=Correction(kind="tis")).reads[2:] == ("old_logprobs", "rollout_logprobs")
    assert PolicyLoss(surrogate=DPPOTV(), old="current").reads[2:] == ("rollout_logprobs",)
    logprobs, batch = make_batch(0, one_advantage=False)
    del batch["old_logprobs"]
    _, metrics, _ = gradient_of(PolicyLoss(surrogate=Reinforce()), logprobs, batch)
    assert "update_kl" not in metrics
    with pytest.raises(BatchError, match="column 'old_logprobs' of the batch: is missing, and Clip"):
        PolicyLoss()({"logprobs": logprobs}, batch)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clip(low=-0.1), "clip_low=-0.1"),
        (lambda: SequenceClip(high=math.nan), "clip_high=nan"),
        (lambda: Clip(dual=1.0), "dual_clip=1.0: must be above 1"),
        (lambda: Clip(ratio_cap=0.0), "ratio_cap=0.0"),
        (lambda: SAPO(tau_negative=0.0), "tau_negative=0.0"),
        (lambda: DPPOTV(anchor="sampled"), "anchor='sampled'"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(old="sampled"), "old='sampled'"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(log_ratio_clamp=0.0), "log_ratio_clamp=0.0"),
    ],
)
def test_parts_refuse_values_out_of_range(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
