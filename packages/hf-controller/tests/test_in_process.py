"""Groups in the program's own process: what they are built on, and how they train, stop and end."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hf_controller import (
    Deadline,
    InProcessExecutor,
    RayExecutor,
    RemoteCallError,
    ResourcePool,
    Worker,
    WorkerSpec,
    rebuild,
)
from hf_protocols import (
    DP,
    ONE_TO_ALL,
    ConfigError,
    ParallelSpec,
    PoolError,
    ProtocolError,
    Topology,
    register,
)

ONE = Topology(ParallelSpec())


class AddingModel(Worker):
    def __init__(self, context):
        super().__init__(context)
        from torch.distributed.fsdp import fully_shard

        self.model = torch.nn.Linear(3, 1)
        fully_shard(self.model)
        self.closed = False

    @register(protocol=DP, returns="metrics")
    def train(self, batch):
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        return {"loss": (loss.item(), 1)}

    @register(protocol=ONE_TO_ALL, returns="object")
    def stop_here(self):
        breakpoint()

    @register(protocol=DP)
    def fail(self, batch):
        raise KeyError("lost")


def build(executor, worker=AddingModel, ranks=1):
    topology = Topology(ParallelSpec(dp_size=ranks))
    spec = WorkerSpec(worker=worker, topology=topology)
    return executor.build_groups(ResourcePool([ranks], device="cpu"), {"model": spec})["model"]


@pytest.fixture(scope="module")
def model():
    with InProcessExecutor() as executor:
        yield build(executor)


def batch(rows=2):
    return TensorDict({"x": torch.ones(rows, 3)}, batch_size=[rows])


def test_one_rank_trains_with_fsdp(model):
    assert model.train(batch()).result()["loss"] >= 0.0


def read_modes():
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return *modes, str(torch.zeros(1).dtype), str(torch.zeros(1).device)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class ModalWorker(Worker):
    """Trains with torch's modes as it finds them."""

    def __init__(self, context, gradients=True, dtype=torch.float32, device=None):
        super().__init__(context)
        self.model = torch.nn.Linear(3, 1)
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        if device is not None:
            torch.set_default_device(device)

    @register(protocol=DP)
    def step(self, batch):
        lost = self.model(batch["x"])
        if torch.is_grad_enabled():
            lost.sum().backward()
        return TensorDict({"lost": lost, "tokens": batch["tokens"]}, batch_size=batch.batch_size)

    @register(protocol=ONE_TO_ALL, returns="object")
    def modes(self):
        return read_modes()

    @register(protocol=DP, returns="object")
    def train_in_autocast(self, batch, given):
        """Losses of steps that each cast the weights, which the step before has changed, and a plain argument."""
        losses = []
        for _ in range(3):
            with torch.autocast("cpu"):
                found = self.model(batch["x"])
                loss = (found * given).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            losses.append((loss.item(), str(found.dtype)))
        return losses


@pytest.mark.parametrize(
    "block",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: default_dtype(torch.float64),
        lambda: default_device("meta"),
        lambda: torch.device("meta"),
    ],
    ids=["inference_mode", "no_grad", "autocast", "dtype", "device", "device block"],
)
def test_a_rank_knows_nothing_of_the_programs_modes(block):
    tokens = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    rows = TensorDict({"x": torch.ones(2, 3), "tokens": tokens}, batch_size=[2])
    with InProcessExecutor() as executor:
        with block():
            outside = read_modes()
            group = build(executor, ModalWorker)
            made = executor.put(rows)
            first = group.step(made).result()["lost"]
            assert group.modes().result() == [(True, False, False, "torch.float32", "cpu")]
            assert read_modes() == outside
        again = group.step(made).result()["lost"]
        assert first.dtype == again.dtype == torch.float32
        assert torch.equal(first, again)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(
    "block",
    [
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.autocast("cpu", cache_enabled=False),
        lambda: torch.autocast("cuda"),
    ],
    ids=["inference_mode", "float16", "off", "no cache", "another device"],
)
def test_a_ranks_own_autocast_is_as_outside_of_the_programs(block):
    def train():
        torch.manual_seed(0)
        group = build(executor, ModalWorker)
        given = torch.ones(1)
        return [group.train_in_autocast(batch(), given).result() for _ in range(2)]

    with InProcessExecutor() as executor:
        expected = train()
        with block():
            found = train()
    assert found == expected
    losses = [loss for call in found for loss, _ in call]
    assert losses == sorted(set(losses), reverse=True)


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize(
    "block",
    [nullcontext, lambda: default_dtype(torch.bfloat16), lambda: default_device("meta"), lambda: torch.device("meta")],
    ids=["none", "dtype", "device", "device block"],
)
def test_a_rank_keeps_the_modes_that_it_set(block, device):
    def build_quiet(dtype):
        kwargs = {"gradients": False, "dtype": dtype, "device": device}
        spec = WorkerSpec(worker=ModalWorker, topology=ONE, kwargs=kwargs)
        return executor.build_groups(ResourcePool([1], device="cpu"), {"model": spec})["model"]

    before = read_modes()
    with InProcessExecutor() as executor, block():
        outside = read_modes()
        quiet, wide = build_quiet(torch.float32), build_quiet(torch.float64)
        other = build(executor, ModalWorker)
        assert quiet.modes().result() == [(False, False, False, "torch.float32", device or "cpu")]
        assert wide.modes().result() == [(False, False, False, "torch.float64", device or "cpu")]
        assert other.modes().result() == [(True, False, False, "torch.float32", "cpu")]
        assert read_modes() == outside
    assert read_modes() == before
    assert not _get_current_function_mode_stack()


def test_a_rank_is_in_the_programs_modes_of_functions():
    seen = []
    tokens = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    rows = TensorDict({"x": torch.ones(1, 3), "tokens": tokens}, batch_size=[1])

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with InProcessExecutor() as executor, Watching(), torch.device("meta"):
        group = build(executor, ModalWorker)
        seen.clear()
        group.step(rows).result()
    assert torch.nn.functional.linear in seen


class KeepingWorker(Worker):
    needs_process_group = False

    def __init__(self, context, kept, again):
        super().__init__(context)
        kept.append(context.role)
        self.kept, self.again = kept, again

    @register(protocol=ONE_TO_ALL, returns="object")
    def is_shared(self):
        return self.again is self.kept

    @register(protocol=ONE_TO_ALL, returns="object")
    def list_kept(self):
        return self.kept


def build_keeping(executor, kept, roles=("keeper",), fused=False):
    spec = WorkerSpec(worker=KeepingWorker, topology=ONE, kwargs={"kept": kept, "again": kept})
    return executor.build_groups(ResourcePool([1], device="cpu"), dict.fromkeys(roles, spec), fused=fused)


def test_a_rank_has_constructor_arguments_of_its_own():
    kept = [torch.ones(2)]
    with InProcessExecutor() as executor:
        groups = build_keeping(executor, kept, ("first", "second"))
        assert groups["first"].is_shared().result() == [True]
        kept[0].zero_()
        kept.append("later")
        found = {role: group.list_kept().result()[0] for role, group in groups.items()}
    assert {role: (own.tolist(), *others) for role, (own, *others) in found.items()} == {
        "first": ([1.0, 1.0], "first"),
        "second": ([1.0, 1.0], "second"),
    }


def test_a_constructor_argument_may_hold_a_module():
    with InProcessExecutor() as executor:
        found = build_keeping(executor, [torch])["keeper"].list_kept().result()
    assert found == [[torch, "keeper"]]


def test_fused_roles_share_what_their_arguments_share():
    with InProcessExecutor() as executor:
        groups = build_keeping(executor, [], ("first", "second"), fused=True)
        assert groups["first"].list_kept().result() == [["first", "second"]]


def test_a_constructor_argument_that_cannot_be_copied_is_named():
    with (
        InProcessExecutor() as executor,
        pytest.raises(ProtocolError, match="keeper: KeepingWorker: the argument kept, a list, cannot be copied"),
    ):
        build_keeping(executor, [threading.Lock()])


def test_a_breakpoint_stops_in_the_method(model, monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_code.co_name))
    model.stop_here()
    assert stops == ["stop_here"]


def test_a_failure_has_the_original_exception_as_its_cause(model):
    with pytest.raises(RemoteCallError, match=r"model.fail on rank 0 failed: KeyError: 'lost'") as error:
        model.fail(batch()).result()
    assert isinstance(error.value.__cause__, KeyError)
    assert error.value.__cause__.__traceback__ is not None


def test_closing_closes_the_workers_and_leaves_the_process_group():
    script = """
from torch import distributed
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register
from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec

class Plain(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def world(self):
        return distributed.get_world_size()
    def close(self):
        print("closed")

spec = WorkerSpec(worker=Plain, topology=Topology(ParallelSpec()))
for _ in range(2):
    with InProcessExecutor() as executor:
        group = executor.build_groups(ResourcePool([1], device="cpu"), {"plain": spec})["plain"]
        print(group.world().result())
    executor.close()
    print(distributed.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[1]", "closed", "False"] * 2


def test_larger_groups_are_refused_next_to_a_default_group(model):
    with InProcessExecutor() as executor, pytest.raises(ProtocolError, match="rank 0 of 2 cannot run in a process"):
        build(executor, ranks=2)


def test_a_released_one_rank_group_makes_room_for_a_larger_one():
    script = """
from torch import distributed
from hf_protocols import DP, ParallelSpec, Topology, register
from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec

class W(Worker):
    def __init__(self, context, broken=False):
        super().__init__(context)
        if broken:
            raise ValueError("broken")

    @register(protocol=DP, returns="object")
    def rank(self):
        return self.context.rank

def build(ranks, **kwargs):
    pool = ResourcePool([ranks], device="cpu")
    spec = WorkerSpec(worker=W, topology=Topology(ParallelSpec(dp_size=ranks)), kwargs=kwargs)
    return executor.build_groups(pool, {"w": spec})["w"]

with InProcessExecutor() as executor:
    executor.release(build(1).pool)
    print(distributed.is_initialized())
    try:
        build(1, broken=True)
    except Exception as error:
        print(type(error).__name__)
    larger = build(2)
    print(larger.rank().result())
    executor.release(larger.pool)
    print(build(1).rank().result())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["False", "RemoteCallError", "[0, 1]", "0"], done.stderr


def test_other_than_a_pool_or_spec_is_refused_by_name():
    pool = ResourcePool([1], device="cpu", name="small")
    with InProcessExecutor() as executor:
        for specs in ({}, [1], None, {"a": AddingModel}, {1: WorkerSpec(worker=AddingModel, topology=ONE)}):
            with pytest.raises(
                ProtocolError, match=r"small.*(specs=|got no role)|the spec of a=.*a WorkerSpec|role=1. Use its name"
            ):
                executor.build_groups(pool, specs)
        with pytest.raises(ProtocolError, match=r"^pool=2. Use a ResourcePool"):
            executor.build_groups(2, {"a": WorkerSpec(worker=AddingModel, topology=ONE)})
        with pytest.raises(PoolError, match=r"^pools=ResourcePool\(.*. Use a list of ResourcePools"):
            rebuild(executor, pool)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_cpus": -1},
        {"num_cpus": 0.5},
        {"num_cpus": "a"},
        {"object_store_bytes": 10},
        {"object_store_bytes": "1g"},
        {"object_store_bytes": 0},
        {"object_store_bytes": 1 << 60},
        {"address": None},
        {"call_timeout_s": float("inf")},
        {"deadlines": 60.0},
    ],
)
def test_invalid_executor_settings_are_refused_before_ray_starts(settings, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", None)
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"^{name}={value!r}"):
        RayExecutor(**settings)


def test_a_deadline_is_refused_where_it_is_given(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(ConfigError, match=r"^deadlines\['train'\]=60.0. Use Deadline\(seconds, "):
        RayExecutor(deadlines={"train": 60.0})
    with InProcessExecutor() as executor:
        for deadline, message in (
            (60.0, r"^deadline=60.0. Use Deadline\(seconds, "),
            (Deadline(-1.0, "deadlines.train_s"), r"^deadlines.train_s=-1.0 must be a finite number of seconds"),
        ):
            with pytest.raises(ConfigError, match=message), executor.deadline(deadline):
                pass


def test_a_cluster_that_runs_keeps_its_object_store():
    with pytest.raises(ConfigError, match=r"^object_store_bytes=1073741824: address='auto' is a cluster with its own"):
        RayExecutor(address="auto", object_store_bytes=1 << 30)


def test_released_groups_refuse_calls():
    class Quiet(Worker):
        needs_process_group = False

        @register(protocol=ONE_TO_ALL, returns="object")
        def m(self):
            return 1

    with InProcessExecutor() as executor:
        group = build(executor, Quiet)
        assert group.m().result() == [1]
        executor.release(group.pool)
        with pytest.raises(PoolError, match="released"):
            group.m()
    with pytest.raises(PoolError, match="closed"):
        build(executor, Quiet)
    with pytest.raises(PoolError, match="closed"):
        rebuild(executor, [group.pool])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_cuda_pool_without_cuda_is_refused_with_what_to_do():
    with InProcessExecutor() as executor:
        pool = ResourcePool([1], device="cuda", name="gpus")
        with pytest.raises(PoolError, match=r"'gpus' wants cuda:0 and torch finds no CUDA device.*device=\"cpu\""):
            executor.build_groups(pool, {"model": WorkerSpec(worker=AddingModel, topology=ONE)})


@pytest.mark.parametrize("device", [5, "", "gpu", "meta", "cuda:x"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match=rf"^device={device!r}. Use \"cpu\", \"cuda\" or \"cuda:0\""):
        InProcessExecutor(device=device)
