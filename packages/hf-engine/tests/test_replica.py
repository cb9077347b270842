"""Ranks that feed an engine together, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hf_engine import load_rollout_backend
from hf_engine.rollout.replica import Replica, build_replica
from hf_engine.rollout.server._dialect import ServerFacts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import BackendError, BatchError, GenerationSpec, ParallelSpec, Topology

TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec())
SERVER = "hf_engine.rollout.server._backend"
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


def ask_the_first():
    replica, rank = replica_of_all(), dist.get_rank()

    def refuse():
        raise BatchError(f"of {rank}")

    with pytest.raises(BatchError, match=r"^of 0$"):
        replica.on_first(refuse)
    return replica.on_first(lambda: rank), replica.gather(rank)


def test_all_ranks_have_what_the_first_one_does(ranks2):
    assert ranks2.run(ask_the_first) == [(0, [0, 1])] * 2


def be_given_something_else():
    replica, rank = replica_of_all(), dist.get_rank()

    def generate(number, failure=None):
        with replica.together("generate") as agreement:
            agreement.number = number
            if failure is not None:
                raise failure

    message = (
        r"^generate: of the replica \(0, 1\) the ranks \[1\] were given something else than rank 0, and share its "
    )
    with pytest.raises(BackendError, match=message):
        generate(rank)
    with pytest.raises(BackendError, match=r"^rank 1 refused: ValueError: first; generate was not done$"):
        generate(rank, ValueError("first") if rank else None)
    generate(7)


def test_ranks_that_are_given_something_else_are_reported(ranks2):
    ranks2.run(be_given_something_else)


def close_after_the_end():
    topology = Topology(ParallelSpec(dp_size=4), GenerationSpec(gen_tp_size=2))
    replica, closed = build_replica(topology), build_replica(topology)
    closed.close()
    dist.destroy_process_group()
    replica.close()
    closed.close()
    return dist.is_initialized()


def test_a_replica_may_be_closed_after_all_process_groups():
    with LocalRanks(4, timeout_s=60) as ranks:
        assert ranks.run(close_after_the_end) == [False] * 4


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
    backend.close()


def test_no_server_is_asked_twice(ranks2, tmp_path):
    ranks2.run(release_again, write_tiny_model(tmp_path))


def refuse_on_rank_1(model):
    """Far within the groups' deadline, and the next backend is built."""
    is_second = dist.get_rank() == 1
    for wrong, reason in (
        ({"urls": []}, r"rollout.options.urls=\[\]. Use a list"),
        ({"seed": "one"}, "seed='one'. Use a whole number"),
        ({"weights_directory": 5}, "TypeError: "),
    ):
        told = f"^{reason}" if is_second and "TypeError" not in reason else f"^rank 1 refused: {reason}"
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
