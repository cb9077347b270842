"""The mistake of one rank, found before they communicate, is an error on all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, build_groups, load_train_backend
from hf_engine.agreement import together
from hf_engine.process_groups import default_timeout
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_protocols import BackendError, BatchError, HybridFlowError, ParallelSpec, Topology

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def load_what_rank_1_refuses(backend_name, sizes, models, folder):
    """Loads another directory on rank 1 than on rank 0."""
    topology, is_second = Topology(ParallelSpec.parse(sizes)), dist.get_rank() == 1
    config = TrainConfig(learning_rate=1e-2)
    backend = load_train_backend(backend_name).build(models["mine"], topology=topology, config=config)
    backend.save_state(folder / "state")
    backend.train_step(build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    changes = backend.weight_changes
    before = {name: [part.clone() for part in parts] for name, parts in as_parts(backend.local_weights()).items()}
    with pytest.raises(BackendError, match=r"^(rank 1 refused: )?.*wide holds another model"):
        backend.load_hf(models["wide" if is_second else "other"])
    with pytest.raises(BackendError, match=r"the ranks were given different directories"):
        backend.load_state(folder / ("absent" if is_second else "state"))
    for name, parts in as_parts(backend.local_weights()).items():
        assert all(torch.equal(part, old) for part, old in zip(parts, before[name], strict=True)), name
    assert (backend.weight_changes, backend.optimizer_steps) == (changes, 1)
    backend.load_hf(models["other"])
    assert backend.optimizer_steps == 0
    backend.close()
    return True


@pytest.mark.parametrize(("backend", "sizes"), [("fsdp", "1-1-2"), ("megatron", "1-2-1")])
def test_what_one_rank_cannot_load_no_rank_loads(ranks2, tmp_path, backend, sizes):
    models = {
        "mine": write_tiny_model(tmp_path / "mine", **SIZES),
        "other": write_tiny_model(tmp_path / "other", seed=1, **SIZES),
        "wide": write_tiny_model(tmp_path / "wide", vocab_size=80, **SIZES),
    }
    (tmp_path / "files").mkdir()
    assert ranks2.run(load_what_rank_1_refuses, backend, sizes, models, tmp_path / "files") == [True, True]


def build_what_rank_1_lacks(backend_name, model):
    """Within no deadline: rank 0 gets rank 1's reason, and both build the next model over the same groups."""
    backend_class, topology = load_train_backend(backend_name), Topology(ParallelSpec(dp_size=2))
    config = TrainConfig(learning_rate=1e-2)
    with pytest.raises(BackendError, match="absent"):
        backend_class.build(
            Path(model).with_name("absent") if dist.get_rank() else model, topology=topology, config=config
        )
    backend = backend_class.build(model, topology=topology, config=config)
    backend.train_step(build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    backend.close()
    return True


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_one_rank_cannot_build_no_rank_builds(ranks2, tmp_path, backend):
    assert ranks2.run(build_what_rank_1_lacks, backend, write_tiny_model(tmp_path / "model", **SIZES)) == [True, True]


def timeouts_of_groups():
    group = build_groups(Topology(ParallelSpec(tp_size=2)), "dp")
    options = group._get_backend(torch.device("cpu")).options
    return default_timeout().total_seconds(), options._timeout.total_seconds()


def test_groups_wait_as_long_as_the_default_group():
    with LocalRanks(2, timeout_s=17) as ranks:
        assert ranks.run(timeouts_of_groups) == [(17.0, 17.0)] * 2


def disagree():
    """Checks that each rank raises the mistake of one; numbers may differ, and the group goes on."""
    is_second = dist.get_rank() == 1
    group = dist.new_group([1, 0], sort_ranks=False)
    for failure, own in ((BatchError("mine"), "^mine$"), (OSError("full"), "^rank 1 refused: OSError: full; nothing ")):
        told = own if is_second else r"^rank 1 refused: (OSError: full|mine); nothing was written$"
        for each in (None, group):
            with pytest.raises(BatchError if own == "^mine$" and is_second else BackendError, match=told):
                raise_together(failure if is_second else None, each)
    with pytest.raises(BackendError, match=r"^rank 0 refused: OSError: 0; rank 1 refused: OSError: 1; nothing was"):
        raise_together(OSError(str(dist.get_rank())), None)
    with pytest.raises(BackendError, match=r"^rank 0 refused: OSError: full; nothing was written$"):
        raise_together(OSError("full"), None)
    alike = []
    for number in (7, 7 + 2**40 * dist.get_rank()):
        with together("nothing was written", group) as agreement:
            agreement.number = number
        alike.append(agreement.is_alike)
    return alike


def call_other_methods(model):
    """Returns the errors of this rank where rank 1 calls another method, and whether all can step afterwards."""
    backend = load_train_backend("fsdp").build(
        model, topology=Topology(ParallelSpec(dp_size=3)), config=TrainConfig(learning_rate=1e-2)
    )
    step = partial(backend.train_step, build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    heard = []
    for other in (step, partial(backend.load_hf, model), partial(backend.load_hf, "absent")):
        with pytest.raises(HybridFlowError) as refusal:
            (other if dist.get_rank() == 1 else partial(backend.export_hf, "never written"))()
        heard.append(str(refusal.value))
    return heard, step()["grad_norm"][0] > 0


def score_on_rank_1_alone(model):
    """Returns the errors of this rank where rank 1 scores or adds gradients, and whether all can step afterwards."""
    backend = load_train_backend("fsdp").build(
        model, topology=Topology(ParallelSpec(dp_size=3)), config=TrainConfig(learning_rate=1e-2)
    )
    batch = build_batch(4, vocab_size=64)
    step = partial(backend.train_step, batch, negative_logprobs, 1.0)
    add = partial(backend.forward_backward, batch, negative_logprobs, 1.0)
    heard = []
    for own, other in ((step, partial(backend.compute_logprobs, batch)), (step, add)):
        with pytest.raises(HybridFlowError) as refusal:
            (other if dist.get_rank() == 1 else own)()
        heard.append(str(refusal.value))
    return heard, step()["grad_norm"][0] > 0


def test_scoring_on_one_rank_alone_is_refused(ranks3, tmp_path):
    text = (
        "the ranks are in different methods: rank 0 and 1 more called train_step, rank 1 called {}; nothing was done. "
        "Call the same methods in the same order on all ranks"
    )
    heard = [text.format(method) for method in ("compute_logprobs", "forward_backward")]
    assert ranks3.run(score_on_rank_1_alone, write_tiny_model(tmp_path / "model")) == [(heard, True)] * 3


def test_ranks_in_different_methods_are_named(ranks3, tmp_path):
    text = (
        "the ranks are in different methods: rank 0 and 1 more called export_hf, rank 1 called {}; nothing was done. "
        "Call the same methods in the same order on all ranks"
    )
    heard = [text.format(method) for method in ("train_step", "load_hf", "load_hf")]
    assert ranks3.run(call_other_methods, write_tiny_model(tmp_path / "model")) == [(heard, True)] * 3
    assert not Path("never written").exists()


def raise_together(failure, group):
    with together("nothing was written", group):
        if failure is not None:
            raise failure


def test_the_mistake_of_one_rank_is_an_error_on_all(ranks2):
    assert ranks2.run(disagree) == [[True, False]] * 2
