"""Write docs/reference/line-counts.md: the lines that GRPO and Safe-RLHF take here and in public trainers.

With a folder of installed wheels as argument, those of the trainers are counted again into line_counts.json, which lies
next to this script. Ours are counted each time.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "line-counts.md"
COUNTED = Path(__file__).with_name("line_counts.json")
OURS = ROOT / "packages" / "hf-algorithms" / "src" / "hf_algorithms"

GRPO_ALONE = ("recipes/grpo.py",)
GRPO_ITERATION = (
    "recipes/grpo.py",
    "recipes/_steps.py",
    "advantages/_group.py",
    "losses/_policy.py",
    "losses/_surrogates.py:Tokens",
    "losses/_surrogates.py:_OfRatio",
    "losses/_surrogates.py:_Ranged",
    "losses/_surrogates.py:Clip",
    "losses/_kl_term.py",
    "losses/_aggregation.py",
    "losses/_correction.py",
    "kl.py:estimate_kl",
)
SAFE_RLHF_ALONE = (
    "recipes/safe_rlhf.py",
    "advantages/_gae.py:LagrangianAdvantage",
    "advantages/multiplier.py",
    "workers/reward.py:CostWorker",
    "workers/_pretraining.py",
    "config/_scoring.py:CostConfig",
)
REGISTRATION = 2
"""Lines of an algorithm in `recipes/__init__.py`: its import, and its name in the tuple."""

PEERS = (
    {
        "trainer": "TRL 1.16.0",
        "folder": "trl",
        "alone": ("trainer/grpo_trainer.py", "trainer/grpo_config.py"),
        "iteration": tuple(
            f"trainer/grpo_trainer.py:GRPOTrainer.{name}"
            for name in (
                "training_step", "_prepare_inputs", "_calculate_rewards", "_generate_and_score_completions",
                "compute_loss", "get_off_policy_mask", "_get_per_token_logps_and_entropies", "_compute_loss",
            )
        ),
    },
    {
        "trainer": "verl 0.9.1",
        "folder": "verl",
        "alone": ("trainer/ppo/core_algos.py:compute_grpo_outcome_advantage",),
        "iteration": (
            *(
                f"trainer/ppo/v1/trainer_base.py:PPOTrainer.{name}"
                for name in (
                    "step", "_step_once", "_compute_reward_colocate", "_compute_old_log_prob",
                    "_compute_ref_log_prob", "_compute_advantage", "_update_actor",
                )
            ),
            "trainer/ppo/ray_trainer.py:compute_advantage",
            "trainer/ppo/ray_trainer.py:apply_kl_penalty",
            "workers/utils/losses.py:ppo_loss",
            *(
                f"trainer/ppo/core_algos.py:{name}"
                for name in (
                    "compute_grpo_outcome_advantage", "compute_policy_loss_vanilla", "agg_loss", "kl_penalty",
                    "kl_penalty_forward",
                )
            ),
        ),
    },
    {
        "trainer": "SkyRL 0.4.0",
        "folder": "skyrl",
        "alone": ("backends/skyrl_train/utils/ppo_utils.py:compute_grpo_outcome_advantage",),
        "iteration": (
            *(
                f"train/trainer.py:RayPPOTrainer.{name}"
                for name in (
                    "train", "compute_advantages_and_returns", "fwd_logprobs_values_reward",
                    "apply_reward_kl_penalty", "_normalize_advantages", "train_critic_and_policy",
                )
            ),
            *(
                f"backends/skyrl_train/utils/ppo_utils.py:{name}"
                for name in (
                    "compute_grpo_outcome_advantage", "compute_advantages_and_returns", "ppo_policy_loss",
                    "compute_approx_kl", "reduce_loss", "apply_loss_reduction_to_advantages_minibatch",
                )
            ),
        ),
    },
    {
        "trainer": "AReaL 1.0.4",
        "folder": "areal",
        "alone": (),
        "iteration": (
            "trainer/rl_trainer.py:PPOTrainer.train",
            "trainer/ppo/actor.py:PPOActor._compute_advantages",
            "trainer/ppo/actor.py:PPOActor._ppo_update",
            "trainer/ppo/actor.py:grpo_loss_fn",
            "utils/functional/functional.py:ppo_actor_loss_fn",
        ),
    },
    {
        "trainer": "OpenRLHF 0.11.2",
        "folder": "openrlhf",
        "alone": (),
        "iteration": (
            "trainer/ppo_trainer.py:PPOTrainer.fit",
            "trainer/ppo_trainer.py:BasePPOTrainer.train_step",
            "trainer/ppo_trainer.py:BasePPOTrainer.ppo_train",
            "trainer/ppo_utils/experience_maker.py:RemoteExperienceMaker.make_experience_batch",
            "trainer/ppo_utils/experience_maker.py:RemoteExperienceMaker.make_experience",
            "trainer/ppo_utils/experience_maker.py:RemoteExperienceMaker.compute_advantages_and_returns",
            "trainer/ray/ppo_actor.py:ActorPPOTrainer.ppo_train",
            "trainer/ray/ppo_actor.py:ActorPPOTrainer.training_step",
            "models/loss.py:PolicyLoss",
            "models/loss.py:aggregate_loss",
            "models/utils.py:compute_approx_kl",
        ),
    },
    {
        "trainer": "tinker-cookbook 0.6.1",
        "folder": "tinker_cookbook",
        "alone": ("recipes/rl_loop.py",),
        "iteration": ("recipes/rl_loop.py:main",),
    },
)  # fmt: skip
"""Trainers on PyPI. `alone` is empty where GRPO is a branch inside functions that serve other algorithms."""

READ_FROM_STORE = (
    {
        "trainer": "align-anything, commit `7039498`",
        "alone": {"align_anything/trainers/text_to_text/grpo.py": 349},
        "iteration": {
            "GRPOTrainer.train_step": 60,
            "GRPOTrainer.generate_completions": 16,
            "GRPOTrainer.compute_rewards": 27,
            "GRPOTrainer._get_per_token_logps": 12,
        },
    },
)
"""Counted by hand: files that are not on PyPI. The copyright notice is left out, as everywhere."""

SAFE_RLHF_AUTHORS = 401
"""`safe_rlhf/algorithms/ppo_lag/trainer.py` as tcexeexe/SHTEC_RM_model has it at 5bb76e4, without its notice."""

TEXT = """<!-- Written by scripts/line_counts.py; edit that. -->

# Lines of an algorithm

After this page you know how much code GRPO and Safe-RLHF are here, and in public trainers by the same rule.

## The rule

- Counted are non-blank lines, comments and docstrings included; copyright notices and tests are left out.
- **Alone**: files, classes and functions that serve this algorithm and no other. Its author writes them.
- **An iteration**: the functions from prompts to updates, the estimator, the policy loss with its KL term, and the
  reduction to one number. They say what a trainer does under the algorithm's name. Generation, models, configuration,
  data and checkpoints are left out where they are functions of their own.
- Ours count the configuration of GRPO and of Safe-RLHF, which stands in the recipe.

## GRPO

| trainer | alone | an iteration |
|---|--:|--:|
{grpo}
0 stands where GRPO is a branch in functions that serve other algorithms too.

## Safe-RLHF

| trainer | alone |
|---|--:|
{safe_rlhf}
Both stand on shared code for PPO: the loop, generalised advantage estimation, the value loss. Ours has in addition the
projected multiplier, the report of limits that cannot be met, and the pretraining term in the actor's own step, which
the authors' base class has for all algorithms. Theirs has the loading of models and an evaluation.

## Files and functions

{units}
## Caveats

- A count says nothing of quality. TRL's file has tools, vision, vLLM and logging; other trainers have them elsewhere.
- The loss of tinker-cookbook is computed by a service, and `main` of its loop sets the run up as well.
- Which functions make an iteration is a choice; the lists above say what was taken.
- Files from GitHub were read in stored copies, and counted by hand. The authors' Safe-RLHF was read in a copy:
  tcexeexe/SHTEC_RM_model, commit `5bb76e4`, `safe_rlhf/algorithms/ppo_lag/trainer.py`. Its arguments, in `main.py`,
  and its base class are left out.
- align-anything has Lagrangian PPO for images: `align_anything/trainers/text_image_to_text/ppo_lag.py`, commit
  `04233a3`, of 47,543 characters. `grpo.py` of NeMo-RL (commit `ddbdb1e`) has 140,489 characters, `grpo_fast.py` of
  open-instruct (commit `001d52f`) 110,005. Their lines were not counted. slime, prime-rl and ROLL were not read.
"""


def count_lines(text: str) -> int:
    """Its non-blank lines, less a copyright notice at the top."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    return sum(bool(line.strip()) for line in lines[start:])


def count_unit(root: Path, unit: str) -> int:
    """The non-blank lines of `FILE`, or of a class or function in it: `FILE:NAME` or `FILE:CLASS.NAME`."""
    file, _, name = unit.partition(":")
    text = (root / file).read_text()
    if not name:
        return count_lines(text)
    found: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = next(node for node in getattr(found, "body", ()) if getattr(node, "name", None) == part)
    assert isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    first = min(each.lineno for each in (found, *found.decorator_list))
    return sum(bool(line.strip()) for line in text.splitlines()[first - 1 : found.end_lineno])


def count_all(root: Path, units: Sequence[str]) -> dict[str, int]:
    """The lines of each unit."""
    return {unit: count_unit(root, unit) for unit in units}


def count_peers(folder: Path) -> list[dict[str, object]]:
    """The counts of the trainers on PyPI, whose packages lie in `folder`."""
    return [
        {"trainer": peer["trainer"]}
        | {kind: count_all(folder / str(peer["folder"]), list(peer[kind])) for kind in ("alone", "iteration")}
        for peer in PEERS
    ]


def write_page() -> str:
    """The text of the page."""
    own = count_all(OURS, GRPO_ALONE) | {"recipes/__init__.py, its lines": REGISTRATION}
    ours = {"trainer": "this repository", "alone": own, "iteration": count_all(OURS, GRPO_ITERATION)}
    rows = [ours, *json.loads(COUNTED.read_text()), *READ_FROM_STORE]
    grpo = [f"| {row['trainer']} | {_sum(row['alone'])} | {_sum(row['iteration'])} |\n" for row in rows]
    lagrangian = count_all(OURS, SAFE_RLHF_ALONE) | {"recipes/__init__.py, its lines": REGISTRATION}
    safe_rlhf = [
        f"| this repository | {_sum(lagrangian)} |\n",
        f"| the authors' code, PKU-Alignment/safe-rlhf | {SAFE_RLHF_AUTHORS:,} |\n",
        "| TRL, verl, SkyRL, AReaL, OpenRLHF | not implemented |\n",
    ]
    units = [
        f"- {row['trainer']}, {kind}: {_list(row[key])}.\n"
        for row in rows
        for key, kind in (("alone", "alone"), ("iteration", "an iteration"))
        if row[key]
    ]
    units.append(f"- this repository, Safe-RLHF alone: {_list(lagrangian)}.\n")
    return TEXT.format(grpo="".join(grpo), safe_rlhf="".join(safe_rlhf), units="".join(units))


def _sum(counts: dict[str, int]) -> str:
    return f"{sum(counts.values()):,}"


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"`{unit}` {lines}" for unit, lines in counts.items())


def main() -> None:
    """Write the page; count the trainers in a folder first, if it is given."""
    if sys.argv[1:]:
        COUNTED.write_text(json.dumps(count_peers(Path(sys.argv[1])), indent=1) + "\n")
    PAGE.write_text(write_page())


if __name__ == "__main__":
    main()
