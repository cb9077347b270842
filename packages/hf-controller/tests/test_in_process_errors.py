"""Workers that fail and arguments that nothing takes: each ends in one error that says which."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, RemoteCallError, ResourcePool, Worker, WorkerSpec, connect
from hf_protocols import (
    DP,
    ONE_TO_ALL,
    BatchError,
    ConfigError,
    ParallelSpec,
    PoolError,
    ProtocolError,
    Topology,
    register,
)

ONE = Topology(ParallelSpec())
CLOSED = []


def build(executor, worker):
    spec = WorkerSpec(worker=worker, topology=ONE)
    return executor.build_groups(ResourcePool([1], device="cpu"), {"model": spec})["model"]


def batch(rows=2):
    return TensorDict({"x": torch.ones(rows, 3)}, batch_size=[rows])


class Broken(Worker):
    needs_process_group = False

    def __init__(self, context):
        raise KeyError("no such weights")

    @register(protocol=ONE_TO_ALL, returns="object")
    def never(self):
        return None


def test_a_constructor_that_raises_is_typed_as_on_ray():
    with InProcessExecutor() as executor, pytest.raises(RemoteCallError, match=r"broken.__init__ on rank 0") as failed:
        executor.build_groups(ResourcePool([1], device="cpu"), {"broken": WorkerSpec(worker=Broken, topology=ONE)})
    assert isinstance(failed.value.__cause__, KeyError)


def test_what_was_built_before_a_constructor_raised_is_closed():
    CLOSED.clear()
    specs = {"good": WorkerSpec(worker=StubbornBuild, topology=ONE), "broken": WorkerSpec(worker=Broken, topology=ONE)}
    with InProcessExecutor() as executor:
        pool = ResourcePool([1], device="cpu")
        with pytest.raises(RemoteCallError, match=r"broken.__init__ on rank 0"):
            executor.build_groups(pool, specs)
        assert CLOSED == ["good"]
        assert executor.built_on(pool) == []


def test_other_than_a_batch_or_whole_number_is_refused_by_name():
    with InProcessExecutor() as executor:
        with pytest.raises(BatchError, match="got a dict"):
            executor.put({"x": torch.zeros(2)})
        future = executor.put(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))
        for count in ("2", True, 0):
            with pytest.raises(BatchError, match=f"split: count={count!r} must be a whole number of at least 1"):
                future.split(count)
        with pytest.raises(BatchError, match="split: count=1000000000000 is more than 1048576 parts"):
            future.split(10**12)
        with pytest.raises(BatchError, match=r"repeat: times=1\.5 must be a whole number of at least 1"):
            future.repeat(1.5)
        with pytest.raises(BatchError, match="mapping of old to new"):
            future.rename(["x"])
        for columns in (3, ["x", 3], "x"):
            with pytest.raises(BatchError, match=r"^select=.*Use a list of column names"):
                future.select(columns)


def test_rows_and_deadlines_are_numbers():
    with InProcessExecutor() as executor:
        group = build(executor, StubbornBuild)
        future, answer = group.echo(batch()), group.answer(1)
        for rows in (3, None, torch.tensor(3)):
            with pytest.raises(BatchError, match=r"Use row numbers as a list, .*; of one row, rows\(\[(3|None)\]\)$"):
                future.rows(rows)
        for rows in ("12", [1.0], [[0]], slice("a"), slice(1.5)):
            with pytest.raises(BatchError, match=r"Use row numbers >= 0|Use whole numbers of at least 0"):
                future.rows(rows)
        with pytest.raises(ConfigError, match=r"^timeout_s=\(int that cannot be shown\) must be a finite number"):
            future.result(timeout_s=10**5000)
        for timeout_s in ("x", True, -1.0, float("nan"), float("inf"), 10**400, 1e10):
            for use in (future.result, future.wait, answer.result, answer.wait, answer.items[0].result):
                with pytest.raises(ConfigError, match=r"^timeout_s=.* must be a finite number of seconds"):
                    use(timeout_s=timeout_s)


def test_a_column_whose_name_marks_it_as_optional_is_refused():
    """`reads=["x?"]` reads x if it is there: a column x? could not be asked for."""
    with InProcessExecutor() as executor:
        group = build(executor, StubbornBuild)
        with pytest.raises(BatchError, match=r"^a batch's columns=\['x', 'x\?'\]: 'x\?' ends in \?, which marks"):
            executor.put(TensorDict({"x": torch.zeros(2), "x?": torch.zeros(2)}, batch_size=[2]))
        future = group.echo(batch())
        for names in ({"x": "x?"}, {"x?": "y"}):
            with pytest.raises(BatchError, match=r"^the names in rename=.*'x\?' ends in \?, which marks"):
                future.rename(names)
        assert future.select(name for name in ("x?", "y?")).result().keys() == {"x"}


class StubbornBuild(Worker):
    needs_process_group = False

    @register(protocol=DP)
    def echo(self, batch):
        return batch

    @register(protocol=ONE_TO_ALL, returns="object")
    def answer(self, value):
        return value

    def close(self):
        CLOSED.append(self.context.role)
        raise OSError("the port is busy")


def test_a_failing_close_is_logged_and_other_workers_are_closed(caplog):
    CLOSED.clear()
    spec = WorkerSpec(worker=StubbornBuild, topology=ONE)
    with InProcessExecutor() as executor:
        executor.build_groups(ResourcePool([1], device="cpu"), {"first": spec, "second": spec})
    assert CLOSED == ["first", "second"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{role} on rank 0: close() raised OSError: the port is busy" for role in CLOSED
    ]


def test_a_future_of_another_executor_is_refused():
    with InProcessExecutor() as first, InProcessExecutor() as second:
        here, there = build(first, StubbornBuild), build(second, StubbornBuild)
        own, foreign = first.put(batch()), there.echo(batch())
        for value in (foreign, second.put(batch()), there.answer(1)):
            made_by = r"\(of (model\.echo|model\.answer|executor\.put), in a LocalStore\)"
            with pytest.raises(ProtocolError, match=rf"^model\.answer belongs to one executor .* of another {made_by}"):
                here.answer(value)
        for join in (own.union, own.concat):
            here_and_there = f"^{join.__name__} with a batch of executor.put belongs .* of another \\(of model.echo,"
            with pytest.raises(ProtocolError, match=here_and_there):
                join(foreign)
        assert here.echo(own.concat(here.echo(own))).num_rows == 4


class Ending(Worker):
    needs_process_group = False

    def __init__(self, context, *, ends=False):
        super().__init__(context)
        if ends:
            raise SystemExit(3)

    @register(protocol=ONE_TO_ALL, returns="object")
    def interrupt(self):
        raise KeyboardInterrupt


def test_ctrl_c_in_a_method_interrupts_the_program():
    with InProcessExecutor() as executor:
        group = build(executor, Ending)
        with pytest.raises(KeyboardInterrupt):
            group.interrupt()


class Scribbling(Worker):
    needs_process_group = False

    @register(protocol=DP)
    def scribble(self, batch, error):
        batch["x"].add_(1)
        raise error


def test_an_error_after_a_write_in_place_stays_the_error():
    with InProcessExecutor() as executor:
        group = build(executor, Scribbling)
        with pytest.raises(RemoteCallError, match=r"^model\.scribble on rank 0 failed: KeyError: 'mine'") as failed:
            group.scribble(batch(), KeyError("mine")).result()
        assert "\nmodel.scribble wrote in place into x, a view of memory" in failed.value.remote_traceback
        with pytest.raises(KeyboardInterrupt):
            group.scribble(batch(), KeyboardInterrupt())


def test_a_constructor_that_exits_is_one_remote_call_error():
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=Ending, topology=ONE, kwargs={"ends": True})
        with pytest.raises(RemoteCallError, match=r"^model\.__init__ on rank 0 failed: SystemExit: 3\n"):
            executor.build_groups(ResourcePool([1], device="cpu"), {"model": spec})


def test_only_groups_are_connected():
    with InProcessExecutor() as executor:
        group = build(executor, Ending)
        for other in (3, None, "critic"):
            with pytest.raises(ProtocolError, match=f"^connect: second={other!r}. Use a WorkerGroup$"):
                connect(group, other)
            with pytest.raises(ProtocolError, match=f"^connect: first={other!r}. Use a WorkerGroup$"):
                connect(other, group)
        with pytest.raises(ProtocolError, match=r"^connect: name=3. Use a string$"):
            connect(group, group, name=3)


def test_a_seed_fits_the_generators():
    assert WorkerSpec(worker=Ending, topology=ONE, seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(ProtocolError, match=r"^WorkerSpec of Ending: seed=18446744073709551616 must be below 2\*\*64$"):
        WorkerSpec(worker=Ending, topology=ONE, seed=2**64)


class Rootless(Worker):
    needs_process_group = False

    def __init__(self, context):
        pass

    @register(protocol=DP)
    def never(self, batch):
        return batch


def test_a_constructor_that_forgets_its_base_class_is_named():
    with InProcessExecutor() as executor, pytest.raises(ProtocolError, match=r"Rootless\.__init__ leaves the worker"):
        build(executor, Rootless)


def test_building_groups_keeps_the_programs_random_state():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with InProcessExecutor() as executor:
        build(executor, StubbornBuild)
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(PoolError, match=r"pool='x'. Use the ResourcePool"):
            executor.release("x")


class Failing(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail(self, why):
        raise KeyError(why)

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail_again(self, why):
        raise KeyError(why)

    @register(protocol=ONE_TO_ALL, returns="object")
    def succeed(self):
        return 1


def fail_twice_and_tell_once():
    with InProcessExecutor() as executor:
        group = build(executor, Failing)
        with pytest.raises(RemoteCallError, match="told"):
            group.fail("told").result()
        group.fail_again("untold")
        with pytest.raises(RemoteCallError, match="dealt with"):
            group.fail_again("dealt with").result()
        group.succeed()


def fail_and_raise():
    with InProcessExecutor() as executor:
        build(executor, Failing).fail("hidden")
        raise ZeroDivisionError


def test_a_block_raises_its_own_or_the_first_unreported_failure():
    with pytest.raises(RemoteCallError, match=r"^model\.fail_again on rank 0 failed: KeyError: 'untold'") as raised:
        fail_twice_and_tell_once()
    line = fail_twice_and_tell_once.__code__.co_firstlineno + 5
    assert raised.value.__notes__[1] == f"the call was made at {__file__}:{line}, and nothing asked for its result"
    with pytest.raises(ZeroDivisionError):
        fail_and_raise()


def test_a_block_says_how_many_other_calls_failed():
    def leave_three():
        with InProcessExecutor() as executor:
            group = build(executor, Failing)
            first = group.fail("first")
            group.fail("second"), group.fail("third")
            with pytest.raises(RemoteCallError, match="first"):
                first.result()
            group.fail("fourth")

    with pytest.raises(RemoteCallError, match="KeyError: 'second'") as raised:
        leave_three()
    assert raised.value.__notes__[1].endswith("nothing asked for its result. 2 other calls failed, too")


class TerminatedInside(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def terminate(self, how):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            if how == "swallow":
                return how
            if how == "turn":
                raise ValueError("scoring failed") from error
            raise


@pytest.mark.parametrize("how", ["raise", "swallow", "turn"])
def test_sigterm_in_a_method_ends_the_program_not_the_call(how, other_guards_hear_nothing):
    """Holds even if the method, or a library that it calls, handles the signal; as on Ray."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, InProcessExecutor() as executor:
        build(executor, TerminatedInside).terminate(how)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_constructor_arguments_are_refused_by_worker_spec():
    with pytest.raises(ProtocolError, match=r"kwargs do not fit its constructor: got an unexpected keyword .*'zzz'"):
        WorkerSpec(worker=Ending, topology=ONE, kwargs={"zzz": True})


class Unmade(Ending):
    __init__ = Worker.__init__


class WithoutContext(Ending):
    def __init__(self):
        raise AssertionError("it is never made")


@pytest.mark.parametrize(
    ("worker", "kwargs", "message"),
    [
        (Unmade, {"zzz": True}, r"none of its own that takes zzz\. Define __init__\(self, context, zzz\)"),
        (WithoutContext, {}, r"does not take a context: .* Define __init__\(self, context, \.\.\.\)"),
    ],
)
def test_a_constructor_of_another_form_is_refused_at_once(worker, kwargs, message):
    """Not on the ranks, after they have started."""
    with pytest.raises(ProtocolError, match=f"kwargs do not fit its constructor: .*{message}"):
        WorkerSpec(worker=worker, topology=ONE, kwargs=kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"role\.scale\(batch, factor\): missing a required argument: 'batch'"),
        ((None, 1, 2), {}, r"role\.scale\(batch, factor\): too many positional arguments"),
        ((None,), {"foo": 1}, r"role\.scale\(batch, factor\): got an unexpected keyword argument 'foo'"),
    ],
)
def test_wrong_method_arguments_are_refused_at_the_call(args, kwargs, message):
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=Scaling, topology=ONE)
        group = executor.build_groups(ResourcePool([1], device="cpu"), {"role": spec})["role"]
        with pytest.raises(ProtocolError, match=message):
            group.scale(*args, **kwargs)


class Scaling(Worker):
    needs_process_group = False

    @register(protocol=DP, reads=("x",), writes=("x",))
    def scale(self, batch, *, factor=1.0):
        return batch
