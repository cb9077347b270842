"""Compares `algorithm.conventions = "verl"` with verl 0.9.1: advantages, losses, gradients.

    conformance_verl.py            runs in an environment of its own and writes results/conformance_verl.json
    conformance_verl.py --inside   is that run

verl's functions are called with its own defaults. Only what selects an algorithm is given, and where its documentation
names another value for one (GSPO's clip), that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conformance import SEEDS, Comparison, Parts, answer, build_parts, draw_batch, place_scores, run_in_environment

INSTALLS = (
    ("--no-deps", "verl==0.9.1"),
    (
        *("torch==2.13.0", "ray==2.60.0", "tensordict==0.10.0", "transformers>=5.5.3,<5.11", "numpy>=2", "pandas"),
        *("hydra-core", "codetiming", "datasets", "dill", "accelerate", "peft", "pyarrow", "torchdata", "packaging"),
        *("psutil", "pydantic"),
    ),
)
WIDTH = 11
_POLICIES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "gmpo": "geo_mean", "dppo_tv": "dppo_tv"}


def main() -> int:
    """Run in the peer's environment, or start that run and write its result."""
    if "--inside" in sys.argv:
        return _run_inside()
    from conformance_page import publish

    found = run_in_environment(Path(__file__).resolve(), "verl", INSTALLS)
    return publish("verl", found)


def _run_inside() -> int:
    from importlib.metadata import version

    comparison = Comparison()
    for seed in SEEDS:
        _compare_advantages(comparison, seed)
        _compare_losses(comparison, seed)
        _compare_corrections(comparison, seed)
        _compare_aggregations(comparison, seed)
        _compare_kl(comparison, seed)
    _compare_controllers(comparison)
    answer(comparison, {name: version(name) for name in ("verl", "torch", "tensordict")})
    return 0


def _compare_advantages(comparison: Comparison, seed: int) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    batch = draw_batch(seed, width=WIDTH)
    mask, rewards, index = batch["response_mask"], place_scores(batch), batch["group_id"].numpy()
    config = AlgoConfig()
    common = {"response_mask": mask.double(), "config": config}

    def estimate(algorithm: str, name: str, **arguments: Any) -> None:
        theirs, _ = core_algos.get_adv_estimator_fn(name)(rewards.clone(), **arguments, **common)
        ours = build_parts(algorithm, "verl").estimator(batch)["advantages"]
        comparison.compare(f"{algorithm}/advantages", ours, theirs, mask)

    for algorithm in ("grpo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dapo"):
        estimate(algorithm, "grpo", index=index)
    estimate("dr_grpo", "grpo", index=index, norm_adv_by_std_in_grpo=False)
    estimate("rloo", "rloo", index=index)
    estimate("opo", "opo", index=index)
    estimate("reinforce_pp_baseline", "reinforce_plus_plus_baseline", index=index)
    estimate("reinforce_pp", "reinforce_plus_plus")
    estimate("remax", "remax", reward_baselines=batch["baseline_scores"])
    _compare_groups_of_one(comparison, seed)
    _compare_gae(comparison, batch)


def _compare_groups_of_one(comparison: Comparison, seed: int) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    batch = draw_batch(seed, width=WIDTH, groups=5, samples=1)
    mask, index = batch["response_mask"], batch["group_id"].numpy()
    pairs = {"grpo": "grpo", "rloo": "rloo", "opo": "opo", "reinforce_pp_baseline": "reinforce_plus_plus_baseline"}
    for algorithm, name in pairs.items():
        estimate = core_algos.get_adv_estimator_fn(name)
        theirs, _ = estimate(place_scores(batch), response_mask=mask.double(), index=index, config=AlgoConfig())
        ours = build_parts(algorithm, "verl").estimator(batch)["advantages"]
        comparison.compare(f"{algorithm} in groups of one/advantages", ours, theirs, mask)


def _compare_gae(comparison: Comparison, batch: dict[str, Any]) -> None:
    """GAE, also with the KL penalty in the token rewards, and REINFORCE++ and ReMax with it."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    mask, config = batch["response_mask"], AlgoConfig()
    kl = core_algos.kl_penalty(batch["old_logprobs"], batch["ref_logprobs"], config.kl_penalty) * mask
    for name, coefficient in (("ppo", 0.0), ("ppo with KL in the reward", 0.3)):
        rewards = place_scores(batch) - coefficient * kl
        theirs, returns = core_algos.compute_gae_advantage_return(
            rewards, batch["values"], mask.double(), config.gamma, config.lam
        )
        ours = build_parts("ppo", "verl", kl_coefficient=coefficient).estimator(batch)
        comparison.compare(f"{name}/advantages", ours["advantages"], theirs, mask)
        comparison.compare(f"{name}/returns", ours["returns"], returns, mask)
    rewards = place_scores(batch) - 0.3 * kl
    pairs: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("reinforce_pp", "reinforce_plus_plus", {}),
        ("remax", "remax", {"reward_baselines": batch["baseline_scores"]}),
    )
    for algorithm, name, arguments in pairs:
        estimate = core_algos.get_adv_estimator_fn(name)
        theirs, _ = estimate(rewards, response_mask=mask.double(), config=config, **arguments)
        ours = build_parts(algorithm, "verl", kl_coefficient=0.3).estimator(batch)
        comparison.compare(f"{algorithm} with KL in the reward/advantages", ours["advantages"], theirs, mask)


def _actor_config(**options: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


def _policy_loss(name: str, batch: dict[str, Any], mode: str, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from verl.trainer.ppo import core_algos

    def compute(logprobs: torch.Tensor) -> torch.Tensor:
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=batch["old_logprobs"],
            log_prob=logprobs,
            advantages=batch["advantages"],
            response_mask=batch["response_mask"].double(),
            loss_agg_mode=mode,
            config=_actor_config(**options),
        )
        return loss

    return compute


def _ours(parts: Parts, batch: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logprobs: parts.aggregate(logprobs, batch)


def _compare_losses(comparison: Comparison, seed: int) -> None:
    from verl.trainer.ppo import core_algos

    batch = draw_batch(seed, width=WIDTH)
    mask = batch["response_mask"]
    several: dict[str, Any] = {"mini_batches": 2}  # old log-probs are a column then
    per_sequence = build_parts("grpo", "verl").estimator(batch)["advantages"]
    batch |= {"advantages": per_sequence}

    def check(algorithm: str, name: str, mode: str, **options: Any) -> None:
        parts = build_parts(algorithm, "verl", max_new_tokens=WIDTH, **several)
        theirs = _policy_loss(name, batch, mode, **options)
        comparison.compare_losses(algorithm, _ours(parts, batch), theirs, batch["logprobs"], mask)

    vanilla = ("ppo", "remax", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo")
    for algorithm in vanilla:
        check(algorithm, "vanilla", _actor_config().loss_agg_mode)
    check("dapo", "vanilla", _actor_config().loss_agg_mode, clip_ratio_high=0.28)
    check("dr_grpo", "vanilla", "seq-mean-token-sum-norm")
    check("gspo", "gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    for algorithm in ("cispo", "sapo", "gmpo", "dppo_tv"):
        check(algorithm, _POLICIES[algorithm], _actor_config().loss_agg_mode)

    wide = build_parts("dr_grpo", "verl", max_new_tokens=WIDTH + 5, **several)
    theirs = _policy_loss("vanilla", batch, "seq-mean-token-sum-norm")
    comparison.compare_losses("dr_grpo in another width", _ours(wide, batch), theirs, batch["logprobs"], mask)
    hollow = {**batch, "response_mask": mask & (torch.arange(len(mask)) > 3)[:, None]}
    parts = build_parts("gmpo", "verl", **several)
    theirs = _policy_loss("geo_mean", hollow, "token-mean")
    comparison.compare_losses("gmpo with an empty row", _ours(parts, hollow), theirs, batch["logprobs"], mask)

    found = build_parts("ppo", "verl").estimator(batch)
    batch |= {"returns": found["returns"]}
    value_loss = build_parts("ppo", "verl").value_loss
    assert value_loss is not None
    comparison.compare_losses(
        "ppo's critic",
        lambda values: parts.aggregate(values, batch, loss=value_loss),
        lambda values: core_algos.compute_value_loss(
            values, batch["returns"], batch["values"], mask.double(), cliprange_value=_value_clip()
        )[0],
        batch["new_values"],
        mask,
    )


def _compare_corrections(comparison: Comparison, seed: int) -> None:
    """Weights of verl by token, at its default bound and at narrower ones; and its masks of whole responses."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    batch = draw_batch(seed, width=WIDTH)
    mask = batch["response_mask"]
    batch["advantages"] = build_parts("grpo", "verl").estimator(batch)["advantages"]
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("tis", {"correction": "tis"}, {"rollout_is": "token"}),
        (
            "tis to 1.1",
            {"correction": "tis", "correction_high": 1.1},
            {"rollout_is": "token", "rollout_is_threshold": 1.1},
        ),
        (
            "icepop",
            {"correction": "icepop", "correction_low": 0.9, "correction_high": 1.1},
            {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"},
        ),
        (
            "sequence_mask",
            {"correction": "sequence_mask", "correction_low": 0.97, "correction_high": 1.03},
            {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.97_1.03"},
        ),
    )
    for case, keys, options in cases:
        found, kept, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            batch["old_logprobs"], batch["rollout_logprobs"], mask.double(), **options
        )
        weights = found.batch["rollout_is_weights"]

        def theirs(logprobs: torch.Tensor, weights: Any = weights, kept: Any = kept) -> torch.Tensor:
            loss, _ = core_algos.get_policy_loss_fn("vanilla")(
                old_log_prob=batch["old_logprobs"],
                log_prob=logprobs,
                advantages=batch["advantages"],
                response_mask=kept,
                loss_agg_mode=_actor_config().loss_agg_mode,
                config=_actor_config(),
                rollout_is_weights=weights,
            )
            return loss

        parts = build_parts("grpo", "verl", mini_batches=2, **keys)
        comparison.compare_losses(f"grpo corrected by {case}", _ours(parts, batch), theirs, batch["logprobs"], mask)


def _value_clip() -> float:
    from verl.workers.config import CriticConfig

    return float(CriticConfig.__dataclass_fields__["cliprange_value"].default)


def _compare_aggregations(comparison: Comparison, seed: int) -> None:
    batch = draw_batch(seed, width=WIDTH)
    batch["advantages"] = build_parts("grpo", "verl").estimator(batch)["advantages"]
    pairs = {
        "token-mean": "token-mean",
        "seq-mean-token-sum": "seq-mean-token-sum",
        "seq-mean-token-mean": "seq-mean-token-mean",
        "constant": "seq-mean-token-sum-norm",
    }
    for mode, name in pairs.items():
        parts = build_parts("grpo", "verl", mini_batches=2, max_new_tokens=WIDTH, aggregation=mode)
        comparison.compare_losses(
            f"aggregation {mode}",
            _ours(parts, batch),
            _policy_loss("vanilla", batch, name),
            batch["logprobs"],
            batch["response_mask"],
        )


def _compare_kl(comparison: Comparison, seed: int) -> None:
    from verl.trainer.ppo import core_algos

    from hf_algorithms.losses import KLTerm

    batch = draw_batch(seed, width=WIDTH)
    for estimator, name in (("k1", "k1"), ("k2", "k2"), ("k3", _actor_config().kl_loss_type)):
        term = KLTerm(coefficient=1.0, estimator=estimator, gradient="value")
        for case, reference in ((estimator, batch["ref_logprobs"]), (f"{estimator} above 10", batch["logprobs"] + 4)):
            if "above" in case and estimator != "k3":
                continue
            comparison.compare_losses(
                case,
                lambda logprobs, term=term, reference=reference: term(logprobs, reference).sum(),
                lambda logprobs, name=name, reference=reference: core_algos.kl_penalty(logprobs, reference, name).sum(),
                batch["logprobs"],
                torch.ones_like(batch["response_mask"]),
            )


def _compare_controllers(comparison: Comparison) -> None:
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    from hf_algorithms.kl import AdaptiveKL

    theirs, ours, coefficient = AdaptiveKLController(0.2, 6.0, 10_000), AdaptiveKL(target=6.0), 0.2
    for observed in (0.0, 3.0, 5.9, 6.5, 20.0, -1.0):
        theirs.update(observed, 512)
        coefficient = ours.update(coefficient, observed, 512)
        comparison.compare("adaptive KL/coefficient", torch.tensor(coefficient), torch.tensor(theirs.value))


if __name__ == "__main__":
    sys.exit(main())
