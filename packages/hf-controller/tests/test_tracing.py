"""Calls that are written down: where their columns come from, and which results there are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, ResourcePool, TracedCall, TracingExecutor, Worker, WorkerSpec
from hf_protocols import (
    ALL_TO_ALL,
    DP,
    FROM_ARGUMENT,
    ONE_TO_ALL,
    BatchError,
    ConfigError,
    ParallelSpec,
    PoolError,
    ProtocolError,
    Topology,
    register,
)


class Unbuilt(Worker):
    """Must not be built, nor called."""

    needs_process_group = False

    def __init__(self, context):
        raise AssertionError("nothing is built")

    @register(protocol=DP, rows="times", reads=("prompt",), writes=("response",), kind="generation")
    def generate(self, batch, sampling): ...

    @register(protocol=DP, reads=("response",), writes=("scores",))
    def score(self, batch): ...

    @register(protocol=DP, reads=("response",), writes=FROM_ARGUMENT)
    def estimate(self, batch, estimator): ...

    @register(protocol=DP, returns="metrics", reads=("response",), kind="training")
    def update(self, batch, loss=None): ...

    @register(protocol=ONE_TO_ALL, returns="object")
    def describe(self): ...

    @register(protocol=ALL_TO_ALL, returns="object")
    def hear(self, value): ...

    @register(protocol=DP)
    def silent(self, batch): ...


@dataclass(frozen=True)
class TracedSampling:
    n: int = 2


@dataclass(frozen=True)
class Function:
    reads: Any = ()
    writes: Any = ("advantages",)


@pytest.fixture
def executor():
    with TracingExecutor() as executor:
        yield executor


def sources_of(call: TracedCall) -> dict[str, list[tuple[TracedCall | None, str, list[int]]]]:
    return {
        name: [(segment.source.shards[0].call, segment.column, list(segment.rows)) for segment in segments]
        for name, segments in call.reads.items()
    }


def test_calls_are_recorded_with_the_sources_of_their_columns(executor):
    model = executor.build_group("model", Unbuilt)
    prompts = executor.put_columns(["prompt", "answer"], 3)
    batch = prompts.repeat(2).union(model.generate(prompts, TracedSampling()))
    model.score(batch.rows([5, 0]).rename({"answer": "label"}))
    generate, score = executor.calls
    assert (generate.role, generate.method, generate.num_rows, generate.writes) == (
        "model",
        "generate",
        3,
        ("response",),
    )
    assert sources_of(generate) == {"prompt": [(None, "prompt", [0, 1, 2])]}
    assert sources_of(score) == {"response": [(generate, "response", [5, 0])]}
    assert (score.num_rows, score.spec.kind, batch.num_rows) == (2, "function", 6)


def test_results_are_recorded_in_order_with_their_rows(executor):
    model = executor.build_group("model", Unbuilt)
    prompts = executor.put_columns(["prompt"], 3)
    batch = model.generate(prompts, TracedSampling())
    model.score(batch)
    generate, score = executor.calls
    found = [(result.call, result.num_rows, result.columns) for result in executor.results]
    assert found == [(None, 3, ("prompt",)), (generate, 6, ("response",)), (score, 6, score.writes)]


def test_columns_that_arguments_declare_are_traced(executor):
    model = executor.build_group("model", Unbuilt)
    batch = executor.put_columns(["response", "costs"], 4)
    batch = batch.union(model.estimate(batch, Function(reads=("costs", "values?"))))
    model.update(batch, Function(reads=("advantages",)))
    estimate, update = executor.calls
    assert (sorted(estimate.reads), estimate.writes) == (["costs", "response"], ("advantages",))
    assert sources_of(update)["advantages"] == [(estimate, "advantages", [0, 1, 2, 3])]
    assert update.writes == ()
    assert estimate.arguments == [Function(reads=("costs", "values?"))]
    assert update.arguments == [Function(reads=("advantages",))]


def test_mistakes_are_the_same_errors_as_elsewhere(executor):
    model = executor.build_group("model", Unbuilt)
    batch = executor.put_columns(["response"], 4)
    with pytest.raises(BatchError, match=r"^model\.score asks for response; the batch has prompt"):
        model.score(executor.put_columns(["prompt"], 4))
    with pytest.raises(BatchError, match=r"^model\.update: Function reads values; the batch has response"):
        model.update(batch, Function(reads=("values",)))
    with pytest.raises(ProtocolError, match=r"^model\.update: Function\.reads='values' is one string"):
        model.update(batch, Function(reads="values"))
    with pytest.raises(BatchError, match=r"^model\.score: row 9 was asked of a batch of 4 rows"):
        model.score(batch.rows([9]))
    with pytest.raises(ConfigError, match=r"model\.silent does not say which columns it returns"):
        model.silent(batch)
    assert executor.calls == []


def test_metrics_are_zero_under_any_name(executor):
    model = executor.build_group("model", Unbuilt)
    metrics = model.update(executor.put_columns(["response"], 4)).result()
    assert (metrics["actor/loss"], metrics.get("kl", 1.0), "reward" in metrics) == (0.0, 0.0, True)
    assert metrics
    for merged in (metrics | {"own": 1.0}, {"own": 1.0} | metrics, metrics.copy() | {"own": 1.0}):
        assert (merged["own"], merged["kl"]) == (1.0, 0.0)


def test_results_of_batches_and_objects_are_refused(executor):
    model = executor.build_group("model", Unbuilt)
    batch = executor.put_columns(["response"], 4)
    for result, what in (
        (model.score(batch), r"a batch of model\.score"),
        (batch.union(model.score(batch)).rows([0]), r"a batch of .*model\.score"),
        (batch, r"a batch of executor\.put"),
        (model.describe(), r"model\.describe"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^the result of {what} is not available: .* Decide by metrics, which are"
        ):
            result.result()
    model.score(batch).wait()


def test_objects_are_followed_to_the_calls_that_take_them(executor):
    topology = Topology(ParallelSpec(dp_size=2))
    spec = WorkerSpec(worker=Unbuilt, topology=topology)
    model = executor.build_groups(ResourcePool([2], device="cpu"), {"model": spec})["model"]
    listed = model.describe()
    assert len(listed) == 2
    model.hear(listed)
    assert executor.calls[1].objects == [executor.calls[0]]


def test_a_batch_has_columns_and_rows_only(executor):
    batch = executor.put(TensorDict({"response": torch.zeros(4), "x": torch.zeros(4)}, batch_size=[4]))
    model = executor.build_group("model", Unbuilt)
    assert model.score(batch).num_rows == 4
    assert list(executor.calls[0].reads) == ["response"]


def test_a_program_that_does_not_end_is_ended():
    executor = TracingExecutor(max_calls=5)
    model = executor.build_group("model", Unbuilt)
    batch = executor.put_columns(["response"], 4)

    def train_until_it_learned() -> None:
        while model.update(batch).result()["reward"] < 1:
            pass

    with pytest.raises(ConfigError, match=r"^model\.update: the program made max_calls=5 calls .* bound loops"):
        train_until_it_learned()
    assert len(executor.calls) == 5
    with pytest.raises(ConfigError, match="max_calls=0"):
        TracingExecutor(max_calls=0)


def test_groups_are_held_and_released_as_elsewhere(executor):
    pool = ResourcePool([1], device="cpu", name="pool")
    spec = WorkerSpec(worker=Unbuilt, topology=Topology(ParallelSpec()))
    model = executor.build_groups(pool, {"model": spec, "other": spec}, fused=True)["model"]
    assert executor.built_on(pool) == [{"model": spec, "other": spec}]
    with pytest.raises(ProtocolError, match="has a group model already"):
        executor.build_groups(pool, {"model": spec})
    executor.release(pool)
    with pytest.raises(PoolError, match="group 'model' is closed"):
        model.describe()
    executor.close()
    for attempt in (
        model.describe,
        lambda: executor.build_group("a", Unbuilt),
        lambda: executor.put_columns(["x"], 1),
    ):
        with pytest.raises(PoolError, match="closed"):
            attempt()


def test_futures_of_another_executor_are_refused(executor):
    model = executor.build_group("model", Unbuilt)
    with TracingExecutor() as other, pytest.raises(ProtocolError, match="belongs to one executor"):
        model.score(other.put_columns(["response"], 2))
    with InProcessExecutor() as real, pytest.raises(ProtocolError, match="belongs to one executor"):
        model.score(real.put(TensorDict({"response": torch.zeros(2)}, batch_size=[2])))


def test_columns_are_names_and_rows_a_number(executor):
    with pytest.raises(BatchError, match="columns='prompt' is one string"):
        executor.put_columns("prompt", 2)
    with pytest.raises(BatchError, match="num_rows=-1"):
        executor.put_columns(["prompt"], -1)


def test_tracing_loads_no_ray():
    code = "import sys; from hf_controller import TracingExecutor; TracingExecutor(); print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
