"""Reward functions: finding one by name, calling it with suspicion, and those that ship.

A reward function is plain Python, ``(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]``,
one number per response. It may offer ``check_answer(answer)``, see `SupportsAnswerCheck`.
"""

from __future__ import annotations

from hf_algorithms.rewards._check import SupportsAnswerCheck, answers_checked_by, check_rewards
from hf_algorithms.rewards._combine import combine_scores
from hf_algorithms.rewards._exact_match import exact_match
from hf_algorithms.rewards._gsm8k import gsm8k_accuracy, gsm8k_reward
from hf_algorithms.rewards._load import load_function
from hf_algorithms.rewards._scores import RewardFunction, compute_scores

__all__ = [
    "RewardFunction",
    "SupportsAnswerCheck",
    "answers_checked_by",
    "check_rewards",
    "combine_scores",
    "compute_scores",
    "exact_match",
    "gsm8k_accuracy",
    "gsm8k_reward",
    "load_function",
]
