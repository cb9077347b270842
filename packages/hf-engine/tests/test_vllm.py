"""Real vLLM engines, in the environment of `make test-vllm`."""

from __future__ import annotations

import json
import os
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
from transformers import AutoModelForCausalLM

from engine_testing.engine_families import write_engine_family
from engine_testing.train_steps import check_greedy_samples, count_lacking_bytes, follow_the_training, train_step
from hf_engine import HybridEngine, LoraConfig, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.process_groups import default_timeout
from hf_engine.rollout.engine_rules import check_vllm_runs
from hf_engine.testing import TINY_FAMILIES, LocalRanks, check_rollout_backend, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, ModelShape, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
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
        "mixtral": write_tiny_model(folder / "mixtral", family="mixtral"),
        "qwen3_moe": write_tiny_model(folder / "qwen3_moe", family="qwen3_moe"),
        "scaled": write_tiny_model(folder / "scaled", rope_scaling={"rope_type": "linear", "factor": 2.0}),
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
    # vLLM counts what stretches the context, as hf_protocols does.
    max_positions = ModelShape.from_config(model).max_positions
    sizes = {"vocab_size": VOCAB_SIZE, "max_positions": max_positions, "num_rows": num_rows}
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
    with pytest.raises(BackendError, match=r'VllmBackend keeps its weights itself: .*Use training_weights="keep"'):
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
    """By parameters per call: the most bytes that torch had allocated at once, without a call's own tensors."""
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
@pytest.mark.parametrize("model", ["tied", "mixtral"])
def test_the_memory_of_an_update_is_stated(alone, models, model):
    """vLLM keeps the shards of a module until it is complete: a bound, and not an idle one."""
    (found,) = alone.run(peak_of_updates, models[model], deadline_s=200)
    assert all(0 < peak <= stated for peak, stated in found.values()), found
    assert found[1][0] > found[1][1] / 2, found


def lose_a_rank(model, gen_tp_size):
    """The last rank is killed while all generate."""
    backend = build(model, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=gen_tp_size)))
    if dist.get_rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    generate_without_end(backend)


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


class TestEngines:
    pytestmark = with_vllm

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2", "qwen3", "mistral", "scaled", "qwen3_moe"])
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

    def test_a_rank_that_is_killed_while_it_generates_leaves_nothing(self, models):
        before = find_unused_memory()
        with LocalRanks(2, timeout_s=20) as ranks:
            with pytest.raises(RuntimeError) as failed:
                ranks.run(lose_a_rank, models["tied"], 2, deadline_s=120)
            assert "the process of rank 1 died" in str(failed.value)
            topology = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
            ranks.run(samples_of, "vllm", models["tied"], topology, deadline_s=120)
        wait_for_memory(before)


FAMILIES = {"granite": 1, "phi3": 2, "gemma2": 1, "mixtral": 2, "glm4_moe": 1}
"""gen_tp_size of families; of those whose parameters are not known by name vLLM's own loaders cut whole ones."""
MORE_FAMILIES = [pytest.param(family, marks=pytest.mark.slow) for family in TINY_FAMILIES if family not in FAMILIES]
"""`make test-families` runs these, and skips what vLLM does not run."""


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_a_family_that_the_engine_loads_follows_the_training(alone, two, tmp_path, family):
    model = write_engine_family(tmp_path / "model", family)
    refusal = None
    try:
        check_vllm_runs(read_model_directory(model), on_cpu=True)
    except BackendError as error:
        refusal = str(error)
    assert refusal is None or family not in FAMILIES, refusal
    if refusal is not None:
        pytest.skip(refusal)
    ranks = two if FAMILIES.get(family) == 2 else alone
    ranks.run(train_and_follow, model, tmp_path / "export", deadline_s=300)


def update_kept_experts(model):
    """Without what sends to the reload the parameters that vLLM's loader of gpt-oss copies itself."""
    backend = build(model, Topology(ParallelSpec(), GenerationSpec()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_engine.rollout.vllm._families._DIRECT", {})
        backend.begin_weights()
    backend.load_shards({name: [torch.zeros(shape)] for name, shape in backend.weight_layout().shapes.items()})
    with pytest.raises(ReshardError, match=r"^vLLM's parameters .*mlp.experts.* were not loaded: .* in an update$"):
        backend.commit_weights(1)
    backend.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_update_that_vllm_passes_over_is_an_error(alone, tmp_path):
    alone.run(update_kept_experts, write_engine_family(tmp_path, "gpt_oss"), deadline_s=300)


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", ["alone", "two"])
def test_merged_adapters_reach_the_engine(request, models, tmp_path, ranks):
    given = (models["untied"], tmp_path / "export", LoraConfig(rank=4))
    request.getfixturevalue(ranks).run(train_and_follow, *given, deadline_s=300)


def train_and_follow(model, directory, lora=None):
    size = dist.get_world_size()
    topology = Topology(ParallelSpec(dp_size=size), GenerationSpec(gen_tp_size=size))
    follow_the_training(build(model, topology), model, directory, topology, vocab_size=VOCAB_SIZE, lora=lora)
