from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine_testing.packed_engine import PackedEngine
from engine_testing.storages import watch_storages
from engine_testing.traffic import count_traffic
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.moving import storage_bytes
from hf_engine.resharding.steps import CHECKSUM_BYTES
from hf_engine.rollout.transformers import TransformersBackend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, greedy_response, rows_of, select_rows
from hf_engine.training import offload
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)


def build_engine(train_model, rollout_model, **options):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    train = load_train_backend("fsdp").build(
        train_model, topology=topology, config=TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    )
    rollout = load_rollout_backend("transformers").build(rollout_model, topology=topology)
    return train, rollout, HybridEngine(train, rollout, topology, **options)


def step(train):
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    rows = range(dist.get_rank(), 6, dist.get_world_size())

    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    train.train_step(select_rows(batch, rows), loss, 18.0)


def generate_between_steps(train_model, rollout_model, directory, training_weights):
    """The rollout starts from other weights than the training backend."""
    train, rollout, engine = build_engine(train_model, rollout_model, training_weights=training_weights)
    prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
    with pytest.raises(BackendError, match="inside `with engine"):
        engine.generate(prompts, GREEDY)
    assert engine.last_transition is None
    transitions = []
    for index in range(4):
        if index != 2:
            step(train)
        with engine.generation():
            responses = engine.generate(prompts, GREEDY)
        train.export_hf(Path(directory) / str(index))
        transitions.append(engine.last_transition)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
        exported = AutoModelForCausalLM.from_pretrained(Path(directory) / str(index), dtype=torch.float32).eval()
        for prompt, found in zip(rows_of(prompts["prompt_ids"]), rows_of(responses["response_ids"]), strict=True):
            assert torch.equal(found, greedy_response(exported, prompt, 6, frozenset()))
        if training_weights == "keep":
            for name, parameter in exported.named_parameters():
                assert torch.equal(rollout.weight_buffers()[name], parameter), name
    train.load_hf(rollout_model)
    with engine.generation():
        transitions.append(engine.last_transition)
    planned = engine.plan.recv_bytes[dist.get_rank()]
    engine.close()
    return transitions, planned


@pytest.mark.parametrize("training_weights", ["move", "keep"])
def test_generation_sees_the_trained_weights(ranks2, tmp_path, training_weights):
    models = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    results = ranks2.run(generate_between_steps, *models, tmp_path / "exports", training_weights)
    for transitions, planned in results:
        assert [t.weight_version for t in transitions] == [1, 2, 2, 3, 4]
        moved = [t.recv_bytes for t in transitions]
        assert moved == [planned, planned, planned if training_weights == "move" else 0, planned, planned]
        assert all((t.seconds > 0) == (t.recv_bytes > 0) for t in transitions)
    total = sum(planned for _, planned in results)
    assert total == (VOCAB_SIZE * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 128) + 64) * 4


def share_a_rollout_backend(first, second):
    """Greedy responses of two engines with one rollout backend, in turns, and what plain generation gives of each."""
    topology, prompts = Topology(ParallelSpec(), GenerationSpec()), build_prompts(2, vocab_size=VOCAB_SIZE)
    rollout = load_rollout_backend("transformers").build(first, topology=topology)
    trains = [
        load_train_backend("fsdp").build(each, topology=topology, config=TrainConfig(learning_rate=1e-2))
        for each in (first, second)
    ]
    engines = [HybridEngine(train, rollout, topology, training_weights="keep") for train in trains]
    found, moved = [], []
    for number in (0, 1, 1, 0):
        with engines[number].generation():
            responses = engines[number].generate(prompts, GREEDY)
        found.append([row.tolist() for row in rows_of(responses["response_ids"])])
        moved.append(engines[number].last_transition.seconds > 0)
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (first, second)]
    plain = [
        [greedy_response(model, prompt, 6, frozenset()).tolist() for prompt in rows_of(prompts["prompt_ids"])]
        for model in models
    ]
    return found, plain, moved


def test_engines_that_share_a_rollout_backend_take_turns(ranks1, tmp_path):
    models = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    ((found, (first, second), moved),) = ranks1.run(share_a_rollout_backend, *models)
    assert first != second
    assert found == [first, second, second, first]
    assert moved == [True, True, False, True]


def count_calls_between_steps(model, options, is_streamed):
    """Calls of torch.distributed on the way into generation and out of it: after a step, and without a change."""
    train, rollout, engine = build_engine(model, model, **options)
    if is_streamed:
        topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
        engine = HybridEngine(train, PackedEngine(rollout), topology, **options)
    counted = []
    for changes in (True, False):
        if changes:
            step(train)
        block = engine.generation()
        for way in (block.__enter__, lambda: block.__exit__(None, None, None)):  # noqa: B023
            with count_traffic() as traffic:
                way()
            counted.append(dict(traffic.calls))
    engine.close()
    return counted


MESSAGES = {"send": 1, "recv_": 1}


@pytest.mark.parametrize(
    ("options", "is_streamed", "reductions", "moves_again"),
    [
        ({}, False, 1, True),
        ({"training_weights": "keep"}, False, 1, False),
        ({"verify_transfers": True}, False, 2, True),
        ({"training_weights": "keep"}, True, 1, False),
    ],
)
def test_an_entry_has_one_agreement_and_an_exit_none(ranks2, tmp_path, options, is_streamed, reductions, moves_again):
    """Small weights take one message per peer. Ranks agree on what arrived only where transfers are verified."""
    for found in ranks2.run(count_calls_between_steps, write_tiny_model(tmp_path), options, is_streamed):
        entry, leave, again, leave_again = found
        # Samples of an engine that nobody can read are asked for, until some were checked.
        assert leave == leave_again == ({"allgather_": 2} if is_streamed else {})
        assert entry == MESSAGES | {"allreduce_": reductions}
        assert again == (entry if moves_again else {"allreduce_": 1})


def count_calls_of_groups(model):
    """Of an entry that hands a model over in many groups of shards."""
    train, rollout, _ = build_engine(model, model, training_weights="keep")
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    engine = HybridEngine(train, PackedEngine(rollout), topology, bucket_bytes=1 << 14)
    step(train)
    with count_traffic() as traffic:
        block = engine.generation()
        block.__enter__()
    block.__exit__(None, None, None)
    return traffic.calls["allreduce_"], traffic.calls["send"]


def test_groups_of_shards_need_no_agreements_of_their_own(ranks2, tmp_path):
    for agreements, messages in ranks2.run(count_calls_of_groups, write_tiny_model(tmp_path)):
        assert agreements == 1
        assert messages > 5


def list_versions(model):
    """Of the sampler and the engine: in two blocks without a change between them, and in one after a step."""
    train, rollout, engine = build_engine(model, model)
    found = []
    for changes in (False, False, True):
        if changes:
            step(train)
        with engine.generation():
            found.append((rollout.weight_version, engine.weight_version))
    return found


def test_the_version_counts_changes_only(ranks1, tmp_path):
    assert ranks1.run(list_versions, write_tiny_model(tmp_path)) == [[(0, 0), (0, 0), (1, 1)]]


def set_versions(model, training_weights):
    """Versions of the samples, before and after a saved version is set, and of a lower one."""
    _, _, engine = build_engine(model, model, training_weights=training_weights)
    for wrong in ("7", None, 7.0, True, -1, 2**31 - 1):
        with pytest.raises(BackendError, match=r"^(weight_)?version=.* must be "):
            engine.weight_version = wrong
    prompts, found = build_prompts(2, vocab_size=VOCAB_SIZE), []
    for version in (0, 7, 3):
        engine.weight_version = version
        with engine.generation():
            found += set(engine.generate(prompts, GREEDY)["weight_version"].tolist())
    return found, engine.weight_version, engine.last_transition.weight_version


@pytest.mark.parametrize("training_weights", ["move", "keep"])
def test_samples_carry_the_version_that_was_set(ranks2, tmp_path, training_weights):
    found = ranks2.run(set_versions, write_tiny_model(tmp_path), training_weights)
    assert found == [([0, 7, 7], 7, 7)] * 2


def bits(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def hold_one_copy(model, bucket_bytes):
    """Live bytes are read off storages whenever one of them changes, there and back: the stated peak is the measured.

    Everybody's generation shard is the whole model, so there is room for every parameter twice: a bucket more at most.
    """
    train, rollout, engine = build_engine(model, model, bucket_bytes=bucket_bytes)
    memory, rank, views = engine.memory, dist.get_rank(), train.local_weights().values()

    def live():
        return storage_bytes([*views, *rollout.weight_buffers().values()])

    step(train)
    before, shard = bits(train.local_weights()), storage_bytes(train.local_weights().values())
    assert live() == shard == engine.plan.source.held_bytes(rank)
    seen = []
    with watch_storages(lambda: seen.append(live())), count_traffic() as traffic, engine.generation():
        inside = live()
        assert storage_bytes(views) == 0
        engine.generate(build_prompts(4, vocab_size=VOCAB_SIZE), GREEDY)
    after = train.local_weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert live() == shard
    assert memory.training == "moved"
    assert memory.training_bytes == memory.host_bytes == 0
    assert inside == memory.generation_bytes == engine.plan.target.held_bytes(rank)
    assert max([*seen, inside]) == memory.peak_bytes <= memory.generation_bytes + bucket_bytes, (max(seen), memory)
    assert traffic.matches(engine.plan.recv_bytes[rank])
    step(train)
    engine.close()
    return traffic.num_messages


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
def test_a_rank_holds_its_generation_shard_and_nothing_else(ranks2, tmp_path, bucket_bytes):
    model = write_tiny_model(tmp_path)
    steps = ranks2.run(hold_one_copy, model, bucket_bytes)
    assert steps[0] == steps[1]
    assert steps[0] > 5 if bucket_bytes == 1 << 14 else steps[0] < 5


def lend_equal_shards(model, bucket_bytes):
    """Checks that nothing is copied where both layouts are equal: no parameter is ever there twice."""
    train, rollout, engine = build_engine(model, model, bucket_bytes=bucket_bytes)
    memory, views, own = engine.memory, train.local_weights().values(), rollout.weight_buffers().values()
    batch, prompts = build_batch(4, vocab_size=VOCAB_SIZE), build_prompts(4, vocab_size=VOCAB_SIZE)

    def live():
        return storage_bytes([*views, *own, *rollout.weight_buffers().values()])

    for _ in range(2):
        step(train)
        before, scored = bits(train.local_weights()), train.compute_logprobs(batch)["logprobs"].values()
        seen = [live()]
        with watch_storages(lambda seen=seen: seen.append(live())), engine.generation():
            seen.append(live())
            assert all(torch.equal(found, before[name]) for name, found in rollout.weight_buffers().items())
            responses = engine.generate(prompts, GREEDY)
            for refused in (lambda: train.compute_logprobs(batch), lambda: step(train), train.local_weights):
                with pytest.raises(BackendError, match=r"Leave generation\(\) first"):
                    refused()
            for method in ("release", "close"):
                with pytest.raises(BackendError, match="would lose the training weights"):
                    getattr(rollout, method)()
        assert max(seen) == memory.peak_bytes <= memory.generation_bytes + bucket_bytes, (max(seen), memory)
        assert responses["weight_version"].tolist() == [engine.weight_version] * 4
        assert storage_bytes(rollout.weight_buffers().values()) == 0
        assert live() == storage_bytes(views) == engine.plan.source.held_bytes(0)
        assert all(torch.equal(found, before[name]) for name, found in train.local_weights().items())
        assert torch.equal(train.compute_logprobs(batch)["logprobs"].values(), scored)
    engine.close()
    return memory.training, memory.training_bytes, memory.host_bytes


def test_equal_shards_are_lent_and_never_there_twice(ranks1, tmp_path):
    """The embedding is four times as large as a bucket."""
    assert ranks1.run(lend_equal_shards, write_tiny_model(tmp_path), 1 << 12) == [("moved", 0, 0)]


def use_moved_weights(model, backend, directory):
    """Everything that needs the weights is refused while they are moved, and works again afterwards."""
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    config = TrainConfig(learning_rate=3e-2)
    train = load_train_backend(backend).build(model, topology=topology, config=config)
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology, training_weights="move")
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    train.save_state(directory / "before")
    expected = train.compute_logprobs(batch)["logprobs"].values()
    calls = {
        "scoring": lambda: train.compute_logprobs(batch),
        "train_step": lambda: step(train),
        "local_weights": train.local_weights,
        "export_hf": lambda: train.export_hf(directory / "inside"),
        "load_hf": lambda: train.load_hf(model),
        "save_state": lambda: train.save_state(directory / "inside"),
        "load_state": lambda: train.load_state(directory / "before"),
        "offload": lambda: train.offload(weights=True),
    }
    refused = []
    with engine.generation():
        for name, call in calls.items():
            with pytest.raises(BackendError, match=rf"{name}.* needs the weights, .* Leave generation\(\) first"):
                call()
            refused.append(name)
        train.offload()
        train.reload()
    assert not (directory / "inside").exists()
    is_back = torch.equal(train.compute_logprobs(batch)["logprobs"].values(), expected)
    step(train)
    engine.close()
    return len(refused), is_back


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_moved_weights_are_refused_not_read(ranks2, tmp_path, backend):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = write_tiny_model(tmp_path / "model", **sizes)
    assert ranks2.run(use_moved_weights, model, backend, tmp_path) == [(8, True)] * 2


def send_twice(model):
    """An executor that sends everything twice is right about the weights and fails the count."""
    _, _, engine = build_engine(model, model, training_weights="keep", bucket_bytes=1 << 14)
    executor = engine._way._executor
    executor._steps = [*executor._steps, *executor._steps]
    with count_traffic() as traffic, engine.generation():
        pass
    planned = engine.plan.recv_bytes[dist.get_rank()]
    most = 2 * CHECKSUM_BYTES * traffic.num_messages  # with what aligns them
    return not traffic.matches(planned) and traffic.recv_bytes - most > planned


def test_the_count_finds_an_executor_that_sends_too_much(ranks2, tmp_path):
    assert ranks2.run(send_twice, write_tiny_model(tmp_path)) == [True, True]


def use_what_was_closed(model, backend):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    train = load_train_backend(backend).build(model, topology=topology, config=TrainConfig(learning_rate=3e-2))
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(train, rollout, topology)
    assert engine.memory.host_bytes == 0
    with engine.generation(), pytest.raises(BackendError, match=r"close\(\) inside generation"):
        engine.close()
    for training_weights in (None, "keep", "offload"):
        with pytest.raises(ReshardError, match=r"maybe another HybridEngine's, cannot be used: .* has no memory"):
            HybridEngine(train, rollout, topology, training_weights=training_weights)
    engine.close()
    engine.close()
    calls = {
        "generation": lambda: engine.generation().__enter__(),
        "generate": lambda: engine.generate(build_prompts(4, vocab_size=VOCAB_SIZE), GREEDY),
        "memory": lambda: engine.memory,
        "scoring": lambda: train.compute_logprobs(build_batch(4, vocab_size=VOCAB_SIZE)),
        "train_step": lambda: step(train),
        "weight_layout": train.weight_layout,
        "local_weights": train.local_weights,
        "offload": lambda: train.offload(weights=True),
        "reload": train.reload,
        "export_hf": lambda: train.export_hf(Path(model).with_name("closed")),
        "load_hf": lambda: train.load_hf(model),
        "save_state": lambda: train.save_state(Path(model).with_name("closed")),
        "load_state": lambda: train.load_state(model),
        "weight_buffers": rollout.weight_buffers,
        "rollout.weight_layout": rollout.weight_layout,
        "rollout.generate": lambda: rollout.generate(build_prompts(4, vocab_size=VOCAB_SIZE), GREEDY),
        "release": rollout.release,
        "resume": rollout.resume,
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(BackendError) as refused:
            call()
        found[name] = str(refused.value)
    return found


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_was_closed_says_so(ranks1, tmp_path, backend):
    (found,) = ranks1.run(use_what_was_closed, write_tiny_model(tmp_path / "model"), backend)
    assert len(found) == 18 and {name: text for name, text in found.items() if "closed" not in text} == {}


def fuse_two_projections(model, training_weights):
    """As engines do that compute both at once: two of the generation tensors lie in one storage.

    They are not lent, but moved there and back.
    """
    topology = Topology(ParallelSpec(), GenerationSpec())
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=3e-2))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)
    first, second = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    pair = [loaded.get_parameter(name) for name in (first, second)]
    for parameter, part in zip(pair, torch.stack([each.data for each in pair]), strict=True):
        parameter.data = part
    for parameter in {*loaded.parameters()} - {*pair}:
        parameter.data = parameter.data.clone()
    rollout = TransformersBackend(loaded, topology=topology, cache_bytes=1 << 20)
    engine = HybridEngine(train, rollout, topology, training_weights=training_weights)
    for _ in range(2):
        step(train)
        before, views = bits(train.local_weights()), train.local_weights()
        with engine.generation():
            assert all(torch.equal(rollout.weight_buffers()[name], before[name]) for name in (first, second))
            held = [views[name].untyped_storage().nbytes() for name in (first, second)]
            engine.generate(build_prompts(2, vocab_size=VOCAB_SIZE), GREEDY)
        assert all(torch.equal(train.local_weights()[name], value) for name, value in before.items())
    return held == [0, 0], storage_bytes([rollout.weight_buffers()[first]])


def test_training_weights_move_into_a_shared_storage(ranks1, tmp_path):
    model = write_tiny_model(tmp_path)
    assert ranks1.run(fuse_two_projections, model, "move") == [(True, 0)]
    assert ranks1.run(fuse_two_projections, model, "keep") == [(False, 2 * 32 * 64 * 4)]


def keep_between_dtypes(model):
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    train = load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=3e-2))
    rollout = TransformersBackend.build(model, topology=topology, dtype="bfloat16")
    with pytest.raises(BackendError, match='Use training_weights="keep"'):
        HybridEngine(train, rollout, topology, training_weights="move")
    with pytest.raises(BackendError, match=r"training_weights='mvoe'. Use"):
        HybridEngine(train, rollout, topology, training_weights="mvoe")
    engine = HybridEngine(train, rollout, topology)
    assert engine.memory.training == "kept"
    assert engine.memory.training_bytes == engine.plan.source.held_bytes(dist.get_rank())
    step(train)
    with engine.generation(), pytest.raises(BackendError, match="entered already"), engine.generation():
        pass
    shards, differing = train.local_weights(), []
    for name, shard in shards.items():
        (box,) = engine.plan.source.boxes_of(dist.get_rank())[name]
        full = rollout.weight_buffers()[name]
        if not torch.equal(full[box.slices_in(Box.whole(full.shape))], shard.bfloat16()):
            differing.append(name)
    return len(shards) > 0, differing


def test_masters_of_another_dtype_stay_where_they_are(ranks2, tmp_path):
    assert ranks2.run(keep_between_dtypes, write_tiny_model(tmp_path)) == [(True, [])] * 2


def offload_while_generating(model):
    """As on a device: the memory of the training weights and of AdamW's moments is given up, not only refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_is_on_host", lambda storage: False)
        train, rollout, engine = build_engine(model, model, training_weights="offload")
        step(train)
        trained, views = bits(train.local_weights()), train.local_weights().values()
        memory, shard = engine.memory, storage_bytes(train.local_weights().values())
        for _ in range(2):  # the second finds nothing changed
            with engine.generation():
                assert storage_bytes(views) == storage_bytes(train._optimizer.moments()) == 0
                assert storage_bytes(rollout.weight_buffers().values()) == memory.generation_bytes > 0
                engine.generate(build_prompts(4, vocab_size=VOCAB_SIZE), GREEDY)
            assert all(torch.equal(train.local_weights()[name], value) for name, value in trained.items())
        step(train)
        engine.close()
        return memory.training, memory.training_bytes, memory.host_bytes - shard


def test_the_training_shard_may_wait_on_the_host(ranks2, tmp_path):
    assert ranks2.run(offload_while_generating, write_tiny_model(tmp_path)) == [("offloaded", 0, 0)] * 2
