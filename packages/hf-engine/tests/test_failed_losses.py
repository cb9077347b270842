"""A loss that fails on one rank while the others pass their rows backward: an error on all of them, and all go on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_protocols import BackendError, ParallelSpec, Topology

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


class FailsOnce:
    """Fails at a micro-batch, counted from one; 0 never fails."""

    def __init__(self, at):
        self._left = at

    def __call__(self, outputs, micro_batch):
        self._left -= 1
        return negative_logprobs(outputs, micro_batch) if self._left else 1 / 0


def weights_of(backend):
    return {name: [part.clone() for part in parts] for name, parts in as_parts(backend.local_weights()).items()}


def equal(one, other):
    return all(torch.equal(*pair) for name in one for pair in zip(one[name], other[name], strict=True))


def fail_on_a_rank(backend_name, sizes, model, options, rows, failing):
    """Returns what this rank was refused with, and whether the weights stayed and a step was that of a new backend."""
    topology = Topology(ParallelSpec.parse(sizes))
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=16, **options)
    built = [load_train_backend(backend_name).build(model, topology=topology, config=config) for _ in range(2)]
    backend, other = built
    before, rank = weights_of(backend), dist.get_rank()
    batch = build_batch(8, vocab_size=64, seed=rank if sizes == "1-1-2" else 0)[: rows[rank]]
    given = [FailsOnce(2 if rank in failing else 0) for _ in range(3)]
    messages = []
    for call in (backend.train_step, backend.forward_backward, backend.train_step):
        with pytest.raises(BackendError) as refused:
            call(batch, given.pop(), 10.0)
        messages.append(str(refused.value))
    with pytest.raises(BackendError, match="an error dropped them"):
        backend.optim_step()
    stayed = equal(weights_of(backend), before) and backend.optimizer_steps == 0
    for each in built:
        each.train_step(batch, negative_logprobs, 10.0)
    is_fresh = equal(weights_of(backend), weights_of(other)) and not equal(weights_of(backend), before)
    for each in built:
        each.close()
    return messages, stayed, is_fresh


@pytest.mark.parametrize(
    ("backend", "sizes", "options", "rows", "failing"),
    [
        pytest.param("fsdp", "1-1-2", {}, (8, 0), (0,), id="the other rank has no rows"),
        pytest.param("fsdp", "1-1-2", {"shard": "layer"}, (8, 8), (1,), id="weights by layer"),
        pytest.param("fsdp", "1-1-2", {"on_nonfinite": "skip"}, (8, 5), (1,), id="steps are skipped"),
        pytest.param("megatron", "1-1-2", {}, (8, 8), (1,), id="megatron"),
        pytest.param("megatron", "1-2-1", {}, (8, 8), (1,), id="one rank of tensor parallelism"),
        pytest.param("megatron", "2-1-1", {}, (8, 8), (1,), id="the last stage"),
    ],
)
def test_all_ranks_raise_the_error_of_one_loss(ranks2, tmp_path, backend, sizes, options, rows, failing):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    answers = ranks2.run(fail_on_a_rank, backend, sizes, model, options, rows, failing)
    for rank, (messages, stayed, is_fresh) in enumerate(answers):
        assert len(messages) == 3 and stayed and is_fresh
        for message in messages:
            assert "raised ZeroDivisionError: division by zero" in message
            assert rank in failing or sizes == "2-1-1" or "rank" in message


def test_an_error_of_ours_stays_itself(ranks1, tmp_path):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    (found,) = ranks1.run(fail_with_our_error, model)
    assert found == "my words"


def fail_with_our_error(model):
    backend = load_train_backend("fsdp").build(
        model, topology=Topology(ParallelSpec(dp_size=1)), config=TrainConfig(learning_rate=1e-2)
    )

    def refuse(outputs, micro_batch):
        raise BackendError("my words")

    with pytest.raises(BackendError) as refused:
        backend.train_step(build_batch(4, vocab_size=64), refuse, 10.0)
    backend.close()
    return str(refused.value)
