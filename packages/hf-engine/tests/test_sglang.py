"""Real SGLang engines, in the environment of `make test-sglang`. A start takes up to a minute: tests share engines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine_testing.shared_engine import CACHE_BYTES, ENGINES, build, shared
from engine_testing.train_steps import check_greedy_samples, count_lacking_bytes, train_step
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.testing import LocalRanks, check_rollout_backend, write_tiny_family, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, HybridFlowError, ParallelSpec, ReshardError, Topology

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

VOCAB_SIZE, MAX_POSITIONS = 64, 48
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)
ONE = Topology(ParallelSpec(), GenerationSpec())
TWO = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return {
        # More rows than a multiple of the padding, so that the last rank holds fewer; heads divide evenly.
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False, vocab_size=70, **heads),
        "two heads": write_tiny_model(folder / "two heads", num_key_value_heads=2, seed=1),
        "tied": write_tiny_model(folder / "tied"),
        "qwen3": write_tiny_model(folder / "qwen3", family="qwen3", **heads),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", **heads),
        "mistral": write_tiny_model(folder / "mistral", family="mistral", tie_embeddings=False),
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


def conform(model, topology, **options):
    sizes = {"vocab_size": VOCAB_SIZE, "max_positions": MAX_POSITIONS, "topology": topology}
    check_rollout_backend(lambda: shared(model, topology), reference_of(model), **sizes, **options)


def compare_samples(model, topology):
    """Up to the last position of the model, and with a restricted draw."""
    ours = shared(model, topology)
    whole = Topology(ParallelSpec(dp_size=topology.world_size), GenerationSpec())
    theirs = load_rollout_backend("transformers").build(model, topology=whole)
    prompts = build_prompts(6, vocab_size=VOCAB_SIZE)
    longest = max(len(row) for row in rows_of(prompts["prompt_ids"]))
    for sampling in (
        SamplingParams(max_new_tokens=MAX_POSITIONS - longest, n=3, seed=11, step=2),
        SamplingParams(max_new_tokens=8, n=2, temperature=1.3, top_p=0.9, top_k=20),
        SamplingParams(max_new_tokens=8, min_new_tokens=5, stop_token_ids=tuple(range(32))),
        SamplingParams(max_new_tokens=1, n=4),
    ):
        found, wanted = ours.generate(prompts, sampling), theirs.generate(prompts, sampling)
        for name in ("response_ids", "rollout_logprobs"):
            for a, b in zip(rows_of(found[name]), rows_of(wanted[name]), strict=True):
                assert torch.allclose(a.double(), b.double(), rtol=0, atol=1e-4), (name, sampling)
        assert found["finish_reason"].tolist() == wanted["finish_reason"].tolist()


def commit_after_generating(model):
    """The scheduler puts the last batch away after its samples have reached us."""
    backend = shared(model, ONE)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    for version in range(100, 160):
        backend.generate(prompts, SamplingParams(max_new_tokens=2))
        backend.commit_weights(version)


def spend_while_idle(model):
    """Processor seconds that the engine's processes take in three seconds without a request."""
    processes = [psutil.Process(shared(model, ONE)._engine.pid)]
    processes += processes[0].children(recursive=True)
    before = sum(sum(each.cpu_times()[:2]) for each in processes)
    time.sleep(3)
    return sum(sum(each.cpu_times()[:2]) for each in processes) - before


def train_and_generate(backend, topology, train_model, rollout, directory):
    """The engine starts from other weights than the training backend."""
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    train = load_train_backend(backend).build(train_model, topology=topology, config=config)
    rollout = shared(rollout, topology)
    with pytest.raises(BackendError, match=r'SglangBackend keeps its weights itself: .*Use training_weights="keep"'):
        HybridEngine(train, rollout, topology, training_weights="move")
    # A bound below the largest parameter: many groups.
    engine = HybridEngine(train, rollout, topology, bucket_bytes=8 << 10)
    memory, rank = engine.memory, dist.get_rank()
    assert memory.training == "kept" and memory.training_bytes == engine.plan.source.held_bytes(rank)
    assert memory.engine_bytes == engine.plan.target.held_bytes(rank) + CACHE_BYTES
    assert memory.released_bytes == 0
    prompts, version = build_prompts(4, vocab_size=VOCAB_SIZE), rollout.weight_version
    for index in range(3):
        if index != 1:
            train_step(train, topology, vocab_size=VOCAB_SIZE)
        with engine.generation():
            responses = engine.generate(prompts, GREEDY)
        assert engine.last_transition.recv_bytes == (engine.plan.recv_bytes[rank] if index != 1 else 0)
        assert [len(row) for row in rows_of(responses["response_ids"])] == [6] * 4
        train.export_hf(Path(directory) / str(index))
        check_greedy_samples(train, reference_of(Path(directory) / str(index)), prompts, responses)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
        assert 0 < rollout._staging.num_bytes <= rollout.staging_bytes < memory.staging_bytes
    assert engine.weight_version == version + 2
    assert engine.plan.recv_bytes[rank] == count_lacking_bytes(engine.plan, rank)
    train.close()
    return engine.plan.recv_bytes[rank]


def refuse_on_two(model):
    with pytest.raises(BackendError, match=r"gen_pp_size=2 is not supported. Set it to 1 and raise gen_tp_size"):
        build(model, Topology(ParallelSpec(pp_size=2), GenerationSpec(gen_pp_size=2)))
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    uneven = write_tiny_model(model.parent / f"uneven-{dist.get_rank()}", **heads)
    with pytest.raises(ReshardError, match="3 heads do not divide evenly by gen_tp_size=2 in generation"):
        build(uneven, TWO)


def refuse_one_ranks_shard(model):
    """A rank whose shards are wrong, or that never sent one, is refused on both."""
    backend = shared(model, TWO)
    held = backend.weight_layout().boxes_of(dist.get_rank())
    shards = {name: [torch.zeros(box.shape) for box in boxes] for name, boxes in held.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    backend.begin_weights()
    wrong = shards[name] if dist.get_rank() == 0 else [torch.zeros(2, 2)]
    with pytest.raises(
        HybridFlowError, match=r"received tensors of rank 1 .* 'model.layers.0.mlp.up_proj.weight' has shapes"
    ):
        backend.load_shards({name: wrong})
    other = name if dist.get_rank() == 0 else "model.norm.weight"
    with pytest.raises(BackendError, match=r"of the replica \(0, 1\) the ranks \[1\] were given something else"):
        backend.load_shards({other: shards[other]})
    with pytest.raises(ReshardError, match=r"did not arrive. Load them before commit_weights"):
        backend.commit_weights(3)
    with pytest.raises(BackendError, match="begun and not committed"):
        backend.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)


def test_one_rank_conforms_and_draws_what_others_draw(alone, models):
    alone.run(conform, models["untied"], ONE, deadline_s=600)
    alone.run(compare_samples, models["untied"], ONE, deadline_s=200)


def test_an_engine_that_waits_leaves_the_processor_to_training(alone, models):
    alone.run(commit_after_generating, models["untied"], deadline_s=300)
    (seconds,) = alone.run(spend_while_idle, models["untied"], deadline_s=300)
    assert seconds < 1


@pytest.mark.parametrize("model", ["qwen2", "qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_other_families_conform(alone, models, model):
    alone.run(conform, models[model], ONE, deadline_s=600)


def test_generation_sees_the_trained_weights_on_one_rank(alone, models, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=3)
    alone.run(train_and_generate, "fsdp", ONE, other, models["tied"], tmp_path, deadline_s=600)


def test_a_family_that_the_engine_loads_follows_the_training(alone, tmp_path):
    """Granite's parameters are not known by name: SGLang's own loader places them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
    model, other = (write_tiny_family(tmp_path / f"seed {seed}", "granite", seed=seed, **sizes) for seed in (0, 3))
    alone.run(train_and_generate, "fsdp", ONE, other, model, tmp_path, deadline_s=600)


def test_a_window_that_is_left_out_bounds_the_positions(alone, tmp_path):
    model = write_tiny_model(tmp_path / "model", family="mistral", sliding_window=12)
    files, check = read_model_directory(model), load_rollout_backend("sglang").check_model
    check(files, on_cpu=True, options={"max_positions": 12})
    for options in (None, {"max_positions": 13}):
        with pytest.raises(BackendError, match="has sliding_window=12, which SGLang leaves out"):
            check(files, on_cpu=True, options=options)
    with pytest.raises(RuntimeError, match="has sliding_window=12, which SGLang leaves out"):
        alone.run(build, model, ONE, deadline_s=100)


def test_no_engine_is_asked_twice_to_free_its_cache(alone, models):
    alone.run(release_twice, models["tied"], deadline_s=400)


def release_twice(model):
    """As on a GPU, where SGLang's process ends when it is asked again."""
    backend, asked = shared(model, ONE), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(backend._engine, "call", lambda method, **_: asked.append(method))
        backend.resume()
        freed = [backend.release() for _ in range(2)]
        backend.resume()
    assert asked == ["flush", "release", "flush", "resume"] and freed[0] == freed[1] > 0


def test_a_response_ends_where_the_generation_config_says(alone, tmp_path):
    """And nowhere else: SGLang would end at config.json's token too."""
    model = write_tiny_model(tmp_path / "model", eos_token_id=7)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9, 99]}))
    (found,), (wanted,) = (alone.run(ends_of, name, model, deadline_s=600) for name in ("sglang", "transformers"))
    assert found == wanted
    rows, reasons = found
    assert any(7 in row[:-1] for row in rows)
    assert {row[-1] for row, reason in zip(rows, reasons, strict=True) if reason == 0} == {3, 9}


def ends_of(backend, model):
    while ENGINES:
        ENGINES.popitem()[1].close()
    rollout = build(model, ONE) if backend == "sglang" else load_rollout_backend(backend).build(model, topology=ONE)
    sampling = SamplingParams(max_new_tokens=12, n=4, temperature=2.0)
    responses = rollout.generate(build_prompts(12, vocab_size=VOCAB_SIZE), sampling)
    rollout.close()
    return [row.tolist() for row in rows_of(responses["response_ids"])], responses["finish_reason"].tolist()


def test_two_tensor_parallel_ranks_conform(two, models):
    """The tied model has one key-value head, which both ranks hold."""
    two.run(refuse_on_two, models["tied"])
    two.run(conform, models["tied"], TWO, deadline_s=800)
    two.run(compare_samples, models["tied"], TWO, deadline_s=300)
    two.run(refuse_one_ranks_shard, models["tied"], deadline_s=300)


def test_strided_replicas_conform(models):
    """The paper's grouping, and two engines side by side."""
    topology = Topology(ParallelSpec(tp_size=4), GenerationSpec(gen_tp_size=2))
    assert topology.groups("gen_tp") == ((0, 2), (1, 3))
    with LocalRanks(4, timeout_s=500) as ranks:
        ranks.run(conform_once, models["untied"], topology, deadline_s=850)


def conform_once(model, topology):
    conform(model, topology, num_rows=3)
    ENGINES.popitem()[1].close()


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_generation_sees_the_trained_weights_on_two_ranks(two, models, tmp_path, backend):
    other = write_tiny_model(tmp_path / "other", num_key_value_heads=2, seed=3)
    train = ParallelSpec(dp_size=2) if backend == "fsdp" else ParallelSpec(tp_size=2)
    topology = Topology(train, GenerationSpec(gen_tp_size=2))
    received = two.run(train_and_generate, backend, topology, other, models["two heads"], tmp_path, deadline_s=800)
    # Equal tensor-parallel layouts: the training shard is the generation shard.
    assert all(received) == (backend == "fsdp")
