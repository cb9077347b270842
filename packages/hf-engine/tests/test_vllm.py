"""Real vLLM engines, in the environment of `make test-vllm`; without it only what needs no vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.process_groups import default_timeout
from hf_engine.testing import LocalRanks, check_rollout_backend, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_engine.testing._training import check_greedy_samples, count_lacking_bytes, train_step
from hf_protocols import (
    BackendError,
    BackendUnavailableError,
    BatchError,
    GenerationSpec,
    NonFiniteLossError,
    ParallelSpec,
    ReshardError,
    Topology,
)

VOCAB_SIZE, MAX_POSITIONS = 64, 48
CACHE_BYTES = 16 << 20
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)

with_vllm = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return {
        "tied": write_tiny_model(folder / "tied"),
        # More rows than a multiple of the padding, so that the last rank holds fewer.
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False, vocab_size=70, **heads),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", **heads),
        "qwen3": write_tiny_model(folder / "qwen3", family="qwen3", **heads),
        "mistral": write_tiny_model(folder / "mistral", family="mistral", tie_embeddings=False),
        # vLLM itself would count twice the positions.
        "scaled": write_tiny_model(folder / "scaled", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "stopping": write_tiny_model(folder / "stopping", eos_token_id=[7, 30]),
        "heads": write_tiny_model(folder / "heads", head_dim=48),
        "experts": write_tiny_model(folder / "experts", family="mixtral"),
        "derived": write_tiny_model(folder / "derived", family="qwen2", num_attention_heads=4),
        "two heads": write_tiny_model(folder / "first", num_key_value_heads=2),
        "two others": write_tiny_model(folder / "second", num_key_value_heads=2, seed=1),
    }


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[LocalRanks]:
    with LocalRanks(4, timeout_s=120) as ranks:
        yield ranks


def build(model, topology, **options):
    return load_rollout_backend("vllm").build(model, topology=topology, **{"cache_bytes": CACHE_BYTES, **options})


def reference_of(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def conform(model, topology, num_rows=6):
    backends = []

    def start():
        backends.append(build(model, topology))
        return backends[0]

    reference = reference_of(model)
    sizes = {"vocab_size": VOCAB_SIZE, "max_positions": MAX_POSITIONS, "num_rows": num_rows}
    check_rollout_backend(start, reference, topology=topology, **sizes)
    groups = dist.distributed_c10d._world.pg_map
    deadlines = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    assert len(groups) > 1 and deadlines == {default_timeout()}, "vLLM's groups wait no longer than the caller's"
    backends[0].close()


def train_and_generate(backend, topology, train_model, rollout_model, directory):
    """The engine starts from other weights than the training backend."""
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    train = load_train_backend(backend).build(train_model, topology=topology, config=config)
    rollout = build(rollout_model, topology)
    with pytest.raises(BackendError, match=r'VllmBackend keeps its weights itself: .*use training_weights="keep"'):
        HybridEngine(train, rollout, topology, training_weights="move")
    # A bound below the largest parameter: many groups.
    engine = HybridEngine(train, rollout, topology, bucket_bytes=8 << 10)
    memory, rank = engine.memory, dist.get_rank()
    assert memory.training == "kept" and memory.training_bytes == engine.plan.source.held_bytes(rank)
    assert memory.engine_bytes == engine.plan.target.held_bytes(rank) + CACHE_BYTES
    assert memory.released_bytes == CACHE_BYTES and rollout.engine_bytes == engine.plan.target.held_bytes(rank)
    assert memory.staging_bytes - rollout.staging_bytes <= 8 * (8 << 10)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    for index in range(3):
        if index != 1:
            train_step(train, topology, vocab_size=VOCAB_SIZE)
        with engine.generation():
            responses = engine.generate(prompts, GREEDY)
        transition = engine.last_transition
        assert transition.recv_bytes == (engine.plan.recv_bytes[rank] if index != 1 else 0)
        assert [len(row) for row in rows_of(responses["response_ids"])] == [6] * 4
        train.export_hf(Path(directory) / str(index))
        check_greedy_samples(train, reference_of(Path(directory) / str(index)), prompts, responses)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
    assert engine.weight_version == 2
    assert engine.plan.recv_bytes[rank] == count_lacking_bytes(engine.plan, rank)
    engine.close()
    return engine.plan.recv_bytes[rank]


def peak_of_updates(model):
    """By parameters per call: the most bytes that torch had allocated at once, beside a call's own tensors."""
    backend = build(model, Topology(ParallelSpec(), GenerationSpec()))
    parts = {name: box for name, (box,) in backend.weight_layout().boxes_of(0).items()}

    def update(size):
        backend.begin_weights()
        for start in range(0, len(parts), size):
            names = list(parts)[start : start + size]
            backend.load_shards({name: [torch.zeros(parts[name].shape)] for name in names})
        backend.commit_weights(1)

    found = {}
    for size in (1, 3, len(parts)):
        update(size)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            update(size)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        groups = [list(parts.values())[start : start + size] for start in range(0, len(parts), size)]
        given = 4 * max(sum(box.numel for box in group) for group in groups)
        found[size] = (max(live) - given, backend.staging_bytes)
    backend.close()
    return found


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_the_memory_of_an_update_is_stated(alone, models):
    """vLLM keeps the shards of a module until it is complete: a bound, and not an idle one."""
    (found,) = alone.run(peak_of_updates, models["tied"], deadline_s=200)
    assert all(0 < peak <= stated for peak, stated in found.values()), found
    assert found[1][0] > found[1][1] / 2, found


def refuse(models, directory):
    one = Topology(ParallelSpec(), GenerationSpec())
    with pytest.raises(BackendError, match="topology=None: give a Topology"):
        build(models["tied"], None)
    with pytest.raises(BackendError, match="it has 1 ranks, the topology 2"):
        build(models["tied"], Topology(ParallelSpec(dp_size=2), GenerationSpec()))
    with pytest.raises(BackendError, match=r"has head_dim=48; vLLM on a CPU runs \[32, 64, .* 'transformers'"):
        build(models["heads"], one)
    with pytest.raises(BackendError, match="has 4 experts; backend 'vllm' updates weights of dense models only"):
        build(models["experts"], one)
    with pytest.raises(BackendError, match=r"heads of \[16\], its config says 32: .* 'transformers'"):
        build(models["derived"], one)
    with pytest.raises(BackendError, match=r"vLLM finds no model in '.*absent'"):
        build(models["tied"] / "absent", one)
    (directory / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(BackendError, match=r"no known layout \(model_type='gpt2' .* 'transformers'"):
        build(directory, one)
    with pytest.raises(BackendError, match=r"48 positions needs 24576 bytes .* above cache_bytes=24575; raise it"):
        build(models["tied"], one, cache_bytes=24_575)
    # vLLM's blocks have more tokens than the model positions.
    with pytest.raises(BackendError, match=r"vLLM did not start .* cache_bytes=30000 \(raise it if .*: "):
        build(models["tied"], one, cache_bytes=30_000)
    with pytest.raises(BackendError, match=r"vLLM did not start with '.*activation', .*: .*swish"):
        build(change_config(models["tied"], "activation", hidden_act="swish-swish"), one)
    for entries in ({"num_attention_heads": 0}, {"vocab_size": "many"}, {"dtype": "float7"}, {"rope_scaling": 5}):
        odd = change_config(models["tied"], f"odd-{next(iter(entries))}", **entries)
        with pytest.raises(BackendError, match=r"vLLM finds no model in '.*odd.*', or cannot use its config.json: "):
            build(odd, one)
    with pytest.raises(BackendError, match="max_positions=49 is above the model's 48 positions; lower it"):
        build(models["tied"], one, max_positions=49)
    damaged = change_config(models["tied"], "damaged")
    (file,) = damaged.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(BackendError, match=r"no weights can be read from '.*damaged': model.safetensors cannot be"):
        build(damaged, one)
    lacking = change_config(models["tied"], "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=r"parameters differ, such as 'model.norm.weight', .* and is absent; give a"):
        build(lacking, one)


def change_config(model, name, **entries):
    """A copy of a model beside it."""
    copy = shutil.copytree(model, model.parent / name)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | entries))
    return copy


def refuse_stages(model):
    with pytest.raises(BackendError, match="gen_pp_size=2 is not supported; set it to 1 and raise gen_tp_size"):
        build(model, Topology(ParallelSpec(pp_size=2), GenerationSpec(gen_pp_size=2)))
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    uneven = write_tiny_model(model.parent / f"uneven-{dist.get_rank()}", **heads)
    with pytest.raises(ReshardError, match="3 heads do not share out over gen_tp_size=2 in generation"):
        build(uneven, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)))


def assert_environment(before):
    """What vLLM is told by the environment is gone when it is done."""
    names = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert not {name for name in names if name.startswith("VLLM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def count_threads(backend, prompts):
    """Threads while it generates, and afterwards, in a rank that trains with two and was not told OMP_NUM_THREADS."""
    from hf_engine.backends.vllm import _engine

    run, seen = _engine.run_requests, []
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(_engine, "run_requests", lambda *inputs: seen.append(torch.get_num_threads()) or run(*inputs))
        backend.generate(prompts, GREEDY)
    after = torch.get_num_threads()
    torch.set_num_threads(1)
    return seen[0], after


def use_wrongly(models):
    """After all refusals: the process still starts an engine, and only one."""
    topology = Topology(ParallelSpec())
    torch.manual_seed(3)
    random.seed(3)
    state = random.getstate()
    before = torch.get_num_threads(), torch.get_rng_state()
    environment = dict(os.environ)
    for wrong, message in (
        ({"max_positions": -1}, "max_positions=-1 must be a whole number of at least 1"),
        ({"cache_bytes": None, "cache_fraction": 2.0}, "cache_fraction=2.0: give a share of the memory"),
    ):
        with pytest.raises(BackendError, match=message):
            build(models["tied"], topology, **wrong)
        with pytest.raises(BackendError, match=message):
            load_rollout_backend("vllm").check_options(wrong)
    backend = build(models["stopping"], topology, seed=-1, max_positions=20, cache_bytes=None, cache_fraction=1e-4)
    held = backend.weight_layout().held_bytes(0)
    assert held < backend.engine_bytes <= held + 1e-4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[0] == 1
    assert_environment(environment)
    torch.set_num_threads(1)  # vLLM would leave a warning in its place
    with pytest.raises(BackendError, match="one vLLM engine at a time: close the other backend first"):
        build(models["tied"], topology)
    prompts = build_prompts(40, vocab_size=VOCAB_SIZE)
    assert count_threads(backend, prompts) == (1, 2)
    with pytest.raises(BackendError, match="above the model's 20 positions - max_new_tokens=16 = 4"):
        backend.generate(prompts, SamplingParams(max_new_tokens=16))
    result = backend.generate(prompts, SamplingParams(max_new_tokens=12, temperature=3.0, stop_token_ids=(11,)))
    for ids, reason in zip(rows_of(result["response_ids"]), result["finish_reason"].tolist(), strict=True):
        stops = [token for token in ids.tolist() if token in (7, 11, 30)]
        assert stops == ids.tolist()[-1:] if reason == 0 else not stops
    assert set(result["finish_reason"].tolist()) == {0, 1}
    assert_environment(environment)
    with pytest.raises(BackendError, match="call begin_weights first"):
        backend.load_shards({})
    weights = {name: [torch.full(shape, torch.nan)] for name, shape in backend.weight_layout().shapes.items()}
    backend.begin_weights()
    backend.load_shards(weights)
    backend.commit_weights(4)
    with pytest.raises(NonFiniteLossError, match="row 0 are not finite at weight version 4"):
        backend.generate(prompts, GREEDY)
    backend.release()
    with pytest.raises(BackendError, match="the KV cache was released; resume before generating"):
        backend.generate(prompts, GREEDY)
    backend.resume()
    prompts["prompt_ids"].values()[-1] = VOCAB_SIZE
    with pytest.raises(BatchError, match="row 39 of 'prompt_ids' holds the token id 64, the model's are 0 to 63"):
        backend.generate(prompts, GREEDY)
    with pytest.raises(BackendError, match=r"vLLM failed while it generated; close this backend, .*: IndexError"):
        backend._engine.run(prompts, GREEDY, [], None)
    prompts["prompt_ids"].values()[-1] = 3
    with pytest.raises(BackendError, match="vLLM was interrupted while it generated; close this backend, build anoth"):
        backend.generate(prompts, GREEDY)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="the engine was closed"):
        backend.generate(prompts, GREEDY)


def lose_a_rank(model, gen_tp_size):
    """The last rank is killed while all generate; a survivor keeps its training weights."""
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=gen_tp_size))
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    before = {name: shard.clone() for name, shard in train.local_weights().items()}
    backend = build(model, topology)
    if dist.get_rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    told = "vLLM failed while it generated; close this backend, build another: |generate lost another rank on rank 0: "
    with pytest.raises(BackendError, match=f"^({told})"):
        generate_without_end(backend)
    assert all(torch.equal(train.local_weights()[name], shard) for name, shard in before.items())
    raise AssertionError("the survivor holds its training weights")


def generate_without_end(backend):
    while True:
        backend.generate(build_prompts(32, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=40))


def find_unused_memory():
    """Names of all segments that no process has mapped; semaphores of multiprocessing end with this program."""
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended
            mapped |= {line.rpartition("/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line}
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")} - mapped


def wait_for_memory(before):
    """Another program may just have made a segment, and not mapped it yet."""
    stop = time.monotonic() + 20
    while left := find_unused_memory() - before:
        assert time.monotonic() < stop, f"left in shared memory: {sorted(left)}"
        time.sleep(0.5)


def samples_of(backend, model, topology):
    options = {"cache_bytes": CACHE_BYTES} if backend == "vllm" else {}
    rollout = load_rollout_backend(backend).build(model, topology=topology, **options)
    sampling = SamplingParams(max_new_tokens=8, n=3, temperature=1.3, top_p=0.9, top_k=20, seed=11, step=2)
    responses = rollout.generate(build_prompts(6, vocab_size=VOCAB_SIZE), sampling)
    rollout.close()
    return [row.tolist() for row in rows_of(responses["response_ids"])]


def ends_of(backend, model):
    """Finish reasons and lengths where only generation_config.json says what ends a response."""
    options = {"cache_bytes": CACHE_BYTES} if backend == "vllm" else {}
    rollout = load_rollout_backend(backend).build(model, topology=Topology(ParallelSpec(), GenerationSpec()), **options)
    sampling = SamplingParams(max_new_tokens=12, n=3, temperature=2.0)
    responses = rollout.generate(build_prompts(6, vocab_size=VOCAB_SIZE), sampling)
    rollout.close()
    return responses["finish_reason"].tolist(), [len(row) for row in rows_of(responses["response_ids"])]


def refuse_on_rank_1(model):
    """Far within the groups' deadline, and the next engines start."""
    rank, topology = dist.get_rank(), Topology(ParallelSpec(dp_size=2), GenerationSpec())
    told = "^one sequence of 48 positions" if rank else "^rank 1 refused: one sequence of 48 positions"
    with pytest.raises(BackendError, match=told):
        build(model, topology, cache_bytes=1 if rank else CACHE_BYTES)
    build(model, topology).close()


class TestEngines:
    pytestmark = with_vllm

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2", "qwen3", "mistral", "scaled"])
    def test_one_rank_conforms(self, alone, models, model):
        alone.run(conform, models[model], Topology(ParallelSpec(), GenerationSpec()), deadline_s=300)

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2"])
    def test_two_tensor_parallel_ranks_conform(self, two, models, model):
        """The tied model has one key-value head, which both ranks hold."""
        topology = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
        two.run(conform, models[model], topology, deadline_s=300)

    def test_two_replicas_conform(self, two, models):
        two.run(conform, models["tied"], Topology(ParallelSpec(dp_size=2), GenerationSpec()), deadline_s=300)

    def test_strided_replicas_conform(self, four, models):
        """The paper's grouping: vLLM would take the ranks 0, 1 and 2, 3."""
        topology = Topology(ParallelSpec(tp_size=4), GenerationSpec(gen_tp_size=2))
        assert topology.groups("gen_tp") == ((0, 2), (1, 3))
        four.run(conform, models["untied"], topology, 3, deadline_s=380)

    @pytest.mark.parametrize("gen_tp_size", [1, 2])
    @pytest.mark.parametrize("backend", ["fsdp", "megatron"])
    def test_generation_sees_the_trained_weights(self, two, models, tmp_path, backend, gen_tp_size):
        train = ParallelSpec(dp_size=2) if backend == "fsdp" else ParallelSpec(tp_size=2)
        topology = Topology(train, GenerationSpec(gen_tp_size=gen_tp_size))
        arguments = (backend, topology, models["two heads"], models["two others"], tmp_path)
        received = two.run(train_and_generate, *arguments, deadline_s=300)
        # Equal tensor-parallel layouts: the training shard is the generation shard.
        assert all(received) == (backend == "fsdp" or gen_tp_size == 1)

    def test_the_samples_are_those_of_other_backends(self, alone, models):
        topology = Topology(ParallelSpec(), GenerationSpec())
        (found,), (wanted,) = (
            alone.run(samples_of, name, models["untied"], topology) for name in ("vllm", "transformers")
        )
        assert found == wanted

    def test_a_response_ends_where_the_generation_config_says(self, alone, tmp_path):
        model = write_tiny_model(tmp_path / "model")
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9, 21, 40]}))
        (found,), (wanted,) = (alone.run(ends_of, name, model) for name in ("vllm", "transformers"))
        assert found == wanted
        assert {*found[0]} == {0, 1}

    def test_what_one_rank_cannot_start_no_rank_starts(self, two, models):
        two.run(refuse_on_rank_1, models["tied"], deadline_s=200)

    def test_a_rank_that_is_killed_while_it_generates_is_a_typed_error_on_the_others(self, models):
        before = find_unused_memory()
        with LocalRanks(2, timeout_s=20) as ranks:
            with pytest.raises(RuntimeError) as failed:
                ranks.run(lose_a_rank, models["tied"], 2, deadline_s=120)
            assert "the survivor holds its training weights" in str(failed.value)
            assert "the process of rank 1 died" in str(failed.value)
            topology = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
            ranks.run(samples_of, "vllm", models["tied"], topology, deadline_s=120)
        wait_for_memory(before)

    def test_what_cannot_run_is_refused_and_the_next_start_is_clean(self, alone, two, models, tmp_path):
        alone.run(refuse, models, tmp_path, deadline_s=300)
        alone.run(use_wrongly, models, deadline_s=300)
        two.run(refuse_stages, models["tied"], deadline_s=300)


without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@without_vllm
def test_a_missing_vllm_is_answered_with_the_line_that_installs_it():
    with pytest.raises(BackendUnavailableError, match=r'not installed: pip install "hf-engine\[vllm\]" .*env.sh vllm'):
        load_rollout_backend("vllm")


@without_vllm
def test_another_version_is_refused_with_the_line_that_installs_one(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "0.33.1")
    with pytest.raises(BackendError, match=r"supports vLLM >=0.32,<0.33 and vllm 0.33.1 is installed: pip install"):
        load_rollout_backend("vllm")
