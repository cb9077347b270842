"""Ranks that feed an engine together, without an engine: one fails or dies, and the others are told."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hf_engine import load_rollout_backend
from hf_engine.backends import _replica
from hf_engine.backends._agreement import together
from hf_engine.backends._all_or_none import all_or_none
from hf_engine.backends._replica import Replica
from hf_engine.backends.server._dialect import ServerFacts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import BackendError, BatchError, GenerationSpec, ParallelSpec, Topology

TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec())
SERVER = "hf_engine.backends.server._backend"
FACTS = ServerFacts(
    name="a server",
    url="http://127.0.0.1:1",
    architectures=(),
    dtype="float32",
    max_positions=48,
    cache_tokens=0,
    has_seeds=True,
    seeds_knob="",
    keeps_tied=False,
    experts=None,
    can_release=False,
    stamp="",
)


def replica_of_all():
    return Replica(range(dist.get_world_size()), dist.distributed_c10d._get_default_group())


def fail_on(rank, error):
    def action():
        if dist.get_rank() == rank:
            raise error
        return "done"

    return action


def fail_with_other_errors():
    replica, rank = replica_of_all(), dist.get_rank()
    full = OSError(28, "No space left on device")
    told = r"^rank {} failed: OSError: \[Errno 28\] No space left on device$"
    on_all = partial(replica.on_all, "test")
    for run, failing in ((replica.on_first, 0), (on_all, 0), (on_all, 1)):
        with pytest.raises(BackendError, match=told.format(failing)) as failed:
            run(fail_on(failing, full))
        assert failed.value.__cause__ is (full if rank == failing else None)
    with pytest.raises(BackendError, match=r"^rank 1 failed: ValueError: two$"):
        on_all(fail_on(1, ValueError("two\nlines")))
    with pytest.raises(BatchError, match=r"^ours$"):
        replica.on_first(fail_on(0, BatchError("ours")))
    assert replica.on_first(fail_on(1, full)) == on_all(fail_on(2, full)) == "done"
    return replica.gather(rank)


def close_after_the_end():
    replica, closed = _replica.replica_of_all(), _replica.replica_of_all()
    closed.close()
    assert len(dist.distributed_c10d._world.pg_map) == 2
    dist.destroy_process_group()
    replica.close()
    closed.close()
    return dist.is_initialized()


def test_a_replica_may_be_closed_after_all_process_groups():
    with LocalRanks(2, timeout_s=60) as ranks:
        assert ranks.run(close_after_the_end) == [False, False]


def test_an_error_of_any_kind_is_one_of_all_ranks(ranks2):
    assert ranks2.run(fail_with_other_errors) == [[0, 1], [0, 1]]


def meet_elsewhere():
    """Rank 1 fails before it comes; it finds rank 0 in two methods, then where it is itself."""
    replica, rank = replica_of_all(), dist.get_rank()
    for method in () if rank else ("load", "generate"):
        with pytest.raises(BackendError, match=f"^rank 0 is in {method}, and of its replica rank 1 in settle: "):
            replica.on_all(method, lambda: "done")
    replica.settle()
    # Both fail, each in a method of its own: each says why.
    with pytest.raises(BackendError, match=f"^rank {rank} failed: ValueError: of {rank}$"):
        replica.on_all(f"method {rank}", fail_on(rank, ValueError(f"of {rank}")))
    return replica.gather(rank)


def test_a_rank_that_failed_finds_the_others_in_what_it_skipped(ranks2):
    assert ranks2.run(meet_elsewhere) == [[0, 1], [0, 1]]


def be_given_something_else():
    replica, rank = replica_of_all(), dist.get_rank()

    def generate(batch, then=lambda: "sampled"):
        with replica.together("generate") as given:
            given.append(batch)
            return then()

    told = r"^generate: of the replica \(0, 1\) the ranks \[1\] were given something else than rank 0: "
    with pytest.raises(BackendError, match=told):
        generate(rank)
    with pytest.raises(BackendError, match=r"^rank 1 failed: ValueError: first$"):
        generate(rank, fail_on(1, ValueError("first")))
    return generate(7)


def test_ranks_that_are_given_something_else_are_told(ranks2):
    assert ranks2.run(be_given_something_else) == ["sampled"] * 2


@contextmanager
def settled(replica):
    try:
        yield
    finally:
        replica.settle()


def fail_in_a_part_of_all():
    """Ranks 1 and 2 are a replica. One fails beside the other, in what all meet in after it; then rank 2 before it."""
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    replica = Replica([1, 2], group) if rank else Replica([0], None)
    for run, failing in ((replica.on_first, 1), (partial(replica.on_all, "load"), 2)):
        told = f"^rank {failing} " + ("failed: ValueError: mine$" if rank else "refused: ValueError: mine; none goes$")
        with pytest.raises(BackendError, match=told), all_or_none("none goes"):
            run(fail_on(failing, ValueError("mine")))
    told = r"^ours$" if rank else "^rank 2 refused: ours; none goes$"
    with pytest.raises(BackendError, match=told), all_or_none("none goes"):
        replica.on_all("load", fail_on(2, BackendError("ours")))
    told = "^rank 1 failed: ValueError: of 1$"
    told = told if rank else "^rank 1 refused: ValueError: of 1; rank 2 refused: ValueError: of 2; none goes$"
    with pytest.raises(BackendError, match=told), all_or_none("none goes"):
        replica.on_all("load", fail_on(rank or None, ValueError(f"of {rank}")))
    told = "^mine$" if rank == 2 else "^rank 2 refused: ValueError: mine; none goes$"
    fail = fail_on(2, ValueError("mine"))
    with pytest.raises((BackendError, ValueError), match=told) as failed, all_or_none("none goes"), settled(replica):
        fail() if rank == 2 else replica.on_all("generate", fail)
    assert rank != 1 or "of its replica rank 2 in settle" in str(failed.value.__cause__)
    # Nobody failed: each says where it is.
    told = f"^rank {rank} is in method {rank}, and of its replica rank {3 - rank} in method {3 - rank}: "
    told = told if rank else "^rank 1 refused: rank 1 is in method 1, .*; rank 2 refused: rank 2 is in method 2, .*"
    with pytest.raises(BackendError, match=told), all_or_none("none goes"):
        replica.on_all(f"method {rank}", lambda: "done")
    replica.close()


def test_who_hears_of_a_failure_is_not_told_of_as_failing(ranks3):
    ranks3.run(fail_in_a_part_of_all, deadline_s=60)


def fail_beside_a_dead_rank():
    replica = replica_of_all()
    if dist.get_rank():
        os._exit(1)
    for run in (partial(replica.on_all, "test"), replica.on_first):
        with pytest.raises(BackendError, match=r"^rank 0 failed: ValueError: mine$"):
            run(fail_on(0, ValueError("mine")))
    with pytest.raises(BackendError, match=r"^could not write: ValueError: mine$"), together("write", None):
        raise ValueError("mine")
    raise AssertionError("the survivor said what failed first")


def test_a_rank_that_fails_says_why_though_another_is_lost():
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError, match="the survivor said what failed first"):
        ranks.run(fail_beside_a_dead_rank)


def build(model, server=SimpleNamespace(facts=FACTS), **options):  # noqa: B008 - it has no state
    """With a server that is never asked anything, or one of the test's."""
    options = {"urls": ["http://127.0.0.1:1"]} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{SERVER}.identify", lambda connection, dtype: server)
        patch.setattr(f"{SERVER}.check_model", lambda server, directory, shape: None)
        return load_rollout_backend("server").build(model, **({"topology": TWO} | options))


class ReleasingServer:
    """Ends where it is asked for what it did already, as SGLang's does."""

    facts = replace(FACTS, can_release=True)

    def __init__(self):
        self.is_released = self.is_full = self.is_busy = False

    def release(self):
        assert not self.is_released, "asked twice"
        if self.is_busy:
            raise BackendError("samples are on their way")
        self.is_released = True

    def resume(self):
        assert self.is_released, "asked twice"
        if self.is_full:
            raise BackendError("no memory")
        self.is_released = False


def release_again(model):
    """Rank 1's server cannot take its memory again; rank 0's did."""
    server, urls = ReleasingServer(), [f"http://127.0.0.1:{port}" for port in (1, 2)]
    backend, rank = build(model, server, urls=urls), dist.get_rank()
    backend.release()
    server.is_full = rank == 1
    with pytest.raises(BackendError, match="no memory"):
        backend.resume()
    assert server.is_released == (rank == 1)
    for _ in range(2):
        backend.release()
        assert server.is_released
    server.is_full = False
    backend.resume()
    assert not server.is_released
    server.is_busy = rank == 1
    with pytest.raises(BackendError, match="samples are on their way"):
        backend.release()
    backend.resume()
    assert not server.is_released
    server.is_busy = False
    # Rank 1 does not come: rank 0's server stays as it is.
    backend.release()
    if rank == 0:
        with pytest.raises(BackendError, match="rank 0 is in resume, and of its replica rank 1 in settle"):
            backend.resume()
    backend.settle()
    assert server.is_released
    backend.close()


def test_no_server_is_asked_twice(ranks2, tmp_path):
    ranks2.run(release_again, write_tiny_model(tmp_path))


def end_this_rank(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_first(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{SERVER}.uuid.uuid4", end_this_rank)  # the first rank's alone
        with pytest.raises(BackendError, match=r"^build lost another rank on rank 1: .*that rank's own error says why"):
            build(model)
    raise AssertionError("the survivor was told")


def lose_the_second(model):
    backend = build(model)
    if dist.get_rank():
        backend._files.begin = end_this_rank
    with pytest.raises(BackendError, match=r"^begin_weights lost another rank on rank 0: "):
        backend.begin_weights()
    raise AssertionError("the survivor was told")


@pytest.mark.parametrize(("lose", "lost"), [(lose_the_first, 0), (lose_the_second, 1)])
def test_a_rank_that_dies_in_an_action_is_a_typed_error_on_the_others(tmp_path, lose, lost):
    model = write_tiny_model(tmp_path)
    with LocalRanks(2, timeout_s=20) as ranks:
        with pytest.raises(RuntimeError) as failed:
            ranks.run(lose, model)
        assert "the survivor was told" in str(failed.value)
        assert f"the process of rank {lost} died" in str(failed.value)


def refuse_on_rank_1(model):
    """Far within the groups' deadline, and the next backend is built."""
    is_second = dist.get_rank() == 1
    for wrong, reason in (
        ({"urls": []}, r"rollout.options.urls=\[\]: give a list"),
        ({"seed": "one"}, "seed='one': give a whole number"),
        ({"weights_directory": 5}, "rank 1 failed: TypeError: "),
    ):
        told = f"^{reason}" if is_second else f"^(rank 1 refused: )?{reason}"
        with pytest.raises(BackendError, match=told):
            build(model, **(wrong if is_second else {}))
    build(model).close()


def refuse_a_damaged_file(models):
    """Each rank reads a directory of its own, as on two machines."""
    with pytest.raises(BackendError, match=r"generation_config.json is not valid JSON: "):
        build(models[dist.get_rank()])


def test_what_one_rank_cannot_use_no_rank_uses(ranks2, tmp_path):
    models = [write_tiny_model(tmp_path / str(rank)) for rank in range(2)]
    ranks2.run(refuse_on_rank_1, models[0])
    (models[1] / "generation_config.json").write_text("{")
    ranks2.run(refuse_a_damaged_file, models)
