from __future__ import annotations

from typing import Any

import pytest

from hf_protocols import ConfigError, Dataflow, ModelCall


def stages(name: str) -> list[list[str]]:
    return [[f"{call.role}.{call.method}" for call in stage] for stage in Dataflow.preset(name).stages()]


def test_ppo_has_the_papers_stages() -> None:
    """Generation, preparation, learning; advantages are a level of their own."""
    assert stages("ppo") == [
        ["actor.generate_sequences"],
        [
            "actor.compute_logprobs",
            "critic.compute_values",
            "reference.compute_ref_logprobs",
            "reward.compute_reward",
        ],
        ["advantage.compute_advantages"],
        ["critic.update_critic", "actor.update_actor"],
    ]
    assert Dataflow.preset("ppo").roles == ("actor", "critic", "reference", "reward", "advantage")


def test_remax_generates_and_scores_twice_and_has_no_critic() -> None:
    assert stages("remax") == [
        ["actor.generate_sequences", "actor.generate_sequences"],
        [
            "actor.compute_logprobs",
            "reference.compute_ref_logprobs",
            "reward.compute_reward",
            "reward.compute_reward",
        ],
        ["advantage.compute_advantages"],
        ["actor.update_actor"],
    ]
    assert "critic" not in Dataflow.preset("remax").roles


def test_safe_rlhf_adds_a_cost_model_to_ppo() -> None:
    ppo, safe = Dataflow.preset("ppo"), Dataflow.preset("safe_rlhf")
    assert set(safe.roles) - set(ppo.roles) == {"cost"}
    assert len(safe.calls) == len(ppo.calls) + 1
    assert "cost.compute_cost" in stages("safe_rlhf")[1]


def test_grpo_has_no_critic_and_groups_by_prompt() -> None:
    grpo = Dataflow.preset("grpo")
    assert grpo.roles == ("actor", "reference", "reward", "advantage")
    (advantages,) = (call for call in grpo.calls if call.role == "advantage")
    assert "row_id" in advantages.reads
    assert len(grpo.stages()) == 4


@pytest.mark.parametrize("name", ["ppo", "remax", "safe_rlhf", "grpo"])
def test_presets_read_only_what_the_data_or_an_earlier_call_gives(name: str) -> None:
    flow = Dataflow.preset(name)
    known = {"row_id", "prompt_ids", "answer"}
    for call in flow.calls:
        assert set(call.reads) <= known, call.method
        known |= set(call.writes)
        assert bool(call.writes) == (call.kind != "training")
    assert [call for stage in flow.stages() for call in stage] == sorted(
        flow.calls, key=lambda call: next(i for i, stage in enumerate(flow.stages()) if call in stage)
    )
    assert {call.kind for call in flow.calls} == {"generation", "inference", "function", "training"}


def call(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> ModelCall:
    return ModelCall(role=role, method="run", kind="function", reads=reads, writes=writes)


def test_a_call_stands_one_level_after_the_last_writer_of_what_it_reads() -> None:
    first, second = call("a", ("data",), ("x",)), call("b", ("x",), ("y",))
    third, fourth = call("c", ("data",), ("z",)), call("d", ("z", "y"), ())
    flow = Dataflow(name="own", calls=(first, second, third, fourth))
    assert flow.stages() == ((first, third), (second,), (fourth,))
    assert flow.roles == ("a", "b", "c", "d")
    assert Dataflow(name="empty", calls=()).stages() == ()


def test_a_column_is_written_once() -> None:
    with pytest.raises(ConfigError, match=r"column 'x' is written by a\.run and by b\.run: rename one"):
        Dataflow(name="own", calls=(call("a", (), ("x",)), call("b", (), ("x",))))


def test_a_column_is_not_read_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"'x' is read by a\.run before b\.run writes it: put the writer first"):
        Dataflow(name="own", calls=(call("a", ("x",), ()), call("b", (), ("x",))))
    with pytest.raises(ConfigError, match=r"'x' is read by a\.run before a\.run writes it"):
        Dataflow(name="own", calls=(call("a", ("x",), ("x",)),))


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"dataflow preset 'safe-rlhf' is unknown: give safe_rlhf"):
        Dataflow.preset("safe-rlhf")
    with pytest.raises(ConfigError, match=r"unknown: give ppo or remax or safe_rlhf or grpo"):
        Dataflow.preset("xyz")
    with pytest.raises(ConfigError, match=r"dataflow preset 'ppoo' is unknown: give ppo\b"):
        Dataflow.preset("ppoo")
    with pytest.raises(ConfigError, match=r"^dataflow preset=3: give one of ppo, remax, safe_rlhf, grpo$"):
        Dataflow.preset(3)
    with pytest.raises(ConfigError, match=r"actor\.run: kind='forward': one of generation, inference"):
        ModelCall(role="actor", method="run", kind="forward", reads=())


@pytest.mark.parametrize("columns", ["abc", 3, (1,)])
def test_columns_are_names(columns: object) -> None:
    for name in ("reads", "writes"):
        with pytest.raises(ConfigError, match=rf"^actor.act: {name}=.*list of column names"):
            ModelCall(role="actor", method="act", kind="inference", **{"reads": (), name: columns})  # type: ignore[arg-type]


def test_a_column_that_may_lack_is_a_column() -> None:
    """A reader of ``x?`` stands where a reader of ``x`` does; it may do without one that nobody writes."""
    writer, reader = call("a", (), ("x",)), call("b", ("x?", "data?"), ())
    assert Dataflow(name="own", calls=(writer, reader)).stages() == ((writer,), (reader,))
    with pytest.raises(ConfigError, match=r"'x' is read by b\.run before a\.run writes it: put the writer first"):
        Dataflow(name="own", calls=(reader, writer))
    with pytest.raises(ConfigError, match=r"'x' is read by c\.run before c\.run writes it"):
        Dataflow(name="own", calls=(call("c", ("x?",), ("x",)),))


def test_any_iterable_of_calls_and_columns_is_kept() -> None:
    flow = Dataflow.preset("ppo")
    assert Dataflow(name="ppo", calls=(call for call in flow.calls)) == flow  # type: ignore[arg-type]
    drawn = ModelCall(role="a", method="b", kind="function", reads=iter(["x"]), writes=["y"])  # type: ignore[arg-type]
    assert (drawn.reads, drawn.writes) == (("x",), ("y",))


@pytest.mark.parametrize("wrong", [{"role": 3}, {"role": ""}, {"method": ""}, {"method": None}])
def test_roles_and_methods_are_names(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"^a call's {name}={value!r}: give a name"):
        ModelCall(**{"role": "a", "method": "b", "kind": "function", "reads": (), **wrong})


@pytest.mark.parametrize("calls", [None, 1, [1], "ab", [call("a", (), ()), None]])
def test_a_dataflow_is_made_of_calls(calls: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dataflow 'own': calls=.*: give ModelCalls$"):
        Dataflow(name="own", calls=calls)
    with pytest.raises(ConfigError, match=r"^a dataflow's name=3: give a name"):
        Dataflow(name=3, calls=())  # type: ignore[arg-type]
