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
            "reward.compute_reward",
            "reward.compute_reward",
            "actor.compute_logprobs",
            "reference.compute_ref_logprobs",
        ],
        ["advantage.compute_advantages"],
        ["actor.update_actor"],
    ]
    assert "critic" not in Dataflow.preset("remax").roles


def test_safe_rlhf_adds_costs_and_their_critic_to_ppo() -> None:
    ppo, safe, paper = map(Dataflow.preset, ("ppo", "safe_rlhf", "safe_rlhf_one_critic"))
    assert set(safe.roles) - set(ppo.roles) == {"cost", "cost_critic"}
    assert set(paper.roles) - set(ppo.roles) == {"cost"}
    assert len(paper.calls) == len(ppo.calls) + 1
    assert len(safe.calls) == len(paper.calls) + 2
    assert {"cost.compute_cost", "cost_critic.compute_values"} <= set(stages("safe_rlhf")[1])


def test_grpo_has_no_critic_and_groups_by_prompt() -> None:
    grpo = Dataflow.preset("grpo")
    assert grpo.roles == ("actor", "reward", "reference", "advantage")
    (advantages,) = (call for call in grpo.calls if call.role == "advantage")
    assert "group_id" in advantages.reads
    assert len(grpo.stages()) == 4


PRESETS = {
    "ppo", "remax", "safe_rlhf", "safe_rlhf_one_critic", "grpo", "dr_grpo", "rloo", "reinforce_pp",
    "reinforce_pp_baseline", "dapo", "gspo", "cispo", "sapo", "gmpo", "maxrl", "opo", "dppo_tv", "distillation",
    "online_dpo",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_read_data_or_columns_of_earlier_calls(name: str) -> None:
    flow = Dataflow.preset(name)
    assert flow.name == name
    known = {"row_id", "prompt_ids", "prompt_id", "group_id", "answer"}
    for call in flow.calls:
        assert set(call.reads) <= known, call.method
        known |= set(call.writes)
        assert bool(call.writes) == (call.kind != "training")
    assert flow.stages()[0][0].kind == "generation"
    assert {call.kind for call in flow.stages()[-1]} == {"training"}


def test_a_role_with_a_model_infers_where_it_was_a_function() -> None:
    flow = Dataflow.preset("safe_rlhf")
    held = flow.with_models(["reward", "actor", "nobody"])
    changed = [pair for pair in zip(flow.calls, held.calls, strict=True) if pair[0] != pair[1]]
    assert [(before.role, before.kind, after.kind) for before, after in changed] == [
        ("reward", "function", "inference")
    ]
    assert held.with_models(["reward"]) == held
    assert flow.with_models(()) == flow
    with pytest.raises(ConfigError, match=r"^with_models: roles='reward' is one text\. Give a list of roles$"):
        flow.with_models("reward")


def call(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> ModelCall:
    return ModelCall(role=role, method="run", kind="function", reads=reads, writes=writes)


def test_call_is_one_level_after_its_last_writer() -> None:
    first, second = call("a", ("data",), ("x",)), call("b", ("x",), ("y",))
    third, fourth = call("c", ("data",), ("z",)), call("d", ("z", "y"), ())
    flow = Dataflow(name="own", calls=(first, second, third, fourth))
    assert flow.stages() == ((first, third), (second,), (fourth,))
    assert flow.roles == ("a", "b", "c", "d")
    assert Dataflow(name="empty", calls=()).stages() == ()


def test_predecessors_are_all_writers_before_a_call() -> None:
    before = {
        call.method: sorted(each.method for each in found)
        for call, found in Dataflow.preset("ppo").predecessors().items()
    }
    scored = ["compute_logprobs", "compute_ref_logprobs", "compute_reward", "compute_values", "generate_sequences"]
    assert before["generate_sequences"] == []
    assert before["compute_reward"] == before["compute_values"] == ["generate_sequences"]
    assert before["compute_advantages"] == scored
    assert {*before["update_actor"]} >= {"compute_advantages", *scored}


def test_a_column_is_written_once() -> None:
    with pytest.raises(ConfigError, match=r"column 'x' is written by a\.run and by b\.run. Rename one"):
        Dataflow(name="own", calls=(call("a", (), ("x",)), call("b", (), ("x",))))


def test_a_column_is_not_read_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"'x' is read by a\.run before b\.run writes it. Put the writer first"):
        Dataflow(name="own", calls=(call("a", ("x",), ()), call("b", (), ("x",))))
    with pytest.raises(ConfigError, match=r"'x' is read by a\.run before a\.run writes it"):
        Dataflow(name="own", calls=(call("a", ("x",), ("x",)),))


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"dataflow preset 'safe-rlhf' is unknown\. Did you mean safe_rlhf"):
        Dataflow.preset("safe-rlhf")
    with pytest.raises(ConfigError, match=r"unknown\. Use one of ppo, remax, safe_rlhf, .*, online_dpo$"):
        Dataflow.preset("xyz")
    with pytest.raises(ConfigError, match=r"dataflow preset 'ppoo' is unknown\. Did you mean ppo\?$"):
        Dataflow.preset("ppoo")
    with pytest.raises(ConfigError, match=r"^dataflow preset=3. Use one of ppo, remax, .*, online_dpo$"):
        Dataflow.preset(3)
    with pytest.raises(ConfigError, match=r"actor\.run: kind='forward' is not one of 'generation', 'inference'"):
        ModelCall(role="actor", method="run", kind="forward", reads=())


@pytest.mark.parametrize("columns", ["abc", 3, (1,)])
def test_columns_are_names(columns: object) -> None:
    for name in ("reads", "writes"):
        with pytest.raises(ConfigError, match=rf"^actor.act: {name}=.*list of column names"):
            ModelCall(role="actor", method="act", kind="inference", **{"reads": (), name: columns})  # type: ignore[arg-type]


def test_a_column_that_may_lack_is_a_column() -> None:
    """A reader of `x?` stands where a reader of `x` does; it may do without one that nobody writes."""
    writer, reader = call("a", (), ("x",)), call("b", ("x?", "data?"), ())
    assert Dataflow(name="own", calls=(writer, reader)).stages() == ((writer,), (reader,))
    with pytest.raises(ConfigError, match=r"'x' is read by b\.run before a\.run writes it. Put the writer first"):
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
    with pytest.raises(ConfigError, match=rf"^a call's {name}={value!r}. Use a name"):
        ModelCall(**{"role": "a", "method": "b", "kind": "function", "reads": (), **wrong})


@pytest.mark.parametrize("calls", [None, 1, [1], "ab", [call("a", (), ()), None]])
def test_a_dataflow_is_made_of_calls(calls: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dataflow 'own': calls=.*. Use ModelCalls$"):
        Dataflow(name="own", calls=calls)
    with pytest.raises(ConfigError, match=r"^a dataflow's name=3. Use a name"):
        Dataflow(name=3, calls=())  # type: ignore[arg-type]
