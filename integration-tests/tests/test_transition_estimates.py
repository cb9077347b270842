"""Bytes that a reshard receives: the mapper's figure against the engine's plan of every message."""

from __future__ import annotations

import statistics

import pytest

from hf_engine import plan_transition
from hf_mapper import WorkloadSpec
from hf_mapper.simulators.layouts import read_generation, read_layouts
from hf_mapper.simulators.memory import received_weight_bytes
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, Topology

WORKLOAD = WorkloadSpec(global_batch=64, prompt_tokens=8, response_tokens=8)


@pytest.mark.parametrize(
    ("train", "ep_size", "generation"),
    [("1-2-4", 1, "1-2"), ("1-2-4", 4, "1-1"), ("1-2-4", 4, "1-2"), ("2-2-4", 2, "1-2"), ("1-1-8", 8, "1-1")],
)
def test_a_rank_receives_what_the_plan_sends(train: str, ep_size: int, generation: str) -> None:
    """On the mean of all ranks; norms are replicated, and end stages unequal."""
    mixtral, sizes = ModelShape.preset("mixtral-8x7b"), ParallelSpec.parse(train)
    spread = ParallelSpec(pp_size=sizes.pp_size, tp_size=sizes.tp_size, dp_size=sizes.dp_size, ep_size=ep_size)
    cut = GenerationSpec.parse(generation)
    plan = plan_transition(mixtral, Topology(spread, cut), method="hybridflow")
    layouts = read_layouts(mixtral, spread, "megatron")
    found = received_weight_bytes(mixtral, layouts, read_generation(layouts, cut, 1), WORKLOAD)
    assert float(found) == pytest.approx(statistics.mean(plan.recv_bytes.values()), rel=1e-3)
