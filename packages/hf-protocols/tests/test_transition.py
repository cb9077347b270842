from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, Topology, TopologyError, compute_transition_cost

METHODS = ("hybridflow", "hybridflow-v", "ds-chat")


def layout(train: str, generation: str) -> Topology:
    return Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))


@pytest.mark.parametrize(
    ("train", "generation"), [("1-8-2", "1-2"), ("4-8-4", "1-8"), ("8-8-2", "2-4"), ("2-4-1", "2-2"), ("1-4-2", "1-4")]
)
def test_table_2(train: str, generation: str) -> None:
    """The paper's formulas as printed; M = 1e9 bytes."""
    topology = layout(train, generation)
    p, t, d = (int(size) for size in train.split("-"))
    gp, gt = (int(size) for size in generation.split("-"))
    hybridflow, vanilla, ds_chat = (compute_transition_cost(1e9, topology, method) for method in METHODS)
    assert hybridflow.recv_bytes == pytest.approx((t * p - gt * gp) / (gt * gp * t * p) * 1e9)
    assert hybridflow.peak_param_bytes == pytest.approx(1e9 / (gt * gp))
    assert hybridflow.redundant_bytes == 0
    assert vanilla.recv_bytes == pytest.approx((t * p - 1) / (t * p) * 1e9)
    assert vanilla.peak_param_bytes == 1e9
    assert vanilla.redundant_bytes == pytest.approx(1e9 / (t * p))
    assert ds_chat.recv_bytes == pytest.approx((t * p * d - 1) / (t * p * d) * 1e9)
    assert ds_chat.peak_param_bytes == 1e9
    assert ds_chat.redundant_bytes == pytest.approx(1e9 / (t * p * d))


@pytest.mark.parametrize(
    ("size", "train", "generation", "hybridflow_gb", "vanilla_gb"),
    [
        (7, "1-8-1", "1-2", 5.25, 12.25),
        (13, "1-8-1", "1-4", 3.25, 22.75),
        (34, "4-8-1", "1-8", 6.375, 65.875),
        (70, "8-8-1", "1-8", 15.3125, 137.8125),
    ],
)
def test_bytes_received_at_figure_14(
    size: int, train: str, generation: str, hybridflow_gb: float, vanilla_gb: float
) -> None:
    topology = layout(train, generation)
    found = [compute_transition_cost(size * 2e9, topology, method).recv_bytes / 1e9 for method in METHODS[:2]]
    assert found == [hybridflow_gb, vanilla_gb]


def test_bytes_of_a_preset() -> None:
    weight_bytes = 2 * ModelShape.preset("llama-2-70b").num_parameters
    cost = compute_transition_cost(weight_bytes, layout("8-8-2", "1-8"))
    assert cost.recv_bytes == weight_bytes * 7 / 64
    assert cost.peak_param_bytes == weight_bytes / 8


@settings(max_examples=150, derandomize=True)
@given(data=st.data())
def test_hybridflow_is_the_gather_inside_a_micro_dp_group(data, topologies) -> None:
    """(d_g - 1) / (tp) of the model comes in, onto the 1 / (tp) that is there: together one generation shard."""
    topology = data.draw(topologies(generates=True).filter(lambda topology: topology.is_nested))
    model_size = topology.train.pp_size * topology.train.tp_size
    hybridflow, vanilla, ds_chat = (compute_transition_cost(1.0, topology, method) for method in METHODS)
    assert hybridflow.recv_bytes == pytest.approx((topology.micro_dp_size - 1) / model_size)
    assert hybridflow.recv_bytes + 1 / model_size == pytest.approx(hybridflow.peak_param_bytes)
    assert hybridflow.recv_bytes <= vanilla.recv_bytes <= ds_chat.recv_bytes
    assert hybridflow.peak_param_bytes <= vanilla.peak_param_bytes == ds_chat.peak_param_bytes


def test_vanilla_on_whole_models_has_no_redundancy() -> None:
    hybridflow, vanilla, _ = (compute_transition_cost(8.0, layout("2-4-1", "1-1"), method) for method in METHODS)
    assert hybridflow == vanilla
    assert vanilla.redundant_bytes == 0


def test_sizes_that_do_not_nest_have_no_formula() -> None:
    with pytest.raises(TopologyError, match=r"gen_pp_size\s+dividing pp_size=1 and gen_tp_size dividing tp_size=1"):
        compute_transition_cost(1.0, layout("1-1-8", "1-2"))
    with pytest.raises(TopologyError, match="generation sizes that nest"):
        compute_transition_cost(1.0, Topology(ParallelSpec(tp_size=4)))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"method='nccl' is not one of 'hybridflow', 'hybridflow-v', 'ds-chat'"):
        compute_transition_cost(1.0, layout("1-2-1", "1-1"), "nccl")


@pytest.mark.parametrize("wrong", [-7, "7b", None, float("nan"), float("inf"), True])
def test_bytes_are_a_number(wrong: object) -> None:
    topology = Topology(ParallelSpec(tp_size=2), GenerationSpec())
    with pytest.raises(TopologyError, match=r"^parameter_bytes=.*. Use the bytes of the whole model"):
        compute_transition_cost(wrong, topology)  # type: ignore[arg-type]
