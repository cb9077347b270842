"""The fsdp backend's forward passes: logits of response tokens and of nothing else, and tokens of a micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import gather_weights, write_tiny_family, write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_protocols import BackendError, ParallelSpec, Topology

VOCAB_SIZE = 64


@pytest.mark.parametrize("shard", ["root", "layer"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_padding_costs_no_logits_and_its_outputs_are_zeros(ranks1, tmp_path, shard, head):
    model = write_tiny_model(tmp_path)
    seen, num_tokens, num_columns, padding = ranks1.run(positions_of_the_head, model, shard, head)[0]
    assert sum(seen) == num_tokens < num_columns
    assert padding == 0.0


def positions_of_the_head(model, shard, head):
    """Rows that the head saw, real tokens, columns that a padded head would see, and the sum of padded outputs."""
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=128, shard=shard)
    backend = load_train_backend("fsdp").build(model, topology=Topology(ParallelSpec()), config=config, head=head)
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    seen, columns, padding = [], [], 0.0
    backend._model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(len(inputs[0]))
    )

    def loss(outputs, micro_batch):
        nonlocal padding
        mask = micro_batch["response_mask"]
        columns.append(mask.numel())
        (output,) = outputs.values()
        assert output.shape == mask.shape
        padding += float(output.detach()[~mask].abs().sum())
        return (output * mask).square().sum(), {}

    backend.train_step(batch, loss, 1.0)
    return seen, len(batch["response_ids"].values()), sum(columns), padding


@pytest.mark.parametrize(("shared_prompts", "head"), [(False, "lm"), ("auto", "lm"), ("auto", "score")])
def test_a_micro_batch_on_a_cpu_has_enough_tokens(ranks2, tmp_path, shared_prompts, head):
    """1,024 for a thread. Where each of them gathers every layer from other ranks, there are as few as fit."""
    model = write_tiny_model(tmp_path, vocab_size=8192)
    for sizes, enough in ranks2.run(sizes_of_micro_batches, model, "root", shared_prompts, head):
        assert len(sizes) > 1
        assert enough / 2 < max(sizes) <= enough
    for sizes, _ in ranks2.run(sizes_of_micro_batches, model, "layer", shared_prompts, head):
        assert len(sizes) == 1


def sizes_of_micro_batches(model, shard, shared_prompts, head):
    """Tokens of each micro-batch of rows with prompts of their own, and how many are enough for this rank's threads."""
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=1 << 20, shard=shard, shared_prompts=shared_prompts)
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    backend = load_train_backend("fsdp").build(model, topology=topology, config=config, head=head)
    enough = 1024 * torch.get_num_threads()
    batch = build_batch(enough // 4, vocab_size=8192)
    name = "compute_scores" if head == "score" else "compute_logprobs"
    passes = []
    backend._model.register_forward_pre_hook(
        lambda module, _, inputs: passes.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    getattr(backend, name)(batch)
    return passes, enough


def test_rows_without_a_response_are_scored(ranks1, tmp_path):
    assert ranks1.run(score_empty_responses, write_tiny_model(tmp_path)) == [[0, 0]]


def score_empty_responses(model):
    from tensordict import TensorDict

    backend = load_train_backend("fsdp").build(
        model, topology=Topology(ParallelSpec()), config=TrainConfig(learning_rate=1e-2)
    )

    def column(lengths):
        rows = [torch.full((length,), 5) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    batch = TensorDict({"prompt_ids": column([3, 2]), "response_ids": column([0, 0])}, batch_size=[2])
    scored = backend.compute_logprobs(batch, entropy=True)
    return scored["logprobs"].offsets().diff().tolist()


@pytest.mark.parametrize(("family", "keys"), [("opt", {}), ("xglm", {}), ("falcon", {"hidden_dropout": 0.3})])
def test_checkpointed_layers_have_no_dropout(ranks1, tmp_path, family, keys):
    """These layers have dropout of their own, not in a module inside."""
    model = write_tiny_family(tmp_path, family, dropout=0.3, **keys)
    plain, again = ranks1.run(score_and_update, model, False)[0], ranks1.run(score_and_update, model, True)[0]
    assert list_differing(plain, again) == []


def test_checkpointed_layers_on_two_ranks_have_no_dropout(ranks2, tmp_path):
    model = write_tiny_family(tmp_path, "opt", dropout=0.3)
    plain, again = (ranks2.run(score_and_update, model, each, "layer") for each in (False, True))
    assert [list_differing(*found) for found in zip(plain, again, strict=True)] == [[], []]


def list_differing(plain, again):
    """Names of tensors that are not the same up to rounding."""
    assert plain.keys() == again.keys() and len(plain) > 2
    return [name for name, tensor in plain.items() if not torch.allclose(again[name], tensor, rtol=1e-5, atol=1e-6)]


def score_and_update(model, activation_checkpointing, shard="root"):
    """Log-probs twice, with a layer that raises in between, and the weights after an update."""
    config = TrainConfig(learning_rate=1e-2, eps=1e-3, activation_checkpointing=activation_checkpointing, shard=shard)
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    backend = load_train_backend("fsdp").build(model, topology=topology, config=config)
    batch = build_batch(3, vocab_size=VOCAB_SIZE)
    first = next(module for module in backend._model.modules() if type(module).__name__.endswith("DecoderLayer"))
    inside = next(first.children())
    found = {"score 0": backend.compute_logprobs(batch)["logprobs"].values()}
    handle = inside.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backend.compute_logprobs(batch)
    handle.remove()
    found["score 1"] = backend.compute_logprobs(batch)["logprobs"].values()
    assert torch.equal(found["score 0"], found["score 1"])
    passes = []
    inside.register_forward_hook(lambda *_: passes.append(1))

    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    backend.train_step(batch, loss, 10.0)
    assert len(passes) == 1 + activation_checkpointing, "a layer is computed again"
    return found | gather_weights(backend, topology)


def test_layers_that_cannot_be_computed_again_are_refused(ranks1, tmp_path):
    (message,) = ranks1.run(refuse_checkpointing, write_tiny_family(tmp_path, "jetmoe"))
    assert message == (
        "activation_checkpointing=True: transformers cannot compute the layers of JetMoeForCausalLM again. "
        "Set activation_checkpointing=False"
    )


def refuse_checkpointing(model):
    config = TrainConfig(learning_rate=1e-2, activation_checkpointing=True)
    with pytest.raises(BackendError) as refusal:
        load_train_backend("fsdp").build(model, topology=Topology(ParallelSpec()), config=config)
    return str(refusal.value)


def test_layers_of_an_encoder_are_computed_again(ranks1, tmp_path):
    """transformers names none of its modules as not to be split."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    config = DistilBertConfig(vocab_size=VOCAB_SIZE, num_labels=1, **sizes)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path)
    assert [ranks1.run(count_passes_of_an_encoder, tmp_path, each) for each in (False, True)] == [[2], [4]]


def count_passes_of_an_encoder(model, activation_checkpointing):
    config = TrainConfig(learning_rate=1e-2, activation_checkpointing=activation_checkpointing)
    build = load_train_backend("fsdp").build
    backend = build(model, topology=Topology(ParallelSpec()), config=config, head="score")
    passes = []
    for module in backend._model.modules():
        if type(module).__name__ == "TransformerBlock":
            next(module.children()).register_forward_hook(lambda *_: passes.append(1))
    batch = build_batch(3, vocab_size=VOCAB_SIZE)
    batch["rejected_ids"] = batch["response_ids"].detach().clone()
    backend.train_step(batch, lambda outputs, _: (outputs["scores"].square().sum(), {}), 1.0)
    return len(passes)
