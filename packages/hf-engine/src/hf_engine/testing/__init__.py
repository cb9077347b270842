"""Conformance suites for training and rollout backends, and the local ranks to run them on."""

from __future__ import annotations

from hf_engine.testing._local_ranks import LocalRanks

__all__ = ["LocalRanks"]
