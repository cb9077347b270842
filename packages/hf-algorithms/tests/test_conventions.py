"""Conventions: what each word stands for, and our numpy reference of the two projects that are not run."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from conformance import build_parts, draw_batch

from hf_algorithms.config import config_keys, format_toml, parse_config
from hf_algorithms.recipes import RECIPES
from hf_algorithms.recipes._steps import build_group_advantage
from hf_algorithms.recipes.conventions import CONVENTIONS, RELEASES, expand_conventions
from hf_protocols import ConfigError

PAIRS = [(word, name) for word, tables in CONVENTIONS.items() for name in tables]
LACKING = [(word, name) for word, tables in CONVENTIONS.items() for name in RECIPES if name not in tables]


def parse(algorithm: str, conventions: str, **keys: Any) -> Any:
    section = {"name": algorithm, "conventions": conventions, **keys}
    return parse_config({"data": {"train": "rows.jsonl"}, "algorithm": section})


@pytest.mark.parametrize(("word", "algorithm"), PAIRS)
def test_conventions_expand_and_read_back(word: str, algorithm: str) -> None:
    table = CONVENTIONS[word][algorithm]
    known = config_keys(RECIPES[algorithm])
    assert all(f"algorithm.{key}" in known for key in table)
    config = parse(algorithm, word)
    assert {key: getattr(config.algorithm, key) for key in table} == table
    written = format_toml(config)
    for key, value in table.items():
        assert value is None or f"\n{key} = " in written
    again = parse_config(tomllib.loads(written))
    assert again == config
    assert format_toml(again) == written


@pytest.mark.parametrize(("word", "algorithm"), PAIRS)
def test_explicit_keys_win(word: str, algorithm: str) -> None:
    table = CONVENTIONS[word][algorithm]
    numbers = {key: value for key, value in table.items() if isinstance(value, float)}
    for key, value in numbers.items():
        config = parse(algorithm, word, **{key: value / 2 if value else 0.5})
        assert getattr(config.algorithm, key) != value
        others = {other: getattr(config.algorithm, other) for other in table if other != key}
        assert others == {other: table[other] for other in others}


@pytest.mark.parametrize(("word", "algorithm"), LACKING)
def test_an_algorithm_that_a_project_lacks_is_one_error(word: str, algorithm: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse(algorithm, word)
    message = str(failure.value)
    assert message.startswith(f"algorithm.conventions = '{word}': {RELEASES[word]} has nothing that computes")
    assert f"'{algorithm}'" in message
    assert "\n" not in message


def test_safe_rlhf_is_in_no_project() -> None:
    assert {word for word, name in LACKING if name == "safe_rlhf"} == set(RELEASES)


def test_ours_is_the_default_of_every_key() -> None:
    assert expand_conventions("ours", "grpo") == {}
    assert parse("grpo", "ours") == parse_config({"data": {"train": "rows.jsonl"}, "algorithm": {"name": "grpo"}})


@pytest.mark.parametrize("word", ["TRL", "", 3, None, ["trl"], {"trl": 1}])
def test_an_unknown_word_is_an_error_that_names_the_key(word: Any) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.conventions"):
        parse("ppo", word)


@pytest.mark.parametrize(
    ("algorithm", "word", "key"),
    [("grpo", "verl", "dual_clip"), ("ppo", "ours", "value_clip"), ("ppo", "verl", "log_ratio_clamp")],
)
def test_none_switches_a_key_off_and_reads_back(algorithm: str, word: str, key: str) -> None:
    config = parse(algorithm, word, **{key: "none"})
    assert getattr(config.algorithm, key) is None
    written = format_toml(config)
    assert f'\n{key} = "none"\n' in written
    assert parse_config(tomllib.loads(written)) == config


def test_none_is_refused_where_a_key_needs_a_value() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low = 'none': must be a number"):
        parse("grpo", "verl", clip_low="none")
    assert parse("ppo", "ours", kl_place="none").algorithm.kl_place == "none"


def test_a_resolved_file_takes_other_conventions_for_nothing() -> None:
    """Its keys are all written, and what is written wins."""
    body = tomllib.loads(format_toml(parse("grpo", "trl")))
    body["algorithm"]["conventions"] = "verl"
    assert parse_config(body).algorithm.std_eps == 1e-4


@pytest.mark.parametrize(
    ("algorithm", "keys", "message"),
    [
        (
            "grpo",
            {"baseline": "leave_one_out"},
            r"^algorithm\.std_on = 's\+eps' \(the default\): with algorithm\.baseline",
        ),
        ("rloo", {"ratio": "sequence", "dual_clip": 3.0}, r"^algorithm\.dual_clip: algorithm\.ratio = 'sequence'"),
        ("rloo", {"ratio": "sequence", "aggregation": "token-mean"}, r"^algorithm\.ratio = 'sequence': with"),
        ("grpo", {"kl_estimator": "k2", "kl_gradient": "ratio"}, r"^algorithm\.kl_gradient = 'ratio': "),
    ],
)
def test_switches_that_cannot_go_together(algorithm: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(algorithm, "ours", **keys)


@pytest.mark.parametrize(
    ("section", "begin"),
    [
        ({"name": "grpo", "kl_place": "reward"}, "algorithm.kl_estimator = 'k3' (the default): with algorithm.kl_pl"),
        ({"name": "grpo", "kl_place": "reward", "kl_estimator": "k3"}, "algorithm.kl_estimator = 'k3': with algorithm"),
        (
            {"name": "ppo", "conventions": "verl", "kl_place": "loss", "kl_coefficient": 0.01},
            "algorithm.kl_gradient = 'value' (by conventions = 'verl'): in the loss",
        ),
    ],
)
def test_a_contradiction_says_where_a_value_is_from(section: dict[str, Any], begin: str) -> None:
    body = {"data": {"train": "rows.jsonl"}, "algorithm": section, "rollout": {"samples_per_prompt": 4}}
    with pytest.raises(ConfigError) as refused:
        parse_config(body)
    assert str(refused.value).startswith(begin)


# ------------------------------------------------------------------- the projects that are not run, in numpy


def group_rows(batch: dict[str, Any]) -> list[np.ndarray]:
    ids = batch["group_id"].numpy()
    return [np.flatnonzero(ids == each) for each in np.unique(ids)]


def nemo_grpo(batch: dict[str, Any]) -> np.ndarray:
    """Mean and deviation of the other responses; it divides where that deviation is above 0."""
    scores = batch["scores"].numpy()
    found = np.zeros_like(scores)
    for rows in group_rows(batch):
        for row in rows:
            others = scores[rows[rows != row]]
            spread = 0.0 if np.ptp(others) == 0 else others.std(ddof=1)
            found[row] = (scores[row] - others.mean()) / (spread + 1e-6 if spread > 0 else 1.0)
    return np.where(batch["response_mask"].numpy(), found[:, None], 0.0)


def penalty(batch: dict[str, Any]) -> np.ndarray:
    difference = (batch["old_logprobs"] - batch["ref_logprobs"]).numpy()
    return np.where(batch["response_mask"].numpy(), 0.01 * difference, 0.0)


def sums_from_the_end(values: np.ndarray) -> np.ndarray:
    return values[:, ::-1].cumsum(1)[:, ::-1]


def cut(values: np.ndarray) -> np.ndarray:
    """OpenRLHF's `reward_clip_range`."""
    return np.clip(values, -10, 10)


def spread_out(batch: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """A score per row on each trained token, less the KL of this token and all that follow."""
    return np.where(batch["response_mask"].numpy(), rows[:, None] - sums_from_the_end(penalty(batch)), 0.0)


def white(values: np.ndarray, mask: np.ndarray, ddof: int) -> np.ndarray:
    return np.where(mask, (values - values[mask].mean()) / np.sqrt(values[mask].var(ddof=ddof) + 1e-8), 0.0)


def centred(batch: dict[str, Any]) -> np.ndarray:
    scores = batch["scores"].numpy()
    found = np.zeros_like(scores)
    for rows in group_rows(batch):
        found[rows] = scores[rows] - scores[rows].mean()
    return found


def openrlhf_group_norm(batch: dict[str, Any]) -> np.ndarray:
    scores, found = batch["scores"].numpy(), centred(batch)
    for rows in group_rows(batch):
        found[rows] /= (0.0 if np.ptp(scores[rows]) == 0 else scores[rows].std(ddof=1)) + 1e-9
        found[rows] *= np.ptp(scores[rows]) > 0
    return spread_out(batch, cut(found))


def openrlhf_rloo(batch: dict[str, Any]) -> np.ndarray:
    scores, found = batch["scores"].numpy(), np.zeros(len(batch["scores"]))
    for rows in group_rows(batch):
        for row in rows:
            found[row] = scores[row] - scores[rows[rows != row]].mean()
    return spread_out(batch, cut(found))


def openrlhf_reinforce(batch: dict[str, Any]) -> np.ndarray:
    return white(spread_out(batch, cut(batch["scores"].numpy())), batch["response_mask"].numpy(), 0)


def openrlhf_reinforce_baseline(batch: dict[str, Any]) -> np.ndarray:
    return white(spread_out(batch, cut(centred(batch))), batch["response_mask"].numpy(), 0)


def openrlhf_gae(batch: dict[str, Any]) -> np.ndarray:
    """Lambda 1 and gamma 1: what the response still earns, less the value before the token."""
    mask = batch["response_mask"].numpy()
    earned = spread_out(batch, cut(batch["scores"].numpy()))
    return white(np.where(mask, earned - batch["values"].numpy(), 0.0), mask, 0)


def nemo_gae(batch: dict[str, Any]) -> np.ndarray:
    """Lambda 0.95, gamma 1, no KL in the rewards; the next trained token is the next step."""
    mask = batch["response_mask"].numpy()
    found = np.zeros(mask.shape)
    for row, trained in enumerate(mask):
        values, places = batch["values"].numpy()[row][trained], np.flatnonzero(trained)
        following, total = 0.0, 0.0
        for at in reversed(range(len(places))):
            reward = batch["scores"].numpy()[row] if at == len(places) - 1 else 0.0
            total = reward + following - values[at] + 0.95 * total
            following, found[row, places[at]] = values[at], total
    return white(found, mask, 1)


def nemo_reinforce_baseline(batch: dict[str, Any]) -> np.ndarray:
    mask = batch["response_mask"].numpy()
    return white(np.where(mask, centred(batch)[:, None] - penalty(batch), 0.0), mask, 1)


REFERENCES = {
    ("nemo", "grpo"): nemo_grpo,
    ("nemo", "dapo"): nemo_grpo,
    ("nemo", "gspo"): nemo_grpo,
    ("nemo", "cispo"): nemo_grpo,
    ("nemo", "ppo"): nemo_gae,
    ("nemo", "reinforce_pp_baseline"): nemo_reinforce_baseline,
    ("openrlhf", "ppo"): openrlhf_gae,
    ("openrlhf", "grpo"): openrlhf_group_norm,
    ("openrlhf", "gspo"): openrlhf_group_norm,
    ("openrlhf", "rloo"): openrlhf_rloo,
    ("openrlhf", "reinforce_pp"): openrlhf_reinforce,
    ("openrlhf", "reinforce_pp_baseline"): openrlhf_reinforce_baseline,
}


def test_every_pair_that_is_not_run_has_a_reference() -> None:
    assert set(REFERENCES) == {pair for pair in PAIRS if pair[0] in ("openrlhf", "nemo")}


@pytest.mark.parametrize(("word", "algorithm"), REFERENCES)
def test_advantages_are_those_of_the_numpy_reference(word: str, algorithm: str) -> None:
    for seed in range(5):
        batch = draw_batch(seed)
        batch["scores"] = batch["scores"] * (1.0 if seed % 2 else 30.0)  # beyond OpenRLHF's clip
        ours = build_parts(algorithm, word).estimator(batch)["advantages"]
        np.testing.assert_allclose(ours.numpy(), REFERENCES[word, algorithm](batch), rtol=1e-9, atol=1e-9)


def test_a_ratio_weighs_the_kl_term_as_the_policy_would_draw() -> None:
    """All actions of a softmax table, weighed by the old policy: the exact gradient of KL(policy || reference)."""
    random = torch.Generator().manual_seed(0)
    logits, old, reference = torch.randn(3, 5, generator=random, dtype=torch.float64)
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    kl = (policy.exp() * (policy - reference.log_softmax(0))).sum()
    (wanted,) = torch.autograd.grad(kl, logits)
    # the surrogate's share is 0: no advantage
    loss = build_parts("grpo", "trl", kl_coefficient=1.0, mini_batches=2).policy_loss
    batch = {
        "response_mask": torch.ones(5, 1, dtype=torch.bool),
        "advantages": torch.zeros(5, 1, dtype=torch.float64),
        "old_logprobs": old.log_softmax(0)[:, None],
        "ref_logprobs": reference.log_softmax(0)[:, None],
    }
    found = torch.zeros(5, dtype=torch.float64)
    for action, share in enumerate(old.softmax(0)):
        one = {name: column[action : action + 1] for name, column in batch.items()}
        sample = loss({"logprobs": logits.log_softmax(0)[None, action : action + 1]}, one)[0]
        found += share * torch.autograd.grad(sample, logits)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("keys", "scale", "over"),
    [
        ({}, "std", "group"),
        ({"std_over": "batch"}, "std", "batch"),
        ({"std_over": "none"}, "none", "group"),
        ({"std_over": "batch", "baseline": "leave_one_out"}, "std", "batch"),
        ({"baseline": "leave_one_out", "std_on": "positive"}, "std", "others"),
    ],
)
def test_level_of_the_deviation_is_a_key(keys: dict[str, Any], scale: str, over: str) -> None:
    estimator = build_group_advantage(parse("grpo", "ours", **keys).algorithm)
    assert estimator.scale == scale
    if scale == "std":
        assert estimator.std_over == over
