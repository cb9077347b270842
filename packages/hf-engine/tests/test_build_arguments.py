"""Arguments that every backend refuses before it reads or starts anything."""

from __future__ import annotations

import pytest

from hf_engine import TrainConfig, build_groups, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, ParallelSpec, Topology, TopologyError

ONE = Topology(ParallelSpec())
NO_TOPOLOGIES = (None, "1-1-2", ParallelSpec())


def build_wrongly(model, names, arguments):
    """The refusals of the training or rollout backends of these names."""
    load = load_train_backend if "config" in arguments else load_rollout_backend
    refusals = []
    for name in names:
        with pytest.raises(BackendError) as refusal:
            load(name).build(model, **arguments)
        refusals.append(str(refusal.value))
    return refusals


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("topology", NO_TOPOLOGIES, ids=repr)
def test_what_is_not_a_topology_is_refused(model, ranks1, topology):
    wanted = f"topology={topology!r}. Use a Topology, such as Topology(ParallelSpec(dp_size=2))"
    training = {"topology": topology, "config": TrainConfig(learning_rate=1e-3)}
    for names, arguments in ((("transformers", "server"), {"topology": topology}), (("fsdp", "megatron"), training)):
        (refusals,) = ranks1.run(build_wrongly, model, names, arguments)
        assert refusals == [wanted] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"config": None}, "config=None. Use a TrainConfig(learning_rate=...)"),
        ({"config": {"learning_rate": 1e-3}}, "config={'learning_rate': 0.001}. Use a TrainConfig(learning_rate=...)"),
        ({"head": "values"}, "head='values'. Use lm, value or score"),
        ({"trainable": "no"}, "trainable='no'. Use True or False"),
        ({"seed": "7"}, "seed='7'. Use a whole number"),
    ],
)
def test_wrong_arguments_of_a_training_backend_are_refused(model, ranks1, wrong, message):
    arguments = {"topology": ONE, "config": TrainConfig(learning_rate=1e-3)} | wrong
    (refusals,) = ranks1.run(build_wrongly, model, ("fsdp", "megatron"), arguments)
    assert refusals == [message] * 2


def test_a_seed_that_is_none_is_refused_by_the_rollout_backends(model, ranks1):
    (refusals,) = ranks1.run(build_wrongly, model, ("transformers", "server"), {"topology": ONE, "seed": 1.5})
    assert refusals == ["seed=1.5. Use a whole number"] * 2


@pytest.mark.parametrize("topology", NO_TOPOLOGIES, ids=repr)
def test_groups_are_of_a_topology(topology):
    with pytest.raises(TopologyError, match=r"^topology=.*. Use a Topology, such as"):
        build_groups(topology, "tp")
