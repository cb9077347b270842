"""Role workers: an engine backend and a loss behind ``@register``; reward and advantage hold no model."""

from __future__ import annotations

from hf_algorithms.workers._model import SEQUENCE
from hf_algorithms.workers.actor import ActorWorker
from hf_algorithms.workers.advantage import AdvantageWorker
from hf_algorithms.workers.critic import CriticWorker
from hf_algorithms.workers.reference import ReferenceWorker
from hf_algorithms.workers.reward import RewardWorker
from hf_controller import Worker

__all__ = [
    "ROLE_WORKERS",
    "SEQUENCE",
    "ActorWorker",
    "AdvantageWorker",
    "CriticWorker",
    "ReferenceWorker",
    "RewardWorker",
]

ROLE_WORKERS: dict[str, type[Worker]] = {
    "actor": ActorWorker,
    "critic": CriticWorker,
    "reference": ReferenceWorker,
    "reward": RewardWorker,
    "advantage": AdvantageWorker,
}
"""The worker of every role that the shipped recipes have."""
