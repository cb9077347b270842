"""One rank of a replica fails by itself, with real engines: the others hear of it at once, and all generate again."""

from __future__ import annotations

import importlib
import os
from collections import Counter

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_prompts
from hf_engine.testing._training import check_greedy_samples, train_step
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

pytestmark = pytest.mark.timeout(900)

VOCAB_SIZE, GREEDY = 64, SamplingParams(max_new_tokens=6, greedy=True)
TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
BACKENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]


class MineError(Exception):
    """What fails on one rank."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def fail(*_, **__):
    raise MineError("mine")


def fail_the_second_time(method):
    calls = Counter()

    def call(*arguments):
        calls["all"] += 1
        return fail() if calls["all"] == 2 else method(*arguments)

    return call


def fail_alone(backend, model, directory):
    """Far within the groups' deadline, wherever rank 1 fails; rank 0 knows why, whatever it was in."""
    rank = dist.get_rank()
    told = "mine$" if rank else "^rank 1 (refused|failed): MineError: mine(; |$)"
    train = load_train_backend("fsdp").build(model, topology=TWO, config=TrainConfig(learning_rate=3e-2))
    rollout = load_rollout_backend(backend).build(model, topology=TWO, cache_bytes=4 << 20)
    engine = HybridEngine(train, rollout, TWO, training_weights="offload", bucket_bytes=8 << 10)
    module = importlib.import_module(type(rollout).__module__)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    places = {
        "local_weights": (train, fail),
        "offload": (train, fail),
        "check_shards": (module, fail_the_second_time(module.check_shards)),
        "commit_weights": (rollout, fail),
        "resume": (rollout, fail),
    }
    for name, (owner, failing) in places.items():
        train_step(train, TWO, vocab_size=VOCAB_SIZE)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, failing)
            with pytest.raises((MineError, BackendError), match=told), engine.generation():
                pytest.fail("a rank generates")
    for _ in range(2):
        with pytest.raises((MineError, BackendError), match=told) as failed, engine.generation():
            fail() if rank else engine.generate(prompts, GREEDY)
        assert rank or "rank 0 is in generate" in str(failed.value.__cause__)
    wrong = SamplingParams(max_new_tokens=10**6) if rank else GREEDY
    with pytest.raises(BackendError, match="max_new_tokens=1000000") as failed, engine.generation():
        engine.generate(prompts, wrong)
    other = build_prompts(4, vocab_size=VOCAB_SIZE)
    other["row_id"] += 4
    shorter = SamplingParams(max_new_tokens=3, greedy=True)
    for batch, sampling in ((prompts[:3], GREEDY), (other, GREEDY), (prompts, shorter)):
        with pytest.raises(BackendError, match=r"ranks \[1\] were given something else"), engine.generation():
            engine.generate(*((batch, sampling) if rank else (prompts, GREEDY)))
    with engine.generation():
        responses = engine.generate(prompts, GREEDY)
    train.export_hf(directory / "exported")
    check_greedy_samples(train, AutoModelForCausalLM.from_pretrained(directory / "exported"), prompts, responses)
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_alone_is_an_error_on_its_whole_replica(backend, model, tmp_path):
    with LocalRanks(2, timeout_s=1000) as ranks:
        ranks.run(fail_alone, backend, model, tmp_path, deadline_s=300)


def lose_a_rank_at_the_start(model):
    from hf_engine.backends.sglang import _replicas
    from hf_engine.backends.sglang._backend import SglangBackend

    started = []

    def start(environment, real=_replicas.EngineProcess):
        started.append(real(environment))
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_replicas, "EngineProcess", start)
        if dist.get_rank() == 1:
            patch.setattr(SglangBackend, "_start", lambda *_: os._exit(1))
        with pytest.raises(BackendError, match=r"^build lost another rank on rank 0: "):
            load_rollout_backend("sglang").build(model, topology=TWO, cache_bytes=4 << 20)
    with pytest.raises(BackendError, match="the SGLang engine has ended"):
        assert started[0].pid
    raise AssertionError("the survivor's engine has ended")


@pytest.mark.sglang
def test_a_rank_that_dies_at_the_start_leaves_no_engine(model):
    with LocalRanks(2, timeout_s=500) as ranks:
        with pytest.raises(RuntimeError) as failed:
            ranks.run(lose_a_rank_at_the_start, model, deadline_s=400)
        assert "the survivor's engine has ended" in str(failed.value)
        assert "the process of rank 1 died" in str(failed.value)
