"""Roles that several recipes have."""

from __future__ import annotations

from hf_algorithms.recipes._recipe import Role

__all__ = ["ACTOR", "ADVANTAGE", "CRITIC", "POLICY_ROLES", "REFERENCE", "REWARD"]

ACTOR = Role(name="actor", worker="hf_algorithms.workers:ActorWorker", has_model=True)
CRITIC = Role(name="critic", worker="hf_algorithms.workers:CriticWorker", has_model=True, starts_from="actor")
REFERENCE = Role(name="reference", worker="hf_algorithms.workers:ReferenceWorker", has_model=True, starts_from="actor")
REWARD = Role(name="reward", worker="hf_algorithms.workers:RewardWorker")
ADVANTAGE = Role(name="advantage", worker="hf_algorithms.workers:AdvantageWorker")

POLICY_ROLES = (ACTOR, REFERENCE, REWARD, ADVANTAGE)
"""Of algorithms without a critic. A role that no step calls, as a reference without a penalty, gets no place."""
