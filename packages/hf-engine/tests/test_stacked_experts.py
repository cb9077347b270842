"""Mixtures of experts under the names in their files: from training into generation, planned and executed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_testing.storages import watch_storages
from engine_testing.traffic import count_traffic
from engine_testing.train_steps import check_greedy_samples, count_lacking_bytes, train_step
from hf_engine import (
    HybridEngine,
    SamplingParams,
    SupportsPadding,
    TrainConfig,
    load_rollout_backend,
    load_train_backend,
    plan_transition,
)
from hf_engine.models.conversions import read_file_names
from hf_engine.models.stacked_experts import FilePart, layout_in_files, stack_of, tensors_in_files
from hf_engine.resharding.layouts import fsdp_layout
from hf_engine.resharding.moving import storage_bytes
from hf_engine.resharding.transition import training_layout
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_prompts
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
FAMILIES = ("mixtral", "qwen3_moe")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)


def write(directory, family, num_experts=4, **config):
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    return write_tiny_model(directory, family=family, **HEADS, **{count: num_experts}, **config)


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def build_backend(backend, model, topology):
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    return load_train_backend(backend).build(model, topology=topology, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_and_contents_of_the_files(tmp_path, family):
    directory = write(tmp_path, family)
    model, files = load(directory), load_file(directory / "model.safetensors")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named = tensors_in_files(read_file_names(model), parameters)
    assert named.keys() == files.keys() == ModelShape.from_config(directory).parameters().keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in files.items())
    assert storage_bytes(named.values()) == storage_bytes(parameters.values())
    assert {name for name, _ in model.named_parameters()} != files.keys(), "transformers stacks experts no more"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_a_rank_holds_some_experts_whole(tmp_path, family, size):
    """Five over two ranks are 3 and 2, over three 2, 2 and 1, over four 2, 2, 1 and none."""
    directory = write(tmp_path, family, num_experts=5)
    model = load(directory)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layout = layout_in_files(read_file_names(model), fsdp_layout(shapes, range(size)))
    planned = training_layout(
        ModelShape.from_config(directory), Topology(ParallelSpec(dp_size=size)), "fsdp", dtype="float32"
    )
    assert dict(layout.shapes) == dict(planned.shapes)
    assert {rank: dict(layout.boxes_of(rank)) for rank in range(size)} == {
        rank: dict(planned.boxes_of(rank)) for rank in range(size)
    }
    per_rank = -(-5 // size)
    for rank in range(size):
        held = {int(name.split(".experts.")[1].split(".")[0]) for name in layout.boxes_of(rank) if ".experts." in name}
        assert held == {*range(5)[rank * per_rank : (rank + 1) * per_rank]}


def stacked_pair():
    parameter = torch.arange(12.0).view(2, 3, 2)
    names = {"down_proj": tuple(FilePart(f"experts.{expert}.w2.weight", expert, (0, 3)) for expert in range(2))}
    return parameter, tensors_in_files(names, {"down_proj": parameter})


def test_parts_of_one_tensor_stand_for_the_stack():
    own, views = stacked_pair()
    other, lent = stacked_pair()
    assert stack_of(own, views, lent).data_ptr() == other.data_ptr()
    assert stack_of(own, views, lent).shape == own.shape
    own.untyped_storage().resize_(0)
    assert stack_of(own, views, views) is own


def test_parts_that_lie_apart_are_not_a_stack():
    own, views = stacked_pair()
    first, second = views
    for given in (
        {first: views[first]},
        {first: views[first], second: views[second].clone()},
        {first: views[second], second: views[first]},
    ):
        with pytest.raises(ReshardError, match=r"w2.weight' shares its memory .* 2 matrices, of which [12] were given"):
            stack_of(own, views, given)


def move_and_generate(backend, model, topology, directory, bucket_bytes):
    """Two steps, each followed by a transition: greedy samples, bytes counted and live, the same weights after it."""
    train = build_backend(backend, model, topology)
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology, bucket_bytes=bucket_bytes)
    rank, found = dist.get_rank(), []
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    padding = train.padding() if isinstance(train, SupportsPadding) else ()
    everything = [*parts_of(train.local_weights()), *padding, *rollout.weight_buffers().values()]
    trained = storage_bytes([*parts_of(train.local_weights()), *padding])
    for index in range(2):
        train_step(train, topology, vocab_size=VOCAB_SIZE)
        before = [part.clone() for part in parts_of(train.local_weights())]
        seen = [storage_bytes(everything)]
        observe = watch_storages(lambda seen=seen: seen.append(storage_bytes(everything)))
        with observe, count_traffic() as traffic, engine.generation():
            responses = engine.generate(prompts, GREEDY)
            assert storage_bytes(everything) == engine.memory.generation_bytes, "the training shard lies inside it"
        assert max(seen) == engine.memory.peak_bytes
        assert traffic.matches(engine.plan.recv_bytes[rank]), traffic
        assert engine.plan.recv_bytes[rank] == count_lacking_bytes(engine.plan, rank)
        after = parts_of(train.local_weights())
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert storage_bytes(everything[: len(after) + len(padding)]) == trained
        train.export_hf(directory / str(index))
        check_greedy_samples(train, load(directory / str(index)), prompts, responses)
        weights, files = gather_weights(train, topology), load_file(directory / str(index) / "model.safetensors")
        assert weights.keys() == files.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in files.items())
        found.append((engine.plan.recv_bytes[rank], engine.plan.kept_bytes[rank]))
    engine.close()
    return found


def parts_of(weights):
    return [part for parts in weights.values() for part in (parts if isinstance(parts, list | tuple) else [parts])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2, "ep_size": 2}], ids=["tp 2", "ep 2"])
def test_megatron_trains_what_transformers_generates_with(ranks2, tmp_path, family, sizes):
    model, topology = write(tmp_path / "model", family), Topology(ParallelSpec(**sizes), GenerationSpec())
    results = ranks2.run(move_and_generate, "megatron", model, topology, tmp_path / "exports", 1 << 15)
    planned = plan_transition(ModelShape.from_config(model), topology, dtype_bytes=4)
    assert [rank[-1][0] for rank in results] == [planned.recv_bytes[rank] for rank in range(2)]


@pytest.mark.parametrize(
    ("family", "num_experts"), [("mixtral", 4), ("qwen3_moe", 4), ("mixtral", 5), ("qwen3_moe", 2)]
)
def test_executed_bytes_of_fsdp_are_the_planned(ranks3, tmp_path, family, num_experts):
    """Experts over three ranks: 2, 2 and none; 2, 2 and 1 with padding; 1, 1 and none."""
    model, topology = (
        write(tmp_path / "model", family, num_experts),
        Topology(ParallelSpec(dp_size=3), GenerationSpec()),
    )
    results = ranks3.run(move_and_generate, "fsdp", model, topology, tmp_path / "exports", 1 << 15)
    planned = plan_transition(ModelShape.from_config(model), topology, dtype_bytes=4, sharding="fsdp")
    for rank, found in enumerate(results):
        assert found == [(planned.recv_bytes[rank], planned.kept_bytes[rank])] * 2


@pytest.mark.parametrize("num_experts", [5, 8])
def test_uneven_experts_peak_a_bucket_or_storage_above_the_plan(ranks3, tmp_path, num_experts):
    """Also through many layers: ranks with fewer experts do not run ahead of the others."""
    model = write(tmp_path, "mixtral", num_experts, num_hidden_layers=9, intermediate_size=32)
    topology = Topology(ParallelSpec(dp_size=3), GenerationSpec())
    planned = plan_transition(ModelShape.from_config(model), topology, dtype_bytes=4, sharding="fsdp")
    for rank, (largest, peaks) in enumerate(ranks3.run(find_peaks, model, topology)):
        for bucket_bytes, peak in peaks.items():
            assert peak <= planned.peak_param_bytes[rank] + max(bucket_bytes, largest)


def find_peaks(model, topology):
    """The largest training storage, and the peak of a transition by the size of its buckets; see `move_and_generate`
    for what is measured.
    """
    train = build_backend("fsdp", model, topology)
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    largest, peaks = max(part.untyped_storage().nbytes() for part in train.local_weights().values()), {}
    for bucket_bytes in (1 << 10, 1 << 15, 1 << 18):
        rollout.resume()
        engine = HybridEngine(train, rollout, topology, bucket_bytes=bucket_bytes)
        peaks[bucket_bytes] = engine.memory.peak_bytes
    engine.close()
    return largest, peaks


@pytest.mark.parametrize(("family", "num_experts"), [("mixtral", 4), ("qwen3_moe", 1)])
def test_stacks_are_lent_on_one_rank(ranks1, tmp_path, family, num_experts):
    """Nothing is there twice, so the peak is the model."""
    model = write(tmp_path / "model", family, num_experts, num_experts_per_tok=1)
    topology = Topology(ParallelSpec(), GenerationSpec())
    (found,) = ranks1.run(lend, model, topology, tmp_path / "exports")
    assert found == (4 * ModelShape.from_config(model).num_parameters,) * 2


def lend(model, topology, directory):
    move_and_generate("fsdp", model, topology, directory, 1 << 12)
    train = build_backend("fsdp", model, topology)
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology)
    with engine.generation():
        lent = storage_bytes(rollout.weight_buffers().values())
    return engine.memory.peak_bytes, lent
