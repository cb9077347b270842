"""Role workers: an engine backend and a loss behind `@register`; reward and advantage hold no model.

What lives here: the methods of each role, with the columns that they read and write.
What must not: formulas (`losses`, `advantages`), and what only one backend knows (hf-engine).
"""

from __future__ import annotations

from hf_algorithms.workers._model import SEQUENCE, ModelWorker
from hf_algorithms.workers._outputs import check_call_arguments
from hf_algorithms.workers._setup import RoleSetup
from hf_algorithms.workers.actor import ActorWorker
from hf_algorithms.workers.advantage import AdvantageWorker
from hf_algorithms.workers.critic import CriticWorker
from hf_algorithms.workers.policy import PolicyWorker
from hf_algorithms.workers.reference import ReferenceWorker, TeacherWorker
from hf_algorithms.workers.reward import EVALUATED, CostWorker, RewardWorker
from hf_algorithms.workers.scorer import PairScorer, RewardModelWorker

__all__ = [
    "EVALUATED",
    "SEQUENCE",
    "ActorWorker",
    "AdvantageWorker",
    "CostWorker",
    "CriticWorker",
    "ModelWorker",
    "PairScorer",
    "PolicyWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RewardWorker",
    "RoleSetup",
    "TeacherWorker",
    "check_call_arguments",
]
