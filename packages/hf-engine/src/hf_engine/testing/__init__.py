"""Conformance suites for training and rollout backends, and local ranks to run them on.

What lives here: `check_train_backend` and `check_rollout_backend`, tiny models and families, and `LocalRanks`.
What must not: what a shipped program needs, and what this repository's own tests alone need, which is in
`integration-tests/engine_testing`. A backend is supported when it passes on every rank.
"""

from __future__ import annotations

from hf_engine.testing._families import FURTHER_FAMILIES, TINY_FAMILIES, write_tiny_family
from hf_engine.testing._family_checks import check_family
from hf_engine.testing._local_ranks import LocalRanks
from hf_engine.testing._rollout import check_rollout_backend
from hf_engine.testing._tiny_models import write_tiny_model
from hf_engine.testing._train import check_train_backend, gather_weights

__all__ = [
    "FURTHER_FAMILIES",
    "TINY_FAMILIES",
    "LocalRanks",
    "check_family",
    "check_rollout_backend",
    "check_train_backend",
    "gather_weights",
    "write_tiny_family",
    "write_tiny_model",
]
