"""Real SGLang engines that are used wrongly, fail or are killed, and ranks that fail next to them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_testing.shared_engine import ENGINES, build, shared
from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.resharding.boxes import Box
from hf_engine.rollout.sglang import _session
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, NonFiniteLossError, ParallelSpec, ReshardError, Topology

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

VOCAB_SIZE = 64
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)
ONE = Topology(ParallelSpec(), GenerationSpec())
TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "two heads": write_tiny_model(folder / "two heads", num_key_value_heads=2, seed=1),
        "tied": write_tiny_model(folder / "tied"),
        "stopping": write_tiny_model(folder / "stopping", eos_token_id=[7, 30]),
    }


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=300) as ranks:
        yield ranks


def reference_of(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def refuse(models, directory):
    with pytest.raises(BackendError, match=r"topology=None. Use a Topology"):
        build(models["tied"], None)
    for wrong, message in (
        ({"timeout_s": float("inf")}, "timeout_s=inf must be a finite number above 0"),
        ({"start_timeout_s": "10 min"}, "start_timeout_s='10 min' must be a finite number above 0"),
        ({"staging_bytes": 0}, "staging_bytes=0 must be a whole number of at least 1"),
    ):
        with pytest.raises(BackendError, match=f"^{message}"):
            build(models["tied"], ONE, **wrong)
        with pytest.raises(BackendError, match=f"^{message}"):
            load_rollout_backend("sglang").check_options(wrong)
    with pytest.raises(BackendError, match="would change tp_size"):
        load_rollout_backend("sglang").check_options({"engine_options": {"tp_size": 2}})
    with pytest.raises(BackendError, match="it has 1 ranks, the topology 2"):
        build(models["tied"], Topology(ParallelSpec(dp_size=2), GenerationSpec()))
    with pytest.raises(BackendError, match=r"absent': no such directory"):
        build(models["tied"] / "absent", ONE)
    with pytest.raises(BackendError, match=r"max_positions=49 is above the model's 48 positions. Lower max_positions"):
        build(models["tied"], ONE, max_positions=49)
    with pytest.raises(BackendError, match=r"cache_bytes=600 holds 1 tokens of 512 bytes .*. Raise cache_bytes"):
        build(models["tied"], ONE, cache_bytes=600)
    lacking = write_tiny_model(directory / "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=r"lacking': lacks the parameters model.norm.weight. Give a"):
        build(lacking, ONE)
    (lacking / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(BackendError, match=r"lacking': model.safetensors cannot be read: its header would have"):
        build(lacking, ONE)
    experts = write_tiny_model(directory / "experts", family="mixtral")
    with pytest.raises(BackendError, match=r"SGLang's experts are wrong on a CPU .* 'transformers'"):
        build(experts, ONE)
    unknown = write_tiny_model(directory / "unknown")
    (unknown / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(BackendError, match=r"its files hold 'transformer.*' in other parts .* 'transformers'"):
        build(unknown, ONE)


def use_wrongly(model):
    backend = shared(model, ONE)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    with pytest.raises(BackendError, match="Call begin_weights first"):
        backend.load_shards({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_cache_tokens", 13)
        with pytest.raises(
            BackendError, match=r"row \d needs \d+ tokens .* cache holds 7 tokens. Raise cache_bytes or"
        ):
            backend.generate(prompts, GREEDY)
    weights = {name: [torch.full(shape, torch.nan)] for name, shape in backend.weight_layout().shapes.items()}
    send(backend, weights, 4)
    with pytest.raises(NonFiniteLossError, match="row 0 are not finite at weight version 4"):
        backend.generate(prompts, GREEDY)
    full = {name: parameter.detach() for name, parameter in reference_of(model).named_parameters()}
    # What only SGLang can know: a name that it has no place for, and a box that it would cut elsewhere.
    backend.begin_weights()
    for name, box, problem in (
        ("model.layers.0.mlp.no_proj.weight", Box.whole((4, 4)), "LlamaForCausalLM has no place for the parameters"),
        ("model.layers.0.mlp.up_proj.weight", Box((2, 0), (4, 64)), "this model is not laid out here as the engine"),
    ):
        staged = backend._staging.fill(
            {name: torch.zeros(box.shape)},
            shapes={name: full.get(name, torch.zeros(4, 4)).shape},
            boxes={name: box},
        )
        backend._call("load_weights", [staged])
        with pytest.raises(ReshardError, match=problem):
            backend._staging.check_report()
    send(backend, {name: [parameter] for name, parameter in full.items()}, 5)
    assert backend.generate(prompts, GREEDY)["weight_version"].tolist() == [5] * 4


def send(backend, weights, version):
    backend.begin_weights()
    backend.load_shards(weights)
    backend.commit_weights(version)


def lose_the_engine(model, victim):
    """Killed while it generates; `victim` is the server or one of its children."""
    backend = shared(model, ONE)
    pid, directory = backend._engine.pid, Path(backend._engine._directory)
    segments = _session.find_segments(pid)
    assert segments and directory.is_dir()
    children = psutil.Process(pid).children(recursive=True)
    target = pid if victim == "server" else next(p.pid for p in children if "scheduler" in " ".join(p.cmdline()))
    threading.Timer(0.3, os.kill, (target, signal.SIGKILL)).start()
    with pytest.raises(BackendError, match=r"process ended in 'generate' \(.*\): .*. Build the backend again"):
        generate_without_end(backend)
    with pytest.raises(BackendError, match="Build the backend again"):
        backend.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
    ENGINES.clear()
    backend.close()
    assert_gone([pid, *(child.pid for child in children)], segments, directory)


def generate_without_end(backend):
    while True:
        backend.generate(build_prompts(64, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=40))


def assert_gone(pids, segments, directory):
    stop = time.monotonic() + 30
    while living := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < stop, f"{living} live on"
        time.sleep(0.1)
    assert not [path for path in segments if Path(path).exists()]
    assert not directory.exists()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop_and_tell(model):
    """The model's own tokens end a response; what a rank leaves to be looked at from outside."""
    backend = shared(model, ONE)
    sampling = SamplingParams(max_new_tokens=12, temperature=3.0, stop_token_ids=(11,))
    result = backend.generate(build_prompts(40, vocab_size=VOCAB_SIZE), sampling)
    for ids, reason in zip(rows_of(result["response_ids"]), result["finish_reason"].tolist(), strict=True):
        stops = [token for token in ids.tolist() if token in (7, 11, 30)]
        assert stops == ids.tolist()[-1:] if reason == 0 else not stops
    assert set(result["finish_reason"].tolist()) == {0, 1}
    pid = backend._engine.pid
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return os.getpid(), pids, _session.find_segments(pid), Path(backend._engine._directory)


def test_what_cannot_run_is_refused(alone, models, tmp_path):
    alone.run(refuse, models, tmp_path)
    alone.run(use_wrongly, models["tied"], deadline_s=600)


@pytest.mark.parametrize("victim", ["scheduler", "server"])
def test_a_killed_engine_is_one_typed_error_and_the_next_starts(alone, models, victim):
    alone.run(lose_the_engine, models["tied"], victim, deadline_s=600)


def test_an_engine_that_fails_on_its_way_up_is_one_typed_error(alone, models):
    alone.run(fail_to_start, models["two heads"], deadline_s=600)


def fail_to_start(model):
    before = set(os.listdir("/dev/shm"))
    broken = write_tiny_model(model.parent / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_act": "swish-swish"}))
    with pytest.raises(BackendError, match=r"SGLang did not start with '.*', gen_tp_size=1, .*swish"):
        build(broken, ONE)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "sgl" in name]


def test_a_killed_rank_leaves_nothing_behind(models):
    with LocalRanks(1, timeout_s=300) as ranks:
        ((rank, pids, segments, directory),) = ranks.run(stop_and_tell, models["stopping"], deadline_s=600)
        assert segments and directory.is_dir() and len(pids) > 2
        os.kill(rank, signal.SIGKILL)
        assert_gone(pids, segments, directory)


def test_what_one_rank_cannot_start_no_rank_starts(two, models):
    two.run(refuse_on_rank_1, models["two heads"], deadline_s=600)


def refuse_on_rank_1(model):
    """Far within the groups' deadline."""
    is_second = dist.get_rank() == 1
    for wrong, reason in (
        ({"cache_bytes": 0}, "cache_bytes=0 must be a whole number of at least 1"),
        ({"engine_options": {"tp_size": 1}}, r"engine_options=.* would change tp_size"),
        ({"seed": "one"}, "seed='one'. Use a whole number"),
    ):
        with pytest.raises(BackendError, match=f"^{'' if is_second else 'rank 1 refused: '}{reason}"):
            build(model, TWO, **(wrong if is_second else {}))


def test_what_one_rank_cannot_hand_over_no_rank_does(two, models):
    two.run(hand_over_again, models["two heads"], deadline_s=600)


def hand_over_again(model):
    backend, rank = build(model, TWO), dist.get_rank()
    held = backend.weight_layout().boxes_of(rank)
    shards = {name: [torch.zeros(box.shape) for box in boxes] for name, boxes in held.items()}
    backend.begin_weights()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "memfd_create", lambda *_: refuse_memory())
        with pytest.raises(BackendError, match=r"^rank 1 refused: OSError: \[Errno 12\] Cannot allocate memory"):
            backend.load_shards(shards)
    backend.begin_weights()
    backend.load_shards(shards)
    backend.commit_weights(1)
    backend.close()


def refuse_memory():
    raise OSError(12, "Cannot allocate memory")
