"""Ranks that feed an engine together, and the engine's process."""

from __future__ import annotations

from functools import partial

from hf_engine.process_groups import local_device
from hf_engine.rollout.replica import Replica, require_ranks
from hf_engine.rollout.sglang._library import build_environment, name_device
from hf_engine.rollout.sglang._process import EngineProcess
from hf_protocols.errors import BackendError
from hf_protocols.topology import Topology

__all__ = ["build_engine", "require_topology"]


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
            "supported. Set it to 1 and raise gen_tp_size"
        )
    return topology


def build_engine(replica: Replica) -> EngineProcess | None:
    """On the replica's first rank the process of its engine, which is not started yet. Collective over the replica.

    Raises:
        BackendError: on all of its ranks, if they are on several machines.
    """
    replica.require_one_machine()
    devices = replica.gather(name_device(local_device()))
    environment = partial(build_environment, tp_size=len(replica.ranks), devices=devices)
    return EngineProcess(environment) if replica.is_first else None
