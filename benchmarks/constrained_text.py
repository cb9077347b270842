"""A text whose reward and cost pull apart, on which Safe-RLHF is seen to hold its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from learning_tasks import build_in_process

__all__ = ["COST_LIMIT", "SAFE_RLHF_KEYS", "build_constrained_text", "share_of_doubles", "share_of_ones"]

TEXT_MODEL: Mapping[str, Any] = {
    "tokenizer": "characters",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 1,
    "max_positions": 16,
}
COST_LIMIT = 0.3
"""Of `share_of_doubles`, in the constrained text."""
SAFE_RLHF_KEYS: Mapping[str, Any] = {"name": "safe_rlhf", "cost_limit": COST_LIMIT, "lambda_learning_rate": 0.2}
"""Keys of `[algorithm]` with which lambda moves more slowly than the policy, so that both settle.

Doubles win 0.2 of reward for 0.5 of cost: at lambda = 0.4 all mixtures of responses are worth the same. Without a KL
penalty the cost would jump there from 0 to 1; with it, the cost falls by 3.3 for each unit of lambda near the optimum.
An answer as steep swings where lambda moves before the policy has followed, which takes some ten iterations.
"""

_WANTED = "1"
_LENGTH = 5


def share_of_ones(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards every "1" of a response, 0 to 1."""
    return [response.count(_WANTED) / _LENGTH for response in responses]


def share_of_doubles(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Costs of a "1" that follows a "1", 0 to 1: the most rewarded response is the most costly."""
    return [sum(pair == (_WANTED, _WANTED) for pair in pairwise(response)) / (_LENGTH - 1) for response in responses]


def build_constrained_text(data: Path, algorithm: Mapping[str, Any], *, seed: int, iterations: int) -> dict[str, Any]:
    """Returns a configuration for the constrained text; arguments as of `build_addition`."""
    module = __name__
    body = build_in_process(data, TEXT_MODEL, algorithm, seed=seed, iterations=iterations)
    body["data"]["max_eval_rows"] = 32
    return {
        **body,
        "warm_start": {"max_steps": 40, "learning_rate": 3e-3, "batch_size": 64, "eval_every": 40},
        "optimizer": {"actor_learning_rate": 2e-3, "critic_learning_rate": 3e-3},
        "rollout": {"batch_size": 128, "max_new_tokens": _LENGTH},
        "reward": {"function": f"{module}:share_of_ones", "metric": f"{module}:share_of_ones"},
        "cost": {"function": f"{module}:share_of_doubles"},
    }
