"""Group and REINFORCE estimators against loops in numpy float64, one group and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.advantages import GroupAdvantage, ReinforceAdvantage
from hf_protocols.errors import BatchError, ConfigError

NAN = float("nan")
GROUPS = {
    11: [0.0, 1.0, 0.0, 0.5],
    -3: [0.1, 0.1, 0.1],  # zero variance, though 0.1 + 0.1 + 0.1 rounds
    8: [2.0, NAN, -1.0, 0.25, NAN],
    40: [NAN, 1.5],  # one score is known
    5: [NAN, NAN],
    6: [-1.0, -2.0],  # a mean below 0
    7: [3.0, 0.1, 0.1, 0.1],  # the others of one are equal
}


def random_batch(seed: int, groups: dict[int, list[float]] = GROUPS, width: int = 6) -> dict[str, torch.Tensor]:
    """Rows of all groups in shuffled order, ragged with holes; NaN and infinity where the mask is False."""
    rng = np.random.default_rng(seed)
    rows = [(group, score) for group, scores in groups.items() for score in scores]
    rows = [rows[place] for place in rng.permutation(len(rows))]
    mask = rng.random((len(rows), width)) < 0.6
    mask[0], mask[1], mask[2] = False, True, np.arange(width) == 2
    spoiled = np.where(rng.random(mask.shape) < 0.5, np.nan, -np.inf)
    columns = {
        "response_mask": mask,
        "group_id": np.array([group for group, _ in rows]),
        "scores": np.array([score for _, score in rows]),
        "baseline_scores": np.where(np.arange(len(rows)) == 3, np.nan, rng.normal(size=len(rows))),
        **{name: np.where(mask, rng.normal(size=mask.shape), spoiled) for name in ("old_logprobs", "ref_logprobs")},
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std_of(values: list[float], ddof: int) -> float:
    if len(values) <= ddof or max(values) == min(values):
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - ddof))


def compare_reference(
    scores: list[float], lengths: list[int], options: dict[str, Any], batch: list[float]
) -> list[float]:
    """The advantages of one group's scored responses; `batch` has those of all groups."""
    baseline, scale = options.get("baseline", "mean"), options.get("scale", "std")
    ddof, eps, on = options.get("std_ddof", 1), options.get("std_eps", 1e-6), options.get("std_on", "s+eps")
    if len(scores) == 1 and (baseline, scale) != ("none", "none"):
        return scores if options.get("group_of_one") == "raw" else [0.0]
    found = []
    for i, score in enumerate(scores):
        others = [each for j, each in enumerate(scores) if j != i]
        b = {
            "mean": lambda: mean_of(scores),
            "leave_one_out": lambda others=others: mean_of(others),
            "length": lambda: (
                sum(n * each for n, each in zip(lengths, scores, strict=True)) / sum(lengths)
                if sum(lengths)
                else mean_of(scores)
            ),
            "none": lambda: 0.0,
        }[baseline]()
        difference = 0.0 if baseline != "none" and max(scores) == min(scores) else score - b
        if scale == "std":
            s = std_of({"others": others, "batch": batch}.get(options.get("std_over", "group"), scores), ddof)
            divisor = {"s+eps": s + eps, "max": max(s, eps), "positive": s + eps if s > 0 else 1.0}[on]
            difference = difference / divisor if divisor else 0.0
        elif scale == "mean":
            difference = difference / mean_of(scores) if mean_of(scores) > 0 else 0.0
        found.append(difference)
    return found


def kl_rows(batch: dict[str, torch.Tensor], coefficient: float, estimator: str) -> list[list[float]]:
    """coefficient * KL of each row's trained tokens."""
    found = []
    for row, mask in enumerate(batch["response_mask"]):
        places = mask.nonzero()[:, 0].tolist() if coefficient else []
        d = [float(batch["old_logprobs"][row, t] - batch["ref_logprobs"][row, t]) for t in places]
        kinds = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}
        found.append([coefficient * kinds[estimator](each) for each in d] or [0.0] * int(mask.sum()))
    return found


def spread_reference(
    score: float, penalties: list[float], gamma: float, kl_return: str, last: bool = False
) -> list[float]:
    length, found = len(penalties), []
    for t in range(length):
        total = gamma ** (length - 1 - t + last) * score
        if kl_return == "token":
            total -= penalties[t]
        else:
            total -= sum(gamma ** (u - t) * penalties[u] for u in range(t, length))
        found.append(total)
    return found


def group_reference(batch: dict[str, torch.Tensor], options: dict[str, Any]) -> np.ndarray:
    mask, groups = batch["response_mask"].numpy(), batch["group_id"].tolist()
    penalties = kl_rows(batch, options.get("kl_coefficient", 0.0), options.get("kl_estimator", "k1"))
    scores = [float(score) for score in batch["scores"]]
    kl_return = options.get("kl_return", "cumulative")
    if kl_return == "sequence":
        scores = [score - sum(each) for score, each in zip(scores, penalties, strict=True)]
        penalties = [[0.0] * len(each) for each in penalties]
    found, scored = np.zeros(mask.shape), [score for score in scores if not math.isnan(score)]
    for group in set(groups):
        rows = [row for row, each in enumerate(groups) if each == group and not math.isnan(scores[row])]
        compared = compare_reference(
            [scores[row] for row in rows], [int(mask[row].sum()) for row in rows], options, scored
        )
        limit = options.get("score_clip", math.inf)
        for row, advantage in zip(rows, (min(max(each, -limit), limit) for each in compared), strict=True):
            found[row, mask[row]] = spread_reference(
                advantage, penalties[row], options.get("gamma", 1.0), "token" if kl_return == "token" else "cumulative"
            )
    return found


GROUP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"std_ddof": 0, "std_eps": 1e-3},
    {"std_on": "max", "std_eps": 0.6},
    {"std_on": "positive", "std_eps": 0.0},
    {"std_eps": 0.0},
    {"scale": "none"},
    {"scale": "mean"},
    {"baseline": "leave_one_out", "scale": "none"},
    {"baseline": "leave_one_out"},
    {"baseline": "leave_one_out", "std_over": "others", "std_on": "positive"},
    {"baseline": "leave_one_out", "std_over": "others", "std_on": "positive", "std_ddof": 0},
    {"std_over": "batch"},
    {"std_over": "batch", "std_ddof": 0, "std_eps": 0.5, "std_on": "max"},
    {"std_over": "batch", "baseline": "leave_one_out", "kl_coefficient": 0.3, "kl_return": "sequence"},
    {"baseline": "length", "scale": "none"},
    {"baseline": "none", "scale": "none", "gamma": 0.7},
    {"baseline": "none", "std_on": "positive"},
    {"group_of_one": "raw"},
    {"group_of_one": "zero", "baseline": "leave_one_out", "scale": "none"},
    {"kl_coefficient": 0.3, "gamma": 0.9},
    {"kl_coefficient": 0.3, "kl_estimator": "k3", "kl_return": "token", "scale": "none"},
    {"kl_coefficient": 0.3, "kl_estimator": "k2", "kl_return": "sequence", "baseline": "leave_one_out"},
    {"score_clip": 0.5},
    {"score_clip": 0.75, "scale": "none", "kl_coefficient": 0.3, "gamma": 0.9, "baseline": "leave_one_out"},
]


@pytest.mark.parametrize("options", GROUP_OPTIONS, ids=range(len(GROUP_OPTIONS)))
@pytest.mark.parametrize("seed", range(3))
def test_group_advantages_are_what_the_loops_compute(options: dict[str, Any], seed: int) -> None:
    groups = GROUPS | ({99: [1.25], 98: [NAN]} if "group_of_one" in options else {})
    batch = random_batch(seed, groups)
    found = GroupAdvantage(**options)(batch)
    assert tuple(found) == GroupAdvantage.writes
    np.testing.assert_allclose(found["advantages"], group_reference(batch, options), atol=1e-9, rtol=1e-9)


REINFORCE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9, "kl_coefficient": 0.2, "whiten": True},
    {"gamma": 0.9, "kl_coefficient": 0.2, "kl_estimator": "k2", "whiten": True, "whiten_ddof": 1, "whiten_eps": 1e-2},
    {"baseline": "group", "whiten": True, "whiten_ddof": 1},
    {"baseline": "group", "kl_coefficient": 0.2, "kl_return": "token"},
    {"baseline": "greedy"},
    {
        "baseline": "greedy",
        "gamma": 0.99,
        "kl_coefficient": 0.05,
        "kl_return": "token",
        "score_clip": 0.5,
        "discounts_last": True,
    },
    {"baseline": "greedy", "gamma": 0.9, "kl_coefficient": 0.1, "kl_estimator": "k3"},
]


@pytest.mark.parametrize("options", REINFORCE_OPTIONS, ids=range(len(REINFORCE_OPTIONS)))
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_advantages_are_what_the_loops_compute(options: dict[str, Any], seed: int) -> None:
    batch = random_batch(seed)
    mask, groups = batch["response_mask"].numpy(), batch["group_id"].tolist()
    scores = batch["scores"].tolist()
    penalties = kl_rows(batch, options.get("kl_coefficient", 0.0), options.get("kl_estimator", "k1"))
    wanted, known = np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for row, score in enumerate(scores):
        siblings = [each for each, group in zip(scores, groups, strict=True) if group == groups[row]]
        siblings = [each for each in siblings if not math.isnan(each)]
        baseline = {
            "none": 0.0,
            "group": mean_of(siblings) if siblings else NAN,
            "greedy": float(batch["baseline_scores"][row]),
        }[options.get("baseline", "none")]
        difference = score - baseline
        if math.isnan(difference):
            continue
        limit = options.get("score_clip", math.inf)
        difference = max(-limit, min(limit, difference))
        known[row] = mask[row]
        wanted[row, mask[row]] = spread_reference(
            difference,
            penalties[row],
            options.get("gamma", 1.0),
            options.get("kl_return", "cumulative"),
            options.get("discounts_last", False),
        )
    if options.get("whiten"):
        chosen = wanted[known].tolist()
        mean, count = mean_of(chosen), len(chosen) - options.get("whiten_ddof", 0)
        variance = sum((each - mean) ** 2 for each in chosen) / count
        wanted = np.where(known, (wanted - mean) / math.sqrt(variance + options.get("whiten_eps", 1e-8)), 0.0)
    found = ReinforceAdvantage(**options)(batch)
    assert tuple(found) == ReinforceAdvantage.writes
    np.testing.assert_allclose(found["advantages"], wanted, atol=1e-10)


@pytest.mark.parametrize(
    "estimator",
    [
        GroupAdvantage(kl_coefficient=0.1),
        GroupAdvantage(kl_coefficient=0.1, kl_return="sequence", baseline="length"),
        ReinforceAdvantage(baseline="group", whiten=True, kl_coefficient=0.1),
        ReinforceAdvantage(baseline="greedy", kl_coefficient=0.1, kl_return="token"),
    ],
)
def test_order_of_rows_and_masked_numbers_change_nothing(estimator: Any) -> None:
    batch = random_batch(0)
    found = estimator(batch)["advantages"]
    assert not found[~batch["response_mask"]].any()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1))
    shuffled = {name: column[order] for name, column in batch.items()}
    for name in ("old_logprobs", "ref_logprobs"):
        shuffled[name] = shuffled[name].masked_fill(~shuffled["response_mask"], 3.0)
    torch.testing.assert_close(estimator(shuffled)["advantages"], found[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6, -0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"std_eps": 0.0}, {"baseline": "length"}, {"baseline": "leave_one_out"}])
def test_equal_scores_have_advantages_of_exactly_zero(
    value: float, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    columns = {
        "scores": torch.full((7,), value, dtype=dtype),
        "group_id": torch.zeros(7, dtype=torch.int64),
        "response_mask": torch.ones(7, 2),
    }
    assert not GroupAdvantage(**options)(columns)["advantages"].any()


@pytest.mark.parametrize("estimator", [GroupAdvantage(), ReinforceAdvantage(baseline="group")])
def test_a_group_of_one_is_named_with_the_key(estimator: Any) -> None:
    batch = random_batch(0, GROUPS | {77: [1.0]})
    message = "group_id=77 has 1 response, and a group needs at least 2. Raise rollout.samples_per_prompt"
    with pytest.raises(BatchError, match=message):
        estimator(batch)


@pytest.mark.parametrize(
    "estimator",
    [GroupAdvantage(), ReinforceAdvantage(whiten=True, whiten_ddof=1), ReinforceAdvantage(baseline="group")],
)
@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (2, 0)])
def test_an_empty_batch_has_empty_advantages(estimator: Any, rows: int, width: int) -> None:
    columns = {
        "scores": torch.zeros(rows),
        "group_id": torch.zeros(rows, dtype=torch.int64),
        "response_mask": torch.zeros(rows, width, dtype=torch.bool),
    }
    assert estimator(columns)["advantages"].shape == (rows, width)


@pytest.mark.parametrize(
    ("estimator", "reads"),
    [
        (GroupAdvantage(), ("response_mask", "scores", "group_id")),
        (
            GroupAdvantage(kl_coefficient=0.1),
            ("response_mask", "scores", "group_id", "old_logprobs", "ref_logprobs"),
        ),
        (ReinforceAdvantage(), ("response_mask", "scores")),
        (ReinforceAdvantage(baseline="group"), ("response_mask", "scores", "group_id")),
        (ReinforceAdvantage(baseline="greedy"), ("response_mask", "scores", "baseline_scores")),
    ],
)
def test_declared_columns_are_those_read(estimator: Any, reads: tuple[str, ...]) -> None:
    assert estimator.reads == reads
    batch = random_batch(0)
    estimator({name: batch[name] for name in reads})
    for name in reads:
        with pytest.raises(BatchError, match=f"reads column '{name}', which is not among"):
            estimator({each: batch[each] for each in reads if each != name})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "median"}, "baseline='median' is not one of 'mean', 'leave_one_out', 'length', 'none'"),
        ({"baseline": ["mean"]}, r"baseline=\['mean'\] is not one of"),
        ({"scale": "var"}, "scale='var' is not one of"),
        ({"group_of_one": "skip"}, "group_of_one='skip' is not one of 'error', 'raw', 'zero'"),
        ({"std_ddof": True}, "std_ddof=True is neither 0 nor 1"),
        ({"std_eps": -1e-6}, "std_eps=-1e-06 must be a finite number of at least 0"),
        ({"baseline": "none"}, "std_on='s.eps': divides by 1e-06 where the std is 0, and with baseline=\"none\""),
        ({"std_over": "others", "std_on": "max"}, "std_on='max': divides by 1e-06 .* with std_over=\"others\""),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupAdvantage(**options)
