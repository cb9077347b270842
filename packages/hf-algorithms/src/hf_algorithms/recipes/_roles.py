"""Roles that several recipes have."""

from __future__ import annotations

from hf_algorithms.recipes._recipe import Role

__all__ = ["ACTOR", "ADVANTAGE", "COST_MODEL", "CRITIC", "POLICY_ROLES", "REFERENCE", "REWARD", "REWARD_MODEL"]

ACTOR = Role(name="actor", worker="hf_algorithms.workers:ActorWorker", has_model=True)
CRITIC = Role(name="critic", worker="hf_algorithms.workers:CriticWorker", has_model=True, starts_from="actor")
REFERENCE = Role(name="reference", worker="hf_algorithms.workers:ReferenceWorker", has_model=True, starts_from="actor")
REWARD_MODEL = Role(name="reward_model", worker="hf_algorithms.workers:RewardModelWorker", has_model=True)
COST_MODEL = Role(name="cost_model", worker=REWARD_MODEL.worker, has_model=True)
REWARD = Role(name="reward", worker="hf_algorithms.workers:RewardWorker", scored_by=REWARD_MODEL)
ADVANTAGE = Role(name="advantage", worker="hf_algorithms.workers:AdvantageWorker")

POLICY_ROLES = (ACTOR, REFERENCE, REWARD, ADVANTAGE)
"""Of algorithms without a critic. A role that no step calls, as a reference without a penalty, gets no place."""
