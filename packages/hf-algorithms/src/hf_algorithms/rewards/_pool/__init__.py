"""Calls of reward functions in processes that can be killed.

A `RewardPool` belongs to one worker. It starts one host, a clean Python process, which holds a pool of pebble: its
processes call the functions. The host ends with its worker, also if that is killed, and takes its processes along.

Here lives what calls functions, not what a function gets (`rewards._samples`) or returns (`rewards._results`).
"""

from __future__ import annotations

from hf_algorithms.rewards._pool.client import RewardPool
from hf_algorithms.rewards._pool.messages import CallExpired, Calls, CrashedCall, ExpiredCall, Outcome, RaisedCall

__all__ = ["CallExpired", "Calls", "CrashedCall", "ExpiredCall", "Outcome", "RaisedCall", "RewardPool"]
