from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tensordict
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec
from hf_controller.data.futures import as_selection
from hf_controller.groups.call import BatchArgument, Call, check_rows
from hf_controller.groups.worker_group import WorkerGroup, build_calls, compute_called_ranks
from hf_protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    BatchError,
    Collection,
    ParallelSpec,
    PerRank,
    ProtocolError,
    RowSelection,
    Topology,
    TopologyError,
    TransferProtocol,
    register,
)


def spec_of(protocol: TransferProtocol):
    @register(protocol=protocol)
    def method(self):
        pass

    return method.__hybridflow_method__


def call(*args, **kwargs) -> Call:
    return Call(1, "actor", "m", args, kwargs, after=(), submit_s=0.0, timeout_s=1.0, labels={})


@pytest.mark.parametrize(
    ("protocol", "ranks"), [(DP, (0, 1, 2, 3)), (RANK_ZERO, (0,)), (THREE_D, (0, 1, 2, 3)), (ALL_TO_ALL, (0, 1, 2, 3))]
)
def test_all_ranks_are_called_unless_the_protocol_says_otherwise(protocol, ranks):
    assert compute_called_ranks(protocol, Topology(ParallelSpec(tp_size=2, dp_size=2))) == ranks


def test_a_protocol_that_forgets_ranks_is_refused():
    forgetful = TransferProtocol(
        name="MINE",
        distribute=lambda topology, num_rows, weights=None: [RowSelection.range(0, num_rows)],
        collect=lambda topology: Collection(ranks=(0,), combine="concat"),
    )
    with InProcessExecutor() as executor:
        batch = executor.put(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))
        stored = build_calls(call(batch), spec_of(forgetful), (0, 1), executor.put)[0]
    with pytest.raises(ProtocolError, match="'MINE' distributes to 1 ranks, the topology has 2"):
        check_rows(stored, spec_of(forgetful), Topology(ParallelSpec(dp_size=2)), lambda worker, batch: batch)


class Repeating(Worker):
    needs_process_group = False

    @register(
        protocol=TransferProtocol(
            name="TO_LAST",
            distribute=lambda topology, num_rows, weights=None: [
                *[RowSelection()] * (topology.world_size - 1),
                RowSelection.range(0, num_rows),
            ],
            collect=lambda topology: Collection(ranks=tuple(range(topology.world_size))),
        ),
        rows="times",
    )
    def sample(self, batch, times):
        return TensorDict({"x": batch["x"].repeat_interleave(times)}, batch_size=[len(batch) * times])


@pytest.mark.parametrize(("values", "times"), [([4, 7], 3), ([4, 7], 0), ([], 3)])
def test_several_rows_of_none_are_none(values, times):
    spec = WorkerSpec(worker=Repeating, topology=Topology(ParallelSpec(dp_size=2)))
    with InProcessExecutor() as executor:
        sampler = executor.build_groups(ResourcePool([2], device="cpu"), {"sampler": spec})["sampler"]
        batch = TensorDict({"x": torch.tensor(values, dtype=torch.int64)}, batch_size=[len(values)])
        made = sampler.sample(sampler.sample(batch, times), 1)
        assert made.result()["x"].tolist() == [value for value in values for _ in range(times)]


def test_one_call_serves_all_ranks_unless_each_has_its_own_item():
    with InProcessExecutor() as executor:
        batch = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
        shared = build_calls(call(batch, scale=2), spec_of(DP), (0, 1), executor.put)
        assert shared[0] is shared[1]
        assert isinstance(shared[0].args[0], BatchArgument)
        assert shared[0].kwargs == {"scale": 2}
        own = build_calls(call(PerRank([batch, 5]), 7), spec_of(ALL_TO_ALL), (0, 1), executor.put)
        assert own[0].args[0].whole
        assert own[1].args == (5, 7)


@pytest.mark.parametrize("container", [lambda f: [f], lambda f: {"a": f}, lambda f: (1, f)])
def test_a_future_does_not_travel_inside_a_container(container):
    with InProcessExecutor() as executor:
        future = executor.put(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))
        with pytest.raises(ProtocolError, match="Take it out of the list"):
            build_calls(call(container(future)), spec_of(DP), (0,), executor.put)


class Clash(Worker):
    @register(protocol=DP)
    def topology(self, batch):
        return batch


@pytest.mark.parametrize("name", ["close", "context", "one_layout_per_process", "needs_process_group"])
def test_a_method_must_not_hide_a_name_of_the_worker(name):
    def method(self, batch):
        return batch

    clash = type("Clash", (Worker,), {name: register(protocol=DP)(method)})
    spec = WorkerSpec(worker=clash, topology=Topology(ParallelSpec()))
    message = f"^Clash registers {name}, which every Worker has itself. Rename the method$"
    with pytest.raises(ProtocolError, match=message):
        WorkerGroup("clash", spec, ResourcePool([1], device="cpu"), lambda *_: None)


class Generating(Worker):
    needs_process_group = False
    calls = 0

    @register(protocol=THREE_D_ALL_MICRO_DP, rows="unknown")
    def generate(self):
        self.calls += 1
        return TensorDict({"x": torch.zeros(1)}, batch_size=[1])

    @register(protocol=RANK_ZERO, returns="object")
    def count_calls(self):
        return self.calls


def test_a_missing_layout_is_refused_before_any_rank_runs():
    spec = WorkerSpec(worker=Generating, topology=Topology(ParallelSpec()))
    with InProcessExecutor() as executor:
        group = executor.build_groups(ResourcePool([1], device="cpu"), {"critic": spec})["critic"]
        with pytest.raises(TopologyError, match=r"^critic\.generate: this topology has no generation layout. Build"):
            group.generate()
        assert group.count_calls().result() == 0


class Asker(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def ask(self, other):
        return other


def test_a_group_is_not_an_argument_of_a_call():
    spec = WorkerSpec(worker=Asker, topology=Topology(ParallelSpec()))
    with InProcessExecutor() as executor:
        asker = executor.build_groups(ResourcePool([1], device="cpu"), {"asker": spec})["asker"]
        message = "group 'asker' is called by the program that built it, and cannot be copied to a rank. Call it"
        for argument in (asker, [asker], {"group": asker}):
            with pytest.raises(ProtocolError, match=message):
                asker.ask(argument).result()
        with pytest.raises(ProtocolError, match=message):
            pickle.dumps(asker)
        assert asker.ask("nobody").result() == ["nobody"]


def test_a_method_must_not_hide_a_name_of_the_group():
    spec = WorkerSpec(worker=Clash, topology=Topology(ParallelSpec()))
    with pytest.raises(ProtocolError, match="Clash registers topology"):
        WorkerGroup("clash", spec, ResourcePool([1], device="cpu"), lambda *_: None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topology": None}, "topology=None. Use a Topology"),
        ({"topology": "1-1-2"}, "topology='1-1-2'. Use a Topology"),
        ({"kwargs": [1]}, r"kwargs=\[1\]. Use a mapping of names to values"),
        ({"environment": "A=1"}, "environment='A=1'. Use a mapping of names to strings"),
        ({"environment": {"A": 1}}, r"environment\['A'\]=1. Use a string"),
        ({"environment": {3: "1"}}, "environment: name=3. Use a string"),
        ({"environment": {"RANK": "7"}}, "environment has 'RANK'='7': it is set for every rank. Leave it out"),
        ({"environment": {"A=B": "1"}}, "environment has 'A=B'='1': no variable can hold that. Leave it out"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number of at least 0"),
    ],
)
def test_a_worker_spec_of_other_kinds_of_values_is_refused(given, message):
    with pytest.raises(ProtocolError, match=f"^WorkerSpec of Clash: {message}"):
        WorkerSpec(**{"worker": Clash, "topology": Topology(ParallelSpec()), **given})


@pytest.mark.parametrize("worker", [object, Worker])
def test_a_worker_is_a_worker_with_methods(worker):
    with pytest.raises(ProtocolError):
        WorkerSpec(worker=worker, topology=Topology(ParallelSpec()))


def test_rows_that_are_known_are_checked_when_the_call_is_made():
    class Half(Worker):
        needs_process_group = False

        @register(protocol=DP, reads=["y"])
        def m(self, batch):
            return batch

    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=Half, topology=Topology(ParallelSpec(dp_size=2)))
        group = executor.build_groups(ResourcePool([2], device="cpu"), {"half": spec})["half"]
        with pytest.raises(BatchError, match=r"half.m: 1 rows cannot be shared by 2"):
            group.m(TensorDict({"y": torch.zeros(1)}, batch_size=[1]))
        with pytest.raises(BatchError, match=r"half.m asks for y; the batch has x"):
            group.m(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))


@pytest.mark.parametrize("index", [slice(2), slice(1, 4), slice(1, 6, 2), slice(3, 0, -1), slice(3, None, -1)])
def test_a_slice_chooses_the_rows_that_it_chooses_of_a_list(index):
    assert list(as_selection(index)) == list(range(100))[index]


@pytest.mark.parametrize("index", [slice(None), slice(-2), slice(None, 0, -1), slice(3, -9, -1), slice(-3, 9)])
def test_a_slice_that_needs_the_number_of_rows_is_refused(index):
    with pytest.raises(BatchError, match=r"Use whole numbers of at least 0 and give the end"):
        as_selection(index)


class Annotated(Worker):
    needs_process_group = False

    @register(protocol=DP, returns="object")
    def typed(self, batch: TensorDict, options=None):
        return options

    @register(protocol=DP, returns="object")
    def worded(self, batch: TensorDict | None = None, *, other: tensordict.TensorDictBase | None = None):
        return other

    @register(protocol=DP, returns="object")
    def free(self, value=None, *others, **named):
        return value

    @register(protocol=ONE_TO_ALL, returns="object")
    def whole(self, value):
        return value

    @register(protocol=RANK_ZERO, returns="object")
    def first(self, value):
        return value


@pytest.fixture(scope="module")
def annotated():
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=Annotated, topology=Topology(ParallelSpec(dp_size=2)))
        yield executor.build_groups(ResourcePool([2], device="cpu"), {"model": spec})["model"]


class TableArgument:
    columns = ("x",)


@dataclass
class Settings:
    names: tuple[str, ...] = ("a", "b")


class Options(NamedTuple):
    name: str = "a"
    other: str = "b"


ROWS = TensorDict({"x": torch.zeros(2)}, batch_size=[2])


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda group: group.typed("a text"), "a str as argument 1"),
        (lambda group: group.typed({"lr": 0.1}), "a dict as argument 1"),
        (lambda group: group.typed(3), "a int as argument 1"),
        (lambda group: group.typed(batch=Settings()), "a Settings as argument batch"),
        (lambda group: group.worded(ROWS, other={}), "a dict as argument other"),
        (lambda group: group.worded(["a"]), "a list as argument 1"),
        (lambda group: group.free({"x": torch.zeros(2)}), "a dict as argument 1"),
        (lambda group: group.free({"x": np.zeros(2), "scale": 2.0}), "a dict as argument 1"),
        (lambda group: group.free(np.zeros((2, 3))), "a ndarray as argument 1"),
        (lambda group: group.free(1, ["a", "b"]), "a list as argument 2"),
        (lambda group: group.free(texts=["a", "b"]), "a list as argument texts"),
        (lambda group: group.free([{"prompt": "a"}]), "a list as argument 1"),
        (lambda group: group.free(["a", 1]), "a list as argument 1"),
        (lambda group: group.free([None, None]), "a list as argument 1"),
        (lambda group: group.free((1, ["a"])), "a tuple as argument 1"),
        (lambda group: group.free({"a": {"b": [1, 2]}}), "a dict as argument 1"),
        (lambda group: group.free({"a": {"b": np.zeros(2)}, "c": [1]}), "a dict as argument 1"),
        (lambda group: group.free({"x": (1, 2), "y": [3]}), "a dict as argument 1"),
        (lambda group: group.free(TableArgument()), "a TableArgument as argument 1"),
    ],
)
def test_plain_rows_in_place_of_a_batch_are_refused(annotated, make, argument):
    with pytest.raises(ProtocolError, match=rf"^model\.\w+ splits rows by DP_PROTO and got {argument}, which every"):
        make(annotated)


SETTINGS = [
    "a text", Path("a"), 3, 0.5, True, b"a", {}, [], {"lr": 0.1, "betas": [0.9, 0.95]},
    {"path": "a", "depth": {"a": 1}}, {"a": {}}, {"adam": {"lr": 0.1, "betas": [0.9]}},
    [1, 2], (), Settings(), Options(), range(4), torch.tensor(1.0), np.float32(2),
]  # fmt: skip


@pytest.mark.parametrize("value", SETTINGS, ids=repr)
def test_settings_reach_every_rank_whole(annotated, value):
    for call in (annotated.free(value), annotated.whole(value), annotated.typed(ROWS, value)):
        assert len(call.result()) == 2


@pytest.mark.parametrize("value", [["a", "b"], {"x": [1]}, {"x": torch.zeros(2)}, [{"x": 1}]], ids=repr)
def test_plain_rows_next_to_a_batch_or_unsplit_pass(annotated, value):
    assert len(annotated.typed(ROWS, value).result()) == 2
    assert len(annotated.whole(value).result()) == 2
    annotated.first(value).result()
