"""A rank that dies, or does not come, leaves a typed error on the others within the groups' deadline."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, build_groups, load_train_backend
from hf_engine.backends._agreement import together
from hf_engine.backends._all_or_none import all_or_none
from hf_engine.lost_peers import lost_peers_are_errors
from hf_engine.process_groups import default_timeout
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_protocols import BackendError, ParallelSpec, Topology

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def die_while_reading(backend, backend_name, model):
    """The process ends in the middle of its own part of `load_hf`."""
    places = {"fsdp": "fsdp.check_same_shapes", "megatron": "megatron._files.HuggingFaceFiles.read"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"hf_engine.backends.{places[backend_name]}", lambda *_: os._exit(1))
        backend.load_hf(model)


def lose_a_rank(model, backend_name, sizes, method, dies, told):
    """Rank 1 dies or stays away; rank 0 says that it got its error, while rank 1 still waits for that."""
    topology, config = Topology(ParallelSpec.parse(sizes)), TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(model, topology=topology, config=config)
    batch = build_batch(4, vocab_size=64)
    backend.train_step(batch, negative_logprobs, 10.0)
    directory = Path(told).with_name("directory")
    if method == "load_state":
        backend.save_state(directory)
    if dist.get_rank() == 1:
        if method == "load_hf":
            die_while_reading(backend, backend_name, model)
        if dies:
            os._exit(1)
        for _ in range(600):
            if Path(told).exists():
                return True
            time.sleep(0.1)
        return False
    calls = {
        "train_step": partial(backend.train_step, batch, negative_logprobs, 10.0),
        "scoring": partial(backend.compute_logprobs, batch),
        "sum_over_data": partial(backend.sum_over_data, [1.0]),
        **{name: partial(getattr(backend, name), directory) for name in ("save_state", "load_state")},
        "export_hf": partial(backend.export_hf, directory),
        "load_hf": partial(backend.load_hf, model),
    }
    with pytest.raises(
        BackendError, match=rf"{method} lost another rank on rank 0: (.|\n)*timeout of init_process_group"
    ):
        calls[method]()
    assert directory.exists() == (method == "load_state"), "a directory appears whole or not at all"
    Path(told).touch()
    return True


@pytest.mark.parametrize(
    ("backend", "sizes", "method"),
    [
        ("megatron", "1-2-1", "train_step"),
        pytest.param("fsdp", "1-1-2", "train_step", marks=pytest.mark.slow),
        pytest.param("megatron", "2-1-1", "train_step", marks=pytest.mark.slow),
        pytest.param("megatron", "1-2-1", "scoring", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stays_away_is_an_error_within_the_deadline(tmp_path, backend, sizes, method):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    with LocalRanks(2, timeout_s=10) as ranks:
        assert ranks.run(lose_a_rank, model, backend, sizes, method, False, tmp_path / "told") == [True, True]


@pytest.mark.parametrize(
    ("backend", "sizes", "method"),
    [
        ("fsdp", "1-1-2", "train_step"),
        pytest.param("fsdp", "1-1-2", "save_state", marks=pytest.mark.slow),
        pytest.param("fsdp", "1-1-2", "load_state", marks=pytest.mark.slow),
        pytest.param("fsdp", "1-1-2", "export_hf", marks=pytest.mark.slow),
        ("fsdp", "1-1-2", "load_hf"),
        pytest.param("megatron", "1-2-1", "load_hf", marks=pytest.mark.slow),
        pytest.param("fsdp", "1-1-2", "sum_over_data", marks=pytest.mark.slow),
        pytest.param("megatron", "1-2-1", "train_step", marks=pytest.mark.slow),
        pytest.param("megatron", "1-1-2", "save_state", marks=pytest.mark.slow),
        pytest.param("megatron", "2-1-1", "export_hf", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_an_error(tmp_path, backend, sizes, method):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError) as failed:
        ranks.run(lose_a_rank, model, backend, sizes, method, True, tmp_path / "told")
    assert "the process of rank 1 died" in str(failed.value)
    assert "rank 0:" not in str(failed.value)
    assert (tmp_path / "told").exists()


def load_what_rank_1_refuses(backend_name, sizes, models, folder):
    """Rank 1 is told of another directory than rank 0."""
    topology, is_second = Topology(ParallelSpec.parse(sizes)), dist.get_rank() == 1
    config = TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(models["mine"], topology=topology, config=config)
    backend.save_state(folder / "state")
    backend.train_step(build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    changes = backend.weight_changes
    before = {name: [part.clone() for part in parts] for name, parts in as_parts(backend.local_weights()).items()}
    with pytest.raises(BackendError, match=r"could not load: rank 1: .*wide holds another model"):
        backend.load_hf(models["wide" if is_second else "other"])
    with pytest.raises(BackendError, match=r"the ranks were given different directories"):
        backend.load_state(folder / ("absent" if is_second else "state"))
    for name, parts in as_parts(backend.local_weights()).items():
        assert all(torch.equal(part, old) for part, old in zip(parts, before[name], strict=True)), name
    assert (backend.weight_changes, backend.optimizer_steps) == (changes, 1)
    backend.load_hf(models["other"])
    assert backend.optimizer_steps == 0
    backend.close()
    return True


@pytest.mark.parametrize(("backend", "sizes"), [("fsdp", "1-1-2"), ("megatron", "1-2-1")])
def test_what_one_rank_cannot_load_no_rank_loads(ranks2, tmp_path, backend, sizes):
    models = {
        "mine": write_tiny_model(tmp_path / "mine", **SIZES),
        "other": write_tiny_model(tmp_path / "other", seed=1, **SIZES),
        "wide": write_tiny_model(tmp_path / "wide", vocab_size=80, **SIZES),
    }
    (tmp_path / "files").mkdir()
    assert ranks2.run(load_what_rank_1_refuses, backend, sizes, models, tmp_path / "files") == [True, True]


def build_what_rank_1_lacks(backend_name, model):
    """Within no deadline: rank 0 gets rank 1's reason, and both build the next model over the same groups."""
    backend_class, topology = load_train_backend(backend_name), Topology(ParallelSpec(dp_size=2))
    config = TrainConfig(learning_rate=1e-2)
    with pytest.raises(BackendError, match=r"could not load: rank 1: .*absent"):
        backend_class.build(
            Path(model).with_name("absent") if dist.get_rank() else model, topology=topology, config=config
        )
    backend = backend_class.build(model, topology=topology, config=config)
    backend.train_step(build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    backend.close()
    return True


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_one_rank_cannot_build_no_rank_builds(ranks2, tmp_path, backend):
    assert ranks2.run(build_what_rank_1_lacks, backend, write_tiny_model(tmp_path / "model", **SIZES)) == [True, True]


def timeouts_of_groups():
    group = build_groups(Topology(ParallelSpec(tp_size=2)), "dp")
    options = group._get_backend(torch.device("cpu")).options
    return default_timeout().total_seconds(), options._timeout.total_seconds()


def test_groups_wait_as_long_as_the_default_group():
    with LocalRanks(2, timeout_s=17) as ranks:
        assert ranks.run(timeouts_of_groups) == [(17.0, 17.0)] * 2


def meet_errors_of_gloo():
    texts = [
        "Application timeout caused pair closure",
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
    ]
    for text in texts:
        with pytest.raises(BackendError, match="train_step lost another rank on rank 0"):
            fail_with(text)


@lost_peers_are_errors("train_step")
def fail_with(text):
    raise RuntimeError(text)


def test_what_gloo_says_of_a_lost_rank_is_known(ranks1):
    ranks1.run(meet_errors_of_gloo)


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), lost_peers_are_errors("train_step"):
        raise RuntimeError("shapes do not match")


def refuse_on_one_rank(folder):
    """The path has a word of gloo's in it: the others are told all the same, and the groups go on."""
    error = OSError(f"{folder}/gloo/transport/tcp.cc is read-only") if dist.get_rank() else None
    with pytest.raises(BackendError, match=r"rank 1.*read-only"), together("write", None):
        raise_if(error)
    told = OSError if dist.get_rank() else BackendError
    with pytest.raises(told, match="read-only"), all_or_none("nothing was written"):
        raise_if(error)
    dist.barrier()


def raise_if(error):
    if error is not None:
        raise error


def test_a_path_that_gloos_errors_might_name_is_no_lost_rank(ranks2, tmp_path):
    ranks2.run(refuse_on_one_rank, tmp_path)
