from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import check_train_backend, gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, rows_of, select_rows
from hf_engine.testing._oracles import read_whole_state
from hf_protocols import BackendError, BatchError, ParallelSpec, StateError, Topology

VOCAB_SIZE = 64
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=64)
SCHEDULED = replace(CONFIG, warmup_steps=1, schedule="linear", total_steps=6)


def topology_of_all_ranks():
    return Topology(ParallelSpec(dp_size=dist.get_world_size()))


def build(directory, config=CONFIG, **options):
    return load_train_backend("fsdp").build(directory, topology=topology_of_all_ranks(), config=config, **options)


def load_reference(directory, head="lm"):
    """The model in one process, float32; for a value head with a zero output layer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if head == "value":
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, 1, bias=False))
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    return model


def negative_logprobs(outputs, micro_batch):
    loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
    return loss, {"loss": (float(loss.detach()), float(micro_batch["response_mask"].sum()))}


def conformance(model, directory, head, shard, **changes):
    topology = topology_of_all_ranks()
    check_train_backend(
        lambda config: build(model, replace(config, shard=shard, **changes), head=head),
        load_reference(model, head),
        topology=topology,
        vocab_size=VOCAB_SIZE,
        directory=Path(directory) / f"{dist.get_world_size()}",
        head=head,
        num_rows=3 if dist.get_world_size() == 2 else 7,
    )
    return "conforms"  # or the first law that is broken was raised


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied"),
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2"),
        "mistral": write_tiny_model(folder / "mistral", family="mistral", sliding_window=4),
    }


@pytest.mark.parametrize(
    ("model", "head", "shard"),
    [("tied", "lm", "root"), ("untied", "lm", "layer"), ("tied", "value", "root"), ("qwen2", "lm", "root")],
)
def test_two_ranks_conform(ranks2, models, tmp_path, model, head, shard):
    assert ranks2.run(conformance, models[model], tmp_path, head, shard) == ["conforms"] * 2


@pytest.mark.parametrize(
    ("model", "head", "shard"), [("untied", "lm", "root"), ("mistral", "lm", "layer"), ("untied", "value", "layer")]
)
def test_one_rank_conforms(ranks1, models, tmp_path, model, head, shard):
    assert ranks1.run(conformance, models[model], tmp_path, head, shard) == ["conforms"]


def conformance_with_recomputation(model, directory):
    return conformance(model, directory, "lm", "layer", activation_checkpointing=True)


def test_recomputed_activations_change_nothing(ranks2, models, tmp_path):
    assert ranks2.run(conformance_with_recomputation, models["tied"], tmp_path) == ["conforms"] * 2


def train_with_and_without_saving(model, directory):
    weights = []
    for saves in (False, True):
        backend = build(model)
        if saves:
            backend.save_state(Path(directory) / "start")
        for _ in range(2):
            backend.train_step(local_rows(4), negative_logprobs, 10.0)
        weights.append(gather_weights(backend, topology_of_all_ranks()))
    backend.load_state(Path(directory) / "start")
    assert backend.optimizer_steps == 0
    for _ in range(2):
        backend.train_step(local_rows(4), negative_logprobs, 10.0)
    return *weights, gather_weights(backend, topology_of_all_ranks())


def test_saving_before_the_first_step_changes_nothing(ranks2, models, tmp_path):
    plain, saving, loaded = ranks2.run(train_with_and_without_saving, models["tied"], tmp_path)[0]
    for name, tensor in plain.items():
        assert torch.equal(tensor, saving[name]), name
        assert torch.equal(tensor, loaded[name]), name


class LossError(Exception):
    pass


def train_after_a_failed_step(model, dtype, shard):
    """The weights after one step, with and without a step before it whose second micro-batch failed."""
    topology, batch = topology_of_all_ranks(), local_rows(8)
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=16, dtype=dtype, shard=shard)
    straight = build(model, config)
    straight.train_step(batch, negative_logprobs, 10.0)
    expected = gather_weights(straight, topology)
    interrupted = build(model, config)
    scored = interrupted.compute_logprobs(batch)["logprobs"].values()
    seen = []

    def failing(outputs, micro_batch):
        seen.append(len(micro_batch))
        if len(seen) == 2:
            raise LossError
        return negative_logprobs(outputs, micro_batch)

    with pytest.raises(BackendError, match="loss_fn raised LossError"):
        interrupted.train_step(batch, failing, 0.001)
    for weights in interrupted.local_weights().values():
        weights.mul_(2.0)
    assert not torch.equal(interrupted.compute_logprobs(batch)["logprobs"].values(), scored)
    for weights in interrupted.local_weights().values():
        weights.div_(2.0)
    assert torch.equal(interrupted.compute_logprobs(batch)["logprobs"].values(), scored)
    interrupted.train_step(batch, negative_logprobs, 10.0)
    found = gather_weights(interrupted, topology)
    assert interrupted.optimizer_steps == 1
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(("dtype", "shard"), [("float32", "root"), ("bfloat16", "root"), ("float32", "layer")])
def test_a_step_that_failed_on_its_way_leaves_nothing(ranks2, models, dtype, shard):
    assert ranks2.run(train_after_a_failed_step, models["tied"], dtype, shard) == [[], []]


def save_after_three_steps(model, directory):
    """The weights there, and after two more steps."""
    backend = build(model, SCHEDULED, head="value")
    backend.load_hf(model)
    for _ in range(3):
        backend.train_step(local_rows(6), squared_values, 10.0)
    backend.save_state(Path(directory) / "state")
    backend.export_hf(Path(directory) / "export")
    saved = gather_weights(backend, topology_of_all_ranks())
    for _ in range(2):
        backend.train_step(local_rows(6), squared_values, 10.0)
    return saved, gather_weights(backend, topology_of_all_ranks())


def step_from_state(model, directory, again):
    """Saves what it loads, and takes two steps; their learning rates, and the weights before and after."""
    backend = build(model, SCHEDULED, head="value")
    backend.load_state(directory)
    assert backend.optimizer_steps == 3
    backend.save_state(again)
    loaded = gather_weights(backend, topology_of_all_ranks())
    metrics = [backend.train_step(local_rows(6), squared_values, 10.0) for _ in range(2)]
    rates = [each["learning_rate"][0] for each in metrics]
    return rates, loaded, gather_weights(backend, topology_of_all_ranks())


def local_rows(num_rows):
    batch = build_batch(num_rows, vocab_size=VOCAB_SIZE)
    return select_rows(batch, range(dist.get_rank(), num_rows, dist.get_world_size()))


def squared_values(outputs, micro_batch):
    return ((outputs["values"] - 1.0) ** 2 * micro_batch["response_mask"]).sum(), {}


def test_a_state_goes_from_two_ranks_to_one_and_back(ranks1, ranks2, models, tmp_path):
    """Weights, moments and steps bit for bit, and further steps as if the run had never ended."""
    (saved, onwards), _ = ranks2.run(save_after_three_steps, models["tied"], tmp_path)
    paths = [tmp_path / name for name in ("state", "on one", "on two")]
    for ranks, source, again in ((ranks1, paths[0], paths[1]), (ranks2, paths[1], paths[2])):
        rates, loaded, continued = ranks.run(step_from_state, models["tied"], source, again)[0]
        assert rates == pytest.approx([0.6e-2, 0.4e-2])
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name
            torch.testing.assert_close(continued[name], onwards[name], atol=1e-4, rtol=0)
    first, *others = [read_whole_state(path) for path in paths]
    assert all(first[kind][name].any() for kind in ("exp_avg", "exp_avg_sq") for name in first["weights"])
    assert all(same(first, other) for other in others)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)


def load_value_export(model, directory):
    from_lm = build(model, head="value")
    at_start = gather_weights(from_lm, topology_of_all_ranks())
    from_lm.load_hf(Path(directory) / "export")
    built = build(Path(directory) / "export", head="value")
    return at_start, gather_weights(from_lm, topology_of_all_ranks()), gather_weights(built, topology_of_all_ranks())


def test_a_value_head_comes_back_from_its_export(ranks1, ranks2, models, tmp_path):
    (saved, _), _ = ranks2.run(save_after_three_steps, models["untied"], tmp_path)
    ((at_start, loaded, built),) = ranks1.run(load_value_export, models["untied"], tmp_path)
    assert not at_start["lm_head.weight"].any()
    assert saved["lm_head.weight"].any()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(built[name], tensor), name


def load_trunk_keeping_head(model, other):
    backend = build(model, head="value")
    backend.train_step(local_rows(4), squared_values, 10.0)
    head = gather_weights(backend, topology_of_all_ranks())["lm_head.weight"]
    backend.load_hf(other)
    return head, gather_weights(backend, topology_of_all_ranks())


def test_a_language_model_gives_a_critic_its_trunk(ranks2, models, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=5)
    head, weights = ranks2.run(load_trunk_keeping_head, models["tied"], other)[0]
    assert head.any()
    assert torch.equal(weights["lm_head.weight"], head)
    for name, parameter in load_reference(other).named_parameters():
        assert torch.equal(weights[name], parameter), name


def train_and_export(model, directory):
    backend = build(model, TrainConfig(learning_rate=1e-2))
    backend.export_hf(directory)
    backend.train_step(local_rows(4), negative_logprobs, 10.0)
    backend.export_hf(directory)
    return gather_weights(backend, topology_of_all_ranks())


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_export_is_a_hugging_face_model(ranks2, models, tmp_path, model):
    directory = tmp_path / "runs" / "model"
    weights, _ = ranks2.run(train_and_export, models[model], directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert {name for name, _ in loaded.named_parameters()} == set(weights)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_head_stays_tied_to_an_embedding_that_is_not_split(ranks1, tmp_path):
    config = BertConfig(vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=2, max_position_embeddings=48, is_decoder=True)  # fmt: skip
    model = BertLMHeadModel(config)
    assert "BertEmbeddings" in model._no_split_modules
    model.save_pretrained(tmp_path / "model")
    weights = ranks1.run(train_and_export, str(tmp_path / "model"), str(tmp_path / "exported"))[0]
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    assert exported.keys() == weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.items())
    embedding = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(weights[embedding], model.get_parameter(embedding))


def export_where_a_file_is(model, directory):
    backend, occupied = build(model, trainable=False), Path(directory) / "occupied" / "model"
    messages = []
    for error, call, path in (
        (BackendError, backend.export_hf, occupied),
        (StateError, backend.save_state, occupied),
        (StateError, backend.load_state, directory),
    ):
        with pytest.raises(error) as refused:
            call(path)
        messages.append(str(refused.value))
    return messages


def test_an_unwritable_directory_is_an_error_on_every_rank(ranks2, models, tmp_path):
    (tmp_path / "occupied").write_text("a file")
    for exported, saved, loaded in ranks2.run(export_where_a_file_is, models["tied"], tmp_path):
        assert re.search(r"rank 0 refused: .*occupied", exported)
        assert re.search(r"occupied.* cannot be written", saved)
        assert "state.json does not exist" in loaded


def score_frozen(model):
    backend = build(model, trainable=False)
    batch = local_rows(4)
    scored = backend.compute_logprobs(batch)["logprobs"]
    assert not any(parameter.requires_grad for parameter in backend._parameters.values())
    with pytest.raises(BackendError, match="trainable=True"):
        backend.train_step(batch, negative_logprobs, 1.0)
    with pytest.raises(BackendError, match="head='value'"):
        backend.compute_values(batch)
    held = sum(tensor.numel() for tensor in backend.local_weights().values())
    backend.close()
    return held, [row.clone() for row in rows_of(scored)]


def test_a_frozen_model_is_sharded_and_scores(ranks1, ranks2, models):
    ((whole, alone),) = ranks1.run(score_frozen, models["tied"])
    (held, first), (also_held, second) = ranks2.run(score_frozen, models["tied"])
    assert held + also_held == whole
    assert max(held, also_held) < 0.51 * whole
    for row, expected in zip([first[0], second[0], first[1], second[1]], alone, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def refuse_rows(model):
    backend = build(model, TrainConfig(learning_rate=1e-3, micro_batch_tokens=8))
    columns = {"prompt_ids": [[5] * (9 if dist.get_rank() else 2)], "response_ids": [[6]]}
    batch = TensorDict({k: jagged(v) for k, v in columns.items()}, batch_size=[1])
    with pytest.raises(BatchError) as error:
        backend.compute_logprobs(batch)
    empty = TensorDict({"prompt_ids": jagged([[]]), "response_ids": jagged([[6]])}, batch_size=[1])
    with pytest.raises(BatchError, match=r"prompts of rows \[0\] are empty"):
        backend.compute_logprobs(empty)
    with pytest.raises(BatchError, match=r"lacks the columns \['response_ids'\]"):
        backend.compute_logprobs(batch.select("prompt_ids"))
    return str(error.value)


def jagged(rows):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def test_rows_that_one_rank_refuses_hang_nobody(ranks2, models):
    first, second = ranks2.run(refuse_rows, models["tied"])
    assert first.startswith("rank 1 refused: row 0 has 9 prompt")
    assert "row 0 has 9 prompt + 1 response = 10 tokens, above micro_batch_tokens=8" in second


def refuse_models(model, other):
    two = Topology(ParallelSpec(tp_size=2))
    messages = []
    for call in (
        lambda: load_train_backend("fsdp").build(model, topology=two, config=CONFIG),
        lambda: build(Path(model) / "absent"),
        lambda: build(model, trainable=False).load_hf(other),
    ):
        with pytest.raises(BackendError) as refused:
            call()
        messages.append(str(refused.value))
    return messages


def test_what_cannot_be_loaded_says_why(ranks1, models):
    ((layout, absent, loaded),) = ranks1.run(refuse_models, models["tied"], models["untied"])
    assert "tp_size=2" in layout
    assert "absent': no such directory" in absent
    assert "holds another model: 1 parameters differ, such as 'lm_head.weight'" in loaded


def regularized(outputs, micro_batch):
    assert outputs["entropy"].shape == outputs["logprobs"].shape == micro_batch["response_mask"].shape
    assert (micro_batch["prompt_ids"] > 0).sum() > 0
    assert micro_batch["row_id"].shape == (len(micro_batch),)
    loss = -(outputs["entropy"] * micro_batch["response_mask"]).sum()
    return loss, {"entropy": (-float(loss.detach()), float(micro_batch["response_mask"].sum()))}


def raise_entropy(model):
    backend = build(model)
    entropies = [backend.train_step(local_rows(5), regularized, 10.0, entropy=True)["entropy"] for _ in range(3)]
    return [total / count for total, count in entropies]


def test_a_loss_may_use_the_entropy(ranks2, models):
    before, *_, after = ranks2.run(raise_entropy, models["tied"])[0]
    assert before < after <= torch.tensor(float(VOCAB_SIZE)).log()


def set_rates(model):
    backend = build(model, TrainConfig(learning_rate=1e-3, warmup_steps=4))
    rates = []
    for step in range(5):
        if step == 2:
            backend.set_learning_rate(1e-2)
        rates.append(backend.train_step(local_rows(2), negative_logprobs, 1.0)["learning_rate"][0])
    with pytest.raises(BackendError, match="denominator=0"):
        backend.train_step(local_rows(2), negative_logprobs, 0.0)
    return rates


def test_warm_up_and_a_new_learning_rate(ranks1, models):
    (rates,) = ranks1.run(set_rates, models["tied"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-2, 1e-2, 1e-2])


def copied_weights(model, dtype, trainable):
    """Names of matrices that passes read elsewhere than where `local_weights` are, and optimizer steps."""
    backend = build(model, replace(CONFIG, dtype=dtype, shard="root"), trainable=trainable)
    kept = {name: tensor.data_ptr() for name, tensor in backend.local_weights().items()}
    read = {}
    for name, module in backend._model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda module, _, name=f"{name}.weight": read.update({name: module.weight.data_ptr()})
            )
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    backend.compute_logprobs(batch)
    if trainable:
        backend.train_step(batch, negative_logprobs, 4.0)
    assert read.keys() <= kept.keys(), f"{sorted(read)} were read, {sorted(kept)} are the weights"
    return {name for name, address in read.items() if kept[name] != address}, len(read)


@pytest.mark.parametrize(
    ("dtype", "trainable", "copies"), [("float32", True, False), ("bfloat16", False, False), ("bfloat16", True, True)]
)
def test_one_rank_copies_no_weights_of_its_dtype(ranks1, models, dtype, trainable, copies):
    ((copied, num_read),) = ranks1.run(copied_weights, models["untied"], dtype, trainable)
    assert len(copied) == (num_read if copies else 0) and num_read > 0
