"""Train every algorithm on a bandit and draw the path to its fixed point, which is known in closed form.

Writes scripts/fixed_points.json and docs/assets/fixed-points; then run scripts/algorithm_pages.py. Seconds; no seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "integration-tests"))

from hf_algorithms.recipes import RECIPES  # noqa: E402
from tabular_roles import (  # noqa: E402
    BradleyTerryLabels,
    FrozenPolicy,
    TableCritic,
    TablePolicy,
    TableReward,
    TableRun,
    Trained,
)

PATHS = Path(__file__).with_name("fixed_points.json")
PICTURES = ROOT / "docs" / "assets" / "fixed-points"
REFERENCE = (0.4, 0.3, 0.2, 0.1)
REWARDS = (1.0, 0.7, 0.2, 0.0)
COSTS = (1.0, 0.4, -0.5, -1.0)
TEACHER = (0.1, 0.2, 0.3, 0.4)
BETA = 0.5
LARGE_BETA = 2.0
"""For scores divided by their deviation. With a small beta the deviation vanishes, and one answer takes all."""


def tilt(rewards: Sequence[float] | np.ndarray, beta: float, reference: Sequence[float] = REFERENCE) -> np.ndarray:
    """The policy that maximises E[r] - beta KL(policy || reference)."""
    weights = np.asarray(reference) * np.exp((np.asarray(rewards) - max(rewards)) / beta)
    return np.asarray(weights / weights.sum())


def tilt_by_unit(measure: Callable[[np.ndarray, np.ndarray], float], beta: float) -> np.ndarray:
    """The policy that is tilted by rewards in a unit that the policy itself gives, by damped iteration."""
    rewards, found = np.array(REWARDS), np.array(REFERENCE)
    for _ in range(500):
        found = (found + tilt(rewards / measure(found, rewards), beta)) / 2
    return found


def find_mean(policy: np.ndarray, rewards: np.ndarray) -> float:
    """The expected reward."""
    return float(policy @ rewards)


def find_deviation(policy: np.ndarray, rewards: np.ndarray) -> float:
    """The standard deviation of the reward."""
    return float(np.sqrt(policy @ (rewards - policy @ rewards) ** 2))


def find_constrained(beta: float) -> tuple[float, np.ndarray]:
    """The multiplier at which the expected cost is 0, by bisection, and its policy."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        policy = tilt(np.array(REWARDS) - middle * np.array(COSTS), (1 + middle) * beta)
        low, high = (middle, high) if policy @ COSTS > 0 else (low, middle)
    return low, policy


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """One algorithm's bandit: its keys, what it is known to end at, and how closely it must."""

    keys: dict[str, Any]
    fixed_point: np.ndarray
    formula: str
    reference: Sequence[float] = REFERENCE
    rewards: Sequence[float] = REWARDS
    workers: dict[str, Any] = field(default_factory=dict)
    iterations: int = 24
    samples: int = 256
    prompts: int = 1
    rate: float = 1.2
    tolerance: float = 2e-3
    multiplier: float | None = None
    note: str = ""

    def train(self, name: str) -> Trained:
        """Runs the recipe's own step on tables."""
        start = [np.log(self.reference).tolist()]
        workers: dict[str, Any] = {
            "actor": (TablePolicy, {"table": start, "learning_rate": self.rate}),
            "reference": (FrozenPolicy, {"table": start}),
            "reward": (TableReward, {"table": [list(self.rewards)]}),
        }
        run = TableRun(
            recipe=RECIPES[name],
            algorithm=self.keys,
            workers=workers | self.workers,
            iterations=self.iterations,
            samples=self.samples,
            prompts=(0,) * self.prompts,
        )
        return run.train()


TILTED = "ref exp(r / beta), up to a constant"
SCALED = "ref exp(r / (s beta)), up to a constant, where s is the policy's own standard deviation of the reward"
CRITIC: dict[str, Any] = {"critic": (TableCritic, {})}


def build_cases() -> dict[str, Bandit]:
    """The bandit of every algorithm, by name."""
    tilted, scaled = tilt(REWARDS, BETA), tilt_by_unit(find_deviation, LARGE_BETA)
    beta = {"kl_coefficient": BETA}
    no_whitening = beta | {"whiten": False}
    by_std = Bandit(
        keys={"kl_coefficient": LARGE_BETA}, fixed_point=scaled, formula=SCALED, rate=0.5, iterations=30, tolerance=3e-3
    )
    at_ratio_one = replace(by_std, note="With one update an iteration every ratio is 1, and the path is GRPO's.")
    multiplier, constrained = find_constrained(BETA)
    labels = (1.0, 0.0)
    return {
        "ppo": Bandit(keys=no_whitening, fixed_point=tilted, formula=TILTED, workers=CRITIC),
        "remax": Bandit(keys=beta, fixed_point=tilted, formula=TILTED),
        "safe_rlhf": Bandit(
            keys=beta | {"lambda_learning_rate": 0.3},
            fixed_point=constrained,
            formula="ref exp((r - lambda c) / ((1 + lambda) beta)), up to a constant, with lambda so that E[c] = 0",
            workers={**CRITIC, "cost_critic": (TableCritic, {}), "cost": (TableReward, {"table": [list(COSTS)]})},
            iterations=36,
            multiplier=multiplier,
            note=f"The costs are {', '.join(map(str, COSTS))}; their limit is 0.",
        ),
        "grpo": by_std,
        "dr_grpo": Bandit(keys=beta, fixed_point=tilted, formula=TILTED),
        "rloo": Bandit(keys=beta, fixed_point=tilted, formula=TILTED),
        "reinforce_pp": Bandit(keys=no_whitening, fixed_point=tilted, formula=TILTED),
        "reinforce_pp_baseline": Bandit(keys=no_whitening, fixed_point=tilted, formula=TILTED),
        **dict.fromkeys(("dapo", "gspo", "cispo", "sapo", "gmpo"), at_ratio_one),
        "maxrl": Bandit(
            keys=beta,
            fixed_point=tilt_by_unit(find_mean, BETA),
            formula="ref exp(r / (m beta)), up to a constant, where m is the policy's own expected reward",
            rate=0.8,
        ),
        "opo": Bandit(keys=beta, fixed_point=tilted, formula=TILTED),
        "dppo_tv": at_ratio_one,
        "distillation": Bandit(
            keys={},
            fixed_point=np.array(TEACHER),
            formula="the teacher's probabilities",
            workers={"teacher": (FrozenPolicy, {"table": [np.log(TEACHER).tolist()]})},
            rate=0.7,
        ),
        "online_dpo": Bandit(
            keys={"beta": 0.8},
            fixed_point=tilt(labels, 0.8, (0.3, 0.7)),
            formula="ref exp(r / beta), up to a constant, where labels prefer an answer with probability "
            "sigmoid(r - r')",
            reference=(0.3, 0.7),
            rewards=labels,
            workers={"reward": (BradleyTerryLabels, {"table": [list(labels)]})},
            samples=2,
            prompts=128,
            rate=1.8,
            iterations=40,
            tolerance=4e-3,
        ),
    }


def train_all(cases: dict[str, Bandit]) -> dict[str, dict[str, Any]]:
    """The path of every case, with what it ends at."""
    return {name: describe(name, case, case.train(name)) for name, case in cases.items()}


def describe(name: str, case: Bandit, trained: Trained) -> dict[str, Any]:
    """The path and its end, to be kept.

    Raises:
        SystemExit: for an end that is not the fixed point.
    """
    if (distance := np.abs(trained.policy[0] - case.fixed_point).max()) > case.tolerance:
        raise SystemExit(f"{name}: ends {distance:.4f} from its fixed point, more than {case.tolerance}")
    path = [np.array(case.reference), *(policy[0] for policy in trained.policies)]
    found: dict[str, Any] = {
        "keys": case.keys,
        "formula": case.formula,
        "note": case.note,
        "reference": list(case.reference),
        "rewards": list(case.rewards),
        "fixed_point": _round(case.fixed_point),
        "end": _round(trained.policy[0]),
        "responses": case.samples * case.prompts,
        "path": [_round(policy) for policy in path],
    }
    if case.multiplier is not None:
        values = [metrics["constraint/lambda"] for metrics in trained.metrics]
        last = len(values) // 4
        found |= {"multiplier": round(case.multiplier, 4), "multiplier_end": round(float(np.mean(values[-last:])), 4)}
    return found


def _round(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 420, 220, 44, 30, 26, 90
COLORS = ("#2563c9", "#c2410c", "#15803d", "#9333ea")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600;font-size:14px}.g{stroke:#8884}"
    ".m{fill:none;stroke-width:2}.f{stroke-dasharray:4 4;stroke-opacity:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


def draw(found: dict[str, Any]) -> str:
    """An SVG: the probability of every answer by iteration, and its fixed point as a broken line."""
    path = np.array(found["path"])
    last, wide, high = len(path) - 1, WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM
    parts = [f'<text class="t" x="{LEFT}" y="18">probability of an answer, by iteration</text>']
    for share in (0.0, 0.5, 1.0):
        y, at = TOP + high * (1 - share), LEFT + wide * share
        parts.append(f'<path class="g" d="M{LEFT} {y:.0f}h{wide}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share:.1f}</text>')
        parts.append(f'<text x="{at:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{last * share:.0f}</text>')
    for number, (values, end) in enumerate(zip(path.T, found["fixed_point"], strict=True)):
        color = COLORS[number]
        points = " ".join(f"{LEFT + wide * x / last:.1f},{TOP + high * (1 - y):.1f}" for x, y in enumerate(values))
        parts.append(f'<path class="f" stroke="{color}" d="M{LEFT} {TOP + high * (1 - end):.1f}h{wide}"/>')
        parts.append(f'<polyline class="m" stroke="{color}" points="{points}"/>')
        parts.append(
            f'<text x="{WIDTH - 8}" y="{TOP + 10 + 18 * number}" style="fill:{color}">answer {number + 1}</text>'
        )
    size = f'viewBox="0 0 {WIDTH + LEGEND} {HEIGHT}" width="{WIDTH + LEGEND}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def main() -> None:
    """Train, and write the paths and pictures."""
    found = train_all(build_cases())
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(path)}" for name, path in found.items())
    PATHS.write_text(f"{{\n{lines}\n}}\n")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        (PICTURES / f"{name}.svg").write_text(draw(path))


if __name__ == "__main__":
    main()
