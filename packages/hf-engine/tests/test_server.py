"""Real servers of SGLang and vLLM on this machine, in the environments of `make test-sglang` and `make test-vllm`."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine_testing.local_server import LocalServer
from engine_testing.train_steps import check_greedy_samples, train_step
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.rollout.sglang._session import find_segments
from hf_engine.testing import LocalRanks, check_rollout_backend, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

pytestmark = pytest.mark.timeout(600)

VOCAB_SIZE = 64
MAX_POSITIONS = {"sglang": 42, "vllm": 48}
"""SGLang keeps six of the model's positions to itself."""
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)
ONE = Topology(ParallelSpec(), GenerationSpec())
TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec())
ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sglang", "vllm")]


@dataclass(frozen=True)
class Started:
    """A server, and what its engine's name is."""

    engine: str
    server: LocalServer
    model: Path


@pytest.fixture(scope="session", params=ENGINES)
def started(request, tmp_path_factory) -> Iterator[Started]:
    # On a CPU vLLM forgets to update an output layer that is the embedding.
    tied = {"num_key_value_heads": 2, "tie_embeddings": request.param == "sglang"}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), **tied)
    with LocalServer(request.param, model) as server:
        yield Started(request.param, server, model)


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=120) as ranks:
        yield ranks


def build(model, url, topology=ONE, **options):
    return load_rollout_backend("server").build(model, topology=topology, urls=[url], timeout_s=100, **options)


def send(backend, model, version):
    """The model's own weights, in one update."""
    full = {name: parameter.detach() for name, parameter in reference_of(model).named_parameters()}
    held = backend.weight_layout().boxes_of(dist.get_rank())
    backend.begin_weights()
    backend.load_shards({name: [full[name]] for name in held})
    backend.commit_weights(version)


def reference_of(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def conform(model, url, max_positions):
    backends = []

    def start():
        backends.append(build(model, url))
        send(backends[0], model, 3)
        return backends[0]

    check_rollout_backend(start, reference_of(model), vocab_size=VOCAB_SIZE, max_positions=max_positions, topology=ONE)
    backends[0].close()


def train_and_generate(model, url, directory):
    """Two ranks that ask one server; it starts from other weights than those that are trained."""
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    train = load_train_backend("fsdp").build(model, topology=TWO, config=config)
    rollout = build(model, url, TWO, weights_directory=directory / "weights")
    engine = HybridEngine(train, rollout, TWO, bucket_bytes=8 << 10)
    rank = dist.get_rank()
    assert engine.memory.released_bytes == 0 and (engine.memory.engine_bytes > 0) == (rank == 0)
    held = [sum(box.numel for (box,) in rollout.weight_layout().boxes_of(r).values()) for r in range(2)]
    assert sum(held) == sum(parameter.numel() for parameter in reference_of(model).parameters())
    assert max(held) < 0.6 * sum(held)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    for index in range(3):
        if index != 1:
            train_step(train, TWO, vocab_size=VOCAB_SIZE)
        with engine.generation():
            responses = engine.generate(prompts, GREEDY)
        assert engine.last_transition.recv_bytes == (engine.plan.recv_bytes[rank] if index != 1 else 0)
        assert [len(row) for row in rows_of(responses["response_ids"])] == [6] * 4
        train.export_hf(directory / str(index))
        check_greedy_samples(train, reference_of(directory / str(index)), prompts, responses)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
    assert len(list((directory / "weights").glob("*/*"))) == 1, "an update's folder outlived the next one"
    dist.barrier()
    engine.close()
    dist.barrier()
    assert not list((directory / "weights").iterdir())


def refuse_tied(url, folder):
    with pytest.raises(BackendError, match=r"has tie_word_embeddings: there vLLM's output layer would keep the old"):
        build(write_tiny_model(folder / "tied", num_key_value_heads=2), url)
    experts = write_tiny_model(folder / "experts", family="mixtral", tie_embeddings=False)
    config = json.loads((experts / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (experts / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackendError, match=r"experts of model_type='mixtral' would be wrong without an error on its"):
        build(experts, url)


def refuse(model, url, folder):
    with pytest.raises(BackendError, match=r"has 1 ranks, the topology 2"):
        build(model, url, TWO)
    with pytest.raises(BackendError, match=r"absent': no such directory"):
        build(model / "absent", url)
    with pytest.raises(BackendError, match=r"has another vocabulary than '.*', of 70 tokens. Start it with the model"):
        build(write_tiny_model(folder / "larger", vocab_size=70), url)
    with pytest.raises(BackendError, match=r"has another vocabulary than '.*', of 60 tokens"):
        build(write_tiny_model(folder / "smaller", vocab_size=60), url)
    with pytest.raises(
        BackendError, match=r"has a LlamaForCausalLM, '.*' is a Qwen3ForCausalLM. Start it with the mod"
    ):
        build(write_tiny_model(folder / "other", family="qwen3"), url)
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(BackendError, match=r"has a LlamaForCausalLM, '.*' is a GPT2LMHeadModel"):
        build(folder / "gpt2", url)
    with pytest.raises(BackendError, match=r"api_key_variable='NO_SUCH_KEY': this environment variable is not set"):
        build(model, url, api_key_variable="NO_SUCH_KEY")


def use_wrongly(engine, model, url):
    backend, prompts = build(model, url), build_prompts(4, vocab_size=VOCAB_SIZE)
    with pytest.raises(BackendError, match="Call begin_weights first"):
        backend.load_shards({})
    refused = {"sglang": {"min_new_tokens": 2}, "vllm": {"temperature": 0.7}}[engine]
    with pytest.raises(BackendError, match=r"sampling=None. Use SamplingParams"):
        backend.generate(build_prompts(2, vocab_size=VOCAB_SIZE), None)
    with pytest.raises(BackendError, match=rf"cannot generate with .*: .*{next(iter(refused))}"):
        backend.generate(prompts, SamplingParams(max_new_tokens=4, **refused))
    send(backend, model, 4)
    assert backend.generate(prompts, GREEDY)["weight_version"].tolist() == [4] * 4
    other = build(model, url)
    assert other.weight_version == 0
    other.generate(prompts, GREEDY)
    send(other, model, 1)
    with pytest.raises(
        BackendError, match=r"from weights that it calls .*, not '.*': it was started again, or somebody"
    ):
        backend.generate(prompts, GREEDY)
    with pytest.raises(BackendError, match=r"did not finish /.* in 0.001 s. Raise rollout.options.timeout_s"):
        replace_timeout(other, 0.001).generate(prompts, replace(GREEDY, max_new_tokens=35))
    other.close()
    backend.close()


def replace_timeout(backend, timeout_s):
    backend._server._connection._timeout_s = timeout_s
    return backend


def lose_the_server(model, url, pid):
    """Killed with all of its processes while it generates."""
    backend = build(model, url, restart_timeout_s=1.0)
    threading.Timer(0.3, os.killpg, (pid, signal.SIGKILL)).start()
    with pytest.raises(BackendError, match=r"(hung up in /\S+ |nothing answers at ).*restart_timeout_s = 1$"):
        generate_without_end(backend)
    wait_until_nobody_listens(url)
    with pytest.raises(BackendError, match=r"nothing answers at http://127.0.0.1:\d+ .*. Start the server there"):
        backend.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
    with pytest.raises(BackendError, match="nothing answers at"):
        send(backend, model, 5)
    with pytest.raises(BackendError, match="begun and not committed"):
        backend.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
    with pytest.raises(BackendError, match="nothing answers at"):
        build(model, url)
    backend.close()


def wait_until_nobody_listens(url):
    """Its processes end one after the other, and the last one holds the socket."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    stop = time.monotonic() + 30
    while time.monotonic() < stop:
        try:
            socket.create_connection(address, timeout=5).close()
        except ConnectionRefusedError:
            return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} is still listened at")


def generate_without_end(backend):
    while True:
        backend.generate(build_prompts(64, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=35))


def test_a_server_conforms(alone, started):
    alone.run(conform, started.model, started.server.url, MAX_POSITIONS[started.engine], deadline_s=300)


def test_generation_sees_the_trained_weights(two, started, tmp_path):
    tied = {"num_key_value_heads": 2, "tie_embeddings": started.engine == "sglang"}
    other = write_tiny_model(tmp_path / "other", seed=3, **tied)
    two.run(train_and_generate, other, started.server.url, tmp_path, deadline_s=300)


def test_what_does_not_fit_is_refused(alone, started, tmp_path):
    alone.run(refuse, started.model, started.server.url, tmp_path, deadline_s=200)
    if started.engine == "vllm":
        alone.run(refuse_tied, started.server.url, tmp_path)
    alone.run(use_wrongly, started.engine, started.model, started.server.url, deadline_s=200)


def outlive_the_server(model, trained, url, pid):
    """It is killed after an update, and started again with the weights that it had before."""
    backend = build(model, url, restart_timeout_s=390.0)
    send(backend, trained, 2)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    before = backend.generate(prompts, GREEDY)
    os.killpg(pid, signal.SIGKILL)
    after = backend.generate(prompts, GREEDY)
    assert [row.tolist() for row in rows_of(after["response_ids"])] == [
        row.tolist() for row in rows_of(before["response_ids"])
    ]
    assert after["weight_version"].tolist() == [2] * 4
    backend.close()


def start_again(server):
    server.wait()
    server.close()
    server.__enter__()


def test_a_restarted_server_goes_on_with_the_last_weights(alone, started, tmp_path):
    server, tied = started.server, {"num_key_value_heads": 2, "tie_embeddings": started.engine == "sglang"}
    trained = write_tiny_model(tmp_path / "trained", seed=5, **tied)
    starting = threading.Thread(target=start_again, args=[server])
    starting.start()
    try:
        alone.run(outlive_the_server, started.model, trained, server.url, server.pid, deadline_s=480)
    finally:
        starting.join()


def test_a_killed_server_is_one_typed_error(alone, started):
    """Last: the session's server is gone afterwards, and so is its shared memory."""
    segments = find_segments(started.server.pid)
    assert segments
    alone.run(lose_the_server, started.model, started.server.url, started.server.pid, deadline_s=200)
    started.server.close()
    assert not [path for path in segments if Path(path).exists()]
