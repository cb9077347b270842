"""Rewards: guarded calls of users' functions that score responses, and the functions that ship.

What lives here: the conventions in which such functions are written, the pool of processes that calls them, the meaning
of their results, and verifiers. What must not: workers, which read batches, and the configuration.
"""

from __future__ import annotations

from hf_algorithms.rewards._answer_checks import SupportsAnswerCheck, answers_checked_by
from hf_algorithms.rewards._combine import combine_scores
from hf_algorithms.rewards._conventions import CONVENTIONS, Binding, Convention, Style, bind_function
from hf_algorithms.rewards._exact_match import exact_match
from hf_algorithms.rewards._functions import FunctionSpec, ScoredSamples, ScoringFunctions
from hf_algorithms.rewards._gsm8k import gsm8k_accuracy, gsm8k_reward
from hf_algorithms.rewards._http import HTTPScorer, check_address, check_connection, is_url
from hf_algorithms.rewards._load import get_users_function, imports_from, load_function
from hf_algorithms.rewards._math import math_verify, number_match
from hf_algorithms.rewards._numbers import find_final_number, read_number
from hf_algorithms.rewards._pool.messages import CallExpired
from hf_algorithms.rewards._samples import Samples
from hf_algorithms.rewards._trainer import TrainerState

__all__ = [
    "CONVENTIONS",
    "Binding",
    "CallExpired",
    "Convention",
    "FunctionSpec",
    "HTTPScorer",
    "Samples",
    "ScoredSamples",
    "ScoringFunctions",
    "Style",
    "SupportsAnswerCheck",
    "TrainerState",
    "answers_checked_by",
    "bind_function",
    "check_address",
    "check_connection",
    "combine_scores",
    "exact_match",
    "find_final_number",
    "get_users_function",
    "gsm8k_accuracy",
    "gsm8k_reward",
    "imports_from",
    "is_url",
    "load_function",
    "math_verify",
    "number_match",
    "read_number",
]
