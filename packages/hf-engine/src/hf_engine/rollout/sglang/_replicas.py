"""Ranks that feed an engine together, and the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from hf_engine.process_groups import local_device
from hf_engine.rollout.replica import Replica, require_ranks
from hf_engine.rollout.sglang._library import build_environment
from hf_engine.rollout.sglang._process import EngineProcess
from hf_protocols.errors import BackendError
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from hf_engine.backends.lora_config import LoraConfig
    from hf_engine.rollout.sglang._backend import SglangBackend

__all__ = ["build_engine", "choose_class", "require_topology"]


def require_topology(topology: Topology) -> Topology:
    """The topology with generation sizes.

    Raises:
        BackendError: if the engines cannot run it.
    """
    topology = require_ranks("sglang", topology)
    generation = topology.generation
    assert generation is not None, "require_ranks has set it"
    if generation.gen_pp_size != 1:
        raise BackendError(
            f"backend 'sglang' has no pipeline stages in generation: gen_pp_size={generation.gen_pp_size} is not "
            "supported; set it to 1 and raise gen_tp_size"
        )
    return topology


def build_engine(replica: Replica) -> EngineProcess | None:
    """On the replica's first rank the process of its engine, which is not started yet. Collective over the replica.

    Raises:
        BackendError: on all of its ranks, if they are on several machines.
    """
    replica.require_one_machine()
    devices = replica.gather(local_device().index or 0)
    environment = partial(build_environment, tp_size=len(replica.ranks), devices=devices)
    return EngineProcess(environment) if replica.is_first else None


def choose_class(
    plain: type[SglangBackend], lora: LoraConfig | None, adapted: Collection[str]
) -> Callable[..., SglangBackend]:
    """The class of an engine's backend: one of its own where the engine computes adapters.

    Args:
        plain: for engines without.
        lora: settings of the adapters.
        adapted: names of the layers that have one.
    """
    if lora is None:
        return plain
    from hf_engine.rollout.sglang._adapted import AdaptedSglangBackend

    return partial(AdaptedSglangBackend, lora=lora, adapted=adapted)
