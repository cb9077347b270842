"""Refusals of both training backends: losses without gradient, batches without rows, numbers out of range."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hf_engine import TrainConfig, load_train_backend
from hf_engine.model_directory import check_model_directory, read_model_directory
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, BatchError, ParallelSpec, Topology


def topology_of_all_ranks():
    return Topology(ParallelSpec(dp_size=dist.get_world_size()))


def local_rows(num_rows):
    batch = build_batch(num_rows, vocab_size=64)
    return select_rows(batch, range(dist.get_rank(), num_rows, dist.get_world_size()))


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def train_on_losses_without_gradient(model, backend_name):
    """They are refused with what is wrong, and the next step is as if they had not been."""
    topology, batch = topology_of_all_ranks(), local_rows(4)
    config = TrainConfig(learning_rate=1e-2)
    load = load_train_backend(backend_name)
    straight, refusing = (load.build(model, topology=topology, config=config) for _ in range(2))
    straight.train_step(batch, negative_logprobs, 10.0)
    for wrong, message in (
        (lambda outputs, _: (outputs["logprobs"].sum().detach(), {}), "a loss_sum without gradient"),
        (lambda outputs, _: (outputs["logprobs"], {}), r"gave a tensor of shape \(.*\) as loss_sum"),
        (lambda outputs, _: (3.0, {}), "gave 3.0 as loss_sum"),
        (lambda outputs, _: (outputs["logprobs"].sum(), {"grad_norm": (1.0, 1.0)}), "name that the step itself uses"),
    ):
        with pytest.raises(BackendError, match=message):
            refusing.train_step(batch, wrong, 10.0)
    refusing.train_step(batch, negative_logprobs, 10.0)
    assert refusing.optimizer_steps == 1
    expected, found = (gather_weights(backend, topology) for backend in (straight, refusing))
    straight.close()
    refusing.close()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_loss_without_gradient_is_refused(ranks2, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(train_on_losses_without_gradient, model, backend) == [[], []]


def name_no_directory(model, backend_name, absent):
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    for method in ("export_hf", "save_state", "load_hf", "load_state"):
        with pytest.raises(BackendError, match=r"directory=None. Use the path of a directory"):
            getattr(backend, method)(None)
    with pytest.raises(BackendError) as failed:
        backend.load_hf(absent)
    backend.close()
    return str(failed.value)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_is_not_a_directory_is_named(ranks1, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    (message,) = ranks1.run(name_no_directory, model, backend, str(tmp_path / "absent"))
    assert "absent': no such directory" in message
    assert "hub" not in message


def load_what_older_libraries_wrote(model, backend_name, directories):
    """Weights of a checkpoint with rotary buffers and the tied head, and what is said of a head of its own."""
    topology, config = topology_of_all_ranks(), TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(model, topology=topology, config=config)
    expected = gather_weights(backend, topology)
    for parameter in backend.local_weights().values():
        for part in [parameter] if isinstance(parameter, torch.Tensor) else parameter:
            part.zero_()
    backend.load_hf(directories["equal"])
    loaded = gather_weights(backend, topology)
    with pytest.raises(BackendError, match=r"lm_head\.weight") as refused:
        backend.load_hf(directories["other"])
    backend.close()
    assert sorted(loaded) == sorted(expected)
    return [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)], str(refused.value)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_buffers_and_tied_heads_in_a_checkpoint_are_ignored(ranks2, tmp_path, backend):
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = write_tiny_model(tmp_path / "model", **options)
    tensors = load_file(model / "model.safetensors")
    directories = {}
    for name, shift in (("equal", 0.0), ("other", 1.0)):
        directories[name] = write_tiny_model(tmp_path / name, **options)
        more = {"lm_head.weight": tensors["model.embed_tokens.weight"] + shift}
        more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        save_file(tensors | more, directories[name] / "model.safetensors", metadata={"format": "pt"})
    for differing, _ in ranks2.run(load_what_older_libraries_wrote, model, backend, directories):
        assert differing == []


def make_mistakes_on_rank_1(model, backend_name, sizes):
    """Each rank raises at once: rank 1 its own error, the others one that names it; then all take a step.

    So they do after a mistake that all make alike.
    """
    alone, topology = dist.get_rank() == 1, Topology(ParallelSpec.parse(sizes))
    backend = load_train_backend(backend_name).build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    batch = local_rows(4) if topology.train.dp_size > 1 else build_batch(4, vocab_size=64)
    before = backend.weight_changes

    def forget_a_column(outputs, micro_batch):
        return (outputs["logprobs"] * micro_batch["advantages"]).sum(), {}

    padded = torch.zeros(len(batch), 3, dtype=torch.int64)
    strangers = [
        torch.nested.nested_tensor([torch.tensor(row)] * len(batch), layout=torch.jagged) for row in ([1, 64], [-1])
    ]
    mistakes = {
        r"row 0 of 'response_ids' holds the token id 64, the model's are 0 to 63": {"response_ids": strangers[0]},
        r"row 0 of 'prompt_ids' holds the token id -1": {"prompt_ids": strangers[1]},
        r"the column 'prompt_ids' is of shape \(.*, 3\), not jagged. Use": {"prompt_ids": padded},
        r"the column 'prompt_ids' is of torch.float32. Use": {"prompt_ids": strangers[0].float()},
    }
    other = "" if alone else "rank 1 refused: .*"
    for message, columns in mistakes.items():
        given = batch.clone().update(columns) if alone else batch
        with pytest.raises(BatchError, match=other + message):
            backend.train_step(given, negative_logprobs, 10.0)
    with pytest.raises(BatchError, match=other + "batch=None. Use a TensorDict with the columns"):
        backend.compute_logprobs(None if alone else batch)
    with pytest.raises((BackendError, BatchError), match=other + "denominator=None must be"):
        backend.train_step(batch, negative_logprobs, None if alone else 10.0)
    with pytest.raises(BackendError, match=r"loss_fn raised KeyError: .*advantages"):
        backend.train_step(batch, forget_a_column, 10.0)
    assert (backend.optimizer_steps, backend.weight_changes) == (0, before)
    backend.train_step(batch, negative_logprobs, 10.0)
    weights = gather_weights(backend, topology)
    backend.close()
    straight = load_train_backend(backend_name).build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    straight.train_step(batch, negative_logprobs, 10.0)
    expected = gather_weights(straight, topology)
    straight.close()
    return [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("fsdp", "1-1-2"),
        ("megatron", "1-2-1"),
        pytest.param("megatron", "1-1-2", marks=pytest.mark.slow),
        pytest.param("megatron", "2-1-1", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_on_one_rank_is_an_error_on_all(ranks2, tmp_path, backend, sizes):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(make_mistakes_on_rank_1, model, backend, sizes) == [[], []]


def give_own_denominators(model, backend_name):
    """A rank's own number of tokens in the place of all ranks' would scale its gradients alone."""
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    rank, batch = dist.get_rank(), local_rows(4)
    with pytest.raises(
        BatchError,
        match=r"rank 1 was given denominator=11\.0, rank 0 denominator=10\.0; the ranks computed nothing. Give all",
    ):
        backend.train_step(batch, negative_logprobs, 10.0 + rank)
    with pytest.raises(
        BatchError,
        match=r"rank 1 was given temperature=2\.0, rank 0 temperature=1\.0; the ranks computed nothing. Give all",
    ):
        backend.compute_logprobs(batch, temperature=1.0 + rank)
    assert backend.optimizer_steps == 0
    backend.train_step(batch, negative_logprobs, 10.0)
    backend.close()
    return True


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_data_parallel_ranks_are_given_one_denominator(ranks2, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(give_own_denominators, model, backend) == [True, True]


def give_a_replica_different_rows(model, sizes):
    """Checks that every rank raises at once, and the next step is taken."""
    topology = Topology(ParallelSpec.parse(sizes))
    backend = load_train_backend("megatron").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))
    batch = build_batch(4, vocab_size=64)
    other = select_rows(batch, [3, 1, 2, 0]) if dist.get_rank() else batch
    with pytest.raises(BatchError, match="rank 1 was given other rows than rank 0"):
        backend.train_step(other, negative_logprobs, 10.0)
    with pytest.raises(BatchError, match="rank 1 was given other rows than rank 0"):
        backend.compute_logprobs(other)
    backend.train_step(batch, negative_logprobs, 10.0)
    steps = backend.optimizer_steps
    backend.close()
    return steps


@pytest.mark.parametrize("sizes", ["1-2-1", pytest.param("2-1-1", marks=pytest.mark.slow)])
def test_ranks_of_a_megatron_replica_are_given_the_same_rows(ranks2, tmp_path, sizes):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(give_a_replica_different_rows, model, sizes) == [1, 1]


def use_batches_without_rows(model, backend_name):
    """Nothing to score is not an error; nothing to learn from is one, on every rank, and the next step is taken."""
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    batch = local_rows(4)
    scored = backend.compute_logprobs(batch[:0], entropy=True)
    assert sorted(scored.keys()) == ["entropy", "logprobs"]
    assert [len(scored), *(len(column.values()) for column in scored.values())] == [0, 0, 0]
    with pytest.raises(BatchError, match="no rows on any data-parallel rank"):
        backend.train_step(batch[:0], negative_logprobs, 10.0)
    assert backend.optimizer_steps == 0
    backend.train_step(batch if dist.get_rank() else batch[:0], negative_logprobs, 10.0)
    steps = backend.optimizer_steps
    backend.close()
    return steps


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_batches_without_rows(ranks2, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks2.run(use_batches_without_rows, model, backend) == [1, 1]


def pass_numbers_out_of_range(model, backend_name):
    backend = load_train_backend(backend_name).build(
        model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
    )
    batch = local_rows(4)
    for wrong in (-1.0, "x", float("nan")):
        with pytest.raises(BackendError, match=f"learning_rate={wrong!r} must be a finite number"):
            backend.set_learning_rate(wrong)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BackendError, match=f"temperature={wrong!r} must be a finite number above 0"):
            backend.compute_logprobs(batch, temperature=wrong)
        with pytest.raises(BackendError, match=f"temperature={wrong!r} must be a finite number above 0"):
            backend.train_step(batch, negative_logprobs, 10.0, temperature=wrong)
    with pytest.raises(BackendError, match="denominator='10' must be a finite number above 0"):
        backend.train_step(batch, negative_logprobs, "10")
    backend.set_learning_rate(0.0)
    metrics = backend.train_step(batch, negative_logprobs, 10.0)
    backend.close()
    return metrics["learning_rate"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_numbers_out_of_range_are_named(ranks1, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert ranks1.run(pass_numbers_out_of_range, model, backend) == [(0.0, 1.0)]


def export_with(model, backend_name, head, directory):
    topology, config = topology_of_all_ranks(), TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(model, topology=topology, config=config, head=head)
    backend.export_hf(directory)
    backend.close()


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_exported_config_is_true_of_the_tensors(ranks1, tmp_path, backend, head):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    stale = {"dtype": None, "torch_dtype": "bfloat16", "_name_or_path": "elsewhere", "quantization_config": None}
    model = write_tiny_model(tmp_path / "model", **sizes, **stale)
    ranks1.run(export_with, model, backend, head, tmp_path / "exported")
    files = read_model_directory(tmp_path / "exported")
    check_model_directory(files, head=head)
    stored = load_file(tmp_path / "exported" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.float32"}
    assert files.config["dtype"] == "float32" and not {*stale} - {"dtype"} & files.config.keys()
    assert files.config["tie_word_embeddings"] is (head == "lm")
    assert files.config["vocab_size"] == len(stored["model.embed_tokens.weight"])
    assert files.config["architectures"] == ["LlamaForCausalLM"]


def refuse_to_build(model, backend):
    with pytest.raises(BackendError) as refused:
        load_train_backend(backend).build(
            model, topology=topology_of_all_ranks(), config=TrainConfig(learning_rate=1e-2)
        )
    return str(refused.value)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_surplus_layers_are_not_cut_off(ranks1, tmp_path, backend):
    model = write_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (message,) = ranks1.run(refuse_to_build, model, backend)
    assert "its files hold layers 2, 3 beyond num_hidden_layers = 2" in message
