"""Mixed precision: bfloat16 where FSDP2 computes, float32 where it remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, reference_outputs, rows_of, select_rows
from hf_engine.training.fsdp._model import gather_on_first
from hf_protocols import ParallelSpec, Topology

VOCAB_SIZE = 64


def topology_of_all_ranks():
    return Topology(ParallelSpec(dp_size=dist.get_world_size()))


def build(directory, config):
    return load_train_backend("fsdp").build(directory, topology=topology_of_all_ranks(), config=config)


def load_reference(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def local_rows(num_rows):
    batch = build_batch(num_rows, vocab_size=VOCAB_SIZE)
    return select_rows(batch, range(dist.get_rank(), num_rows, dist.get_world_size()))


def negative_logprobs(outputs, micro_batch):
    loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
    return loss, {"loss": (float(loss.detach()), float(micro_batch["response_mask"].sum()))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tied")


def losses_in(model, dtype):
    backend = build(model, TrainConfig(learning_rate=3e-3, dtype=dtype))
    metrics = [backend.train_step(local_rows(4), negative_logprobs, 10.0) for _ in range(4)]
    assert backend.weight_layout().dtype == "float32"
    return [m["loss"][0] / m["loss"][1] for m in metrics]


def test_mixed_precision_keeps_float32_masters_and_learns(ranks2, model):
    exact, mixed = (ranks2.run(losses_in, model, dtype)[0] for dtype in ("float32", "bfloat16"))
    assert mixed[-1] < mixed[0]
    torch.testing.assert_close(torch.tensor(mixed), torch.tensor(exact), atol=0.15, rtol=0)


def score_and_step_in_bfloat16(model, micro_batch_tokens):
    """Log-probs, the weights after one small step, and the dtypes seen on the way."""
    seen = set()

    def watch(module, args, output):
        seen.add(("activations", output.dtype))
        seen.update(("weights", parameter.dtype) for parameter in module.parameters())

    backend = build(model, TrainConfig(learning_rate=1e-5, dtype="bfloat16", micro_batch_tokens=micro_batch_tokens))
    for layer in backend._model.model.layers:
        layer.mlp.register_forward_hook(watch)
    batch = local_rows(6)
    scored = [row.clone() for row in rows_of(backend.compute_logprobs(batch)["logprobs"])]
    backend.train_step(batch, negative_logprobs, 10.0)
    masters = {tensor.dtype for tensor in (*backend.local_weights().values(), *backend._optimizer.moments())}
    assert masters == {torch.float32}
    return scored, gather_weights(backend, topology_of_all_ranks()), seen


def test_mixed_precision_computes_in_bfloat16_on_float32_masters(ranks2, model):
    (first, stepped, seen), (second, *_) = ranks2.run(score_and_step_in_bfloat16, model, 1000)
    assert seen == {("activations", torch.bfloat16), ("weights", torch.bfloat16)}
    reference, batch = load_reference(model), build_batch(6, vocab_size=VOCAB_SIZE)
    columns = [rows_of(batch[name]) for name in ("prompt_ids", "response_ids")]
    rows = [row for pair in zip(first, second, strict=True) for row in pair]
    differences = []
    for prompt, response, row in zip(*columns, rows, strict=True):
        with torch.no_grad():
            logits = reference_outputs(reference, prompt, response)
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        # A few roundings to 8 bits of the largest logit.
        torch.testing.assert_close(row, expected, atol=4 * 2**-8 * float(logits.abs().max()), rtol=0)
        differences.append(float((row - expected).abs().max()))
    assert max(differences) > 1e-4, "this was not computed in bfloat16"
    # A step of 1e-5 is far below bfloat16's resolution at most weights: only float32 masters can take it.
    before = dict(reference.named_parameters())["model.layers.0.mlp.up_proj.weight"].detach()
    change = stepped["model.layers.0.mlp.up_proj.weight"] - before
    assert (change != 0).float().mean() > 0.99
    assert float(change.abs().max()) < 1.1e-5


def test_mixed_precision_does_not_depend_on_micro_batches(ranks2, model):
    whole, _, _ = ranks2.run(score_and_step_in_bfloat16, model, 1000)[0]
    split, _, _ = ranks2.run(score_and_step_in_bfloat16, model, 16)[0]
    for row, expected in zip(split, whole, strict=True):
        torch.testing.assert_close(row, expected, atol=0.05, rtol=0)
    gradients = [ranks2.run(gradient_in, model, "bfloat16", tokens)[0] for tokens in (1000, 16)]
    exact = ranks2.run(gradient_in, model, "float32", 1000)[0]
    for name, tensor in exact.items():
        scale = float(tensor.norm())
        assert float((gradients[0][name] - gradients[1][name]).norm()) <= 0.02 * scale, name
        assert float((gradients[0][name] - tensor).norm()) <= 0.05 * scale, name


def gradient_in(model, dtype, micro_batch_tokens):
    """The global gradient by parameter: AdamW's first moment after one step, over 1 - beta."""
    config = TrainConfig(learning_rate=1e-9, max_grad_norm=float("inf"), dtype=dtype, betas=(0.5, 0.5))
    backend = build(model, replace(config, micro_batch_tokens=micro_batch_tokens))
    backend.train_step(local_rows(6), negative_logprobs, 10.0)
    shards = {name: backend._optimizer.moment(p, "exp_avg") / 0.5 for name, p in backend._parameters.items()}
    ranks, device = range(dist.get_world_size()), torch.device("cpu")
    return gather_on_first(backend._layout, shards, ranks, dist.group.WORLD, device)
