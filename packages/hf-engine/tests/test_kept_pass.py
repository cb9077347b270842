"""Updates that go on from the pass that scored their rows, against those that compute it again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from hf_engine import HybridEngine, LoraConfig, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_engine.training.optimizer import local_shard
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2)
NUM_ROWS = 5
TEMPERATURE = {"lm": {"temperature": 0.7}, "value": {}}
LORA = LoraConfig(rank=2, targets=("q_proj", "v_proj"))


class Counted:
    """A backend with the forward passes that it has computed."""

    def __init__(self, model, head="lm", **changes):
        topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
        config = replace(CONFIG, **changes)
        self.backend = load_train_backend("fsdp").build(model, topology=topology, config=config, head=head)
        self.head, self.num_passes = head, 0
        if head == "value":  # which starts at zero
            shard = local_shard(self.backend._model.get_output_embeddings().weight)
            shard.copy_(torch.linspace(-1, 1, shard.numel()).view(shard.shape))
        self.backend._model.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.num_passes += 1

    def score(self, batch, **options):
        compute = self.backend.compute_values if self.head == "value" else self.backend.compute_logprobs
        found = compute(batch, **TEMPERATURE[self.head], **options)
        return {name: column.values() for name, column in found.items()}

    def update(self, batch, **options):
        """The loss and this rank's gradients, by name."""
        output = "values" if self.head == "value" else "logprobs"

        def loss(outputs, micro_batch):
            mask = micro_batch["response_mask"]
            total = (outputs[output].square() * mask).sum()
            if "entropy" in outputs:
                total = total - 0.1 * (outputs["entropy"] * mask).sum()
            return total, {"loss": (float(total.detach()), 1.0)}

        asked = {"entropy": True} if self.head == "lm" else {}
        metrics = self.backend.forward_backward(batch, loss, 10.0, **TEMPERATURE[self.head] | asked | options)
        found = {"loss": torch.tensor(metrics["loss"][0])}
        for name, parameter in self.backend._parameters.items():
            if parameter.grad is not None:
                grad = parameter.grad
                found[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        return found


def rows_of_rank(seed=0):
    batch = build_batch(NUM_ROWS, vocab_size=64, seed=seed)
    return select_rows(batch, range(dist.get_rank(), NUM_ROWS, dist.get_world_size()))


def check_close(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name], each, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare(model, head, changes):
    """Two updates: passes of the scoring, then of the updates; the second one finds changed weights."""
    kept, plain = Counted(model, head, **changes), Counted(model, head, **changes)
    batch, passes = rows_of_rank(), []
    for _ in range(2):
        check_close(kept.score(batch, keep_graph=True), plain.score(batch))
        passes.append(kept.num_passes)
        check_close(kept.update(batch), plain.update(batch))
        passes.append(kept.num_passes)
        assert kept.backend._kept is None
        for each in (kept, plain):
            each.backend.optim_step()
    check_close(kept.score(batch), plain.score(batch))
    return passes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_prompts": False}, {"activation_checkpointing": True}, {"dtype": "bfloat16"}, {"lora": LORA}],
    ids=str,
)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_an_update_goes_on_from_the_pass_that_was_kept(ranks1, model, head, changes):
    assert ranks1.run(compare, model, head, changes) == [[1, 1, 2, 2]]


@pytest.mark.parametrize(("head", "shard"), [("lm", "root"), ("lm", "layer"), ("value", "root"), ("value", "layer")])
def test_ranks_go_on_together(ranks2, model, head, shard):
    assert ranks2.run(compare, model, head, {"shard": shard}) == [[1, 1, 2, 2]] * 2


def with_empty_rank(model, shard):
    """The first rank has all rows; the other one keeps the pass of a dummy."""
    kept, plain = (Counted(model, shard=shard) for _ in range(2))
    batch = build_batch(NUM_ROWS, vocab_size=64)
    batch = select_rows(batch, range(NUM_ROWS) if dist.get_rank() == 0 else [])
    kept.score(batch, keep_graph=True)
    kept_update = kept.backend.forward_backward(
        batch, lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0, **TEMPERATURE["lm"]
    )
    plain.backend.forward_backward(batch, lambda outputs, _: (outputs["logprobs"].sum(), {}), 1.0, **TEMPERATURE["lm"])
    norms = [each.backend.optim_step()["grad_norm"][0] for each in (kept, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
    return kept.num_passes, kept_update["batch/padding"][1] > 0


@pytest.mark.parametrize("shard", ["root", "layer"])
def test_a_rank_without_rows_keeps_in_step(ranks2, model, shard):
    assert ranks2.run(with_empty_rank, model, shard) == [(1, True), (1, False)]


def step(counted, batch, other):
    counted.update(rows_of_rank(seed=1))
    counted.backend.optim_step()


def load_other(counted, batch, other):
    counted.backend.load_hf(other)


def offload(counted, batch, other):
    counted.backend.offload(weights=True)
    counted.backend.reload()


def fail(counted, batch, other):
    with pytest.raises(BackendError, match="loss_fn raised ValueError: a loss that fails"):
        counted.backend.forward_backward(batch, raise_error, 1.0, temperature=0.7)


def raise_error(outputs, micro_batch):
    raise ValueError("a loss that fails")


BETWEEN = {
    "another batch was learned": step,
    "another model was loaded": load_other,
    "everything was offloaded": offload,
    "a loss failed": fail,
}


def update_after(model, other, between, shard):
    kept, plain = (Counted(model, shard=shard) for _ in range(2))
    batch = rows_of_rank()
    kept.score(batch, keep_graph=True)
    for each in (kept, plain):
        BETWEEN[between](each, batch, other)
    assert kept.backend._kept is None
    check_close(kept.score(batch), plain.score(batch))
    before = kept.num_passes, plain.num_passes
    check_close(kept.update(batch), plain.update(batch))
    return kept.num_passes - before[0], plain.num_passes - before[1]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_pass_is_dropped_when(ranks1, ranks2, model, tmp_path, between):
    other = write_tiny_model(tmp_path / "other", seed=7)
    found = [*ranks1.run(update_after, model, other, between, "root")]
    for shard in ("root", "layer"):
        found += ranks2.run(update_after, model, other, between, shard)
    assert all(passes == again > 0 for passes, again in found), found


def reverse(batch):
    return select_rows(batch, list(range(len(batch)))[::-1])


def update_differently(model, change):
    """Passes of an update that does not fit the pass that was kept."""
    changes = {
        "budget": {"micro_batch_tokens": 64},
        "dropout": {"lora": replace(LORA, dropout=0.5)},
        "base": {"lora": LORA},
    }
    kept, plain = (Counted(model, **changes.get(change, {})) for _ in range(2))
    batch, options = rows_of_rank(), {"temperature": 0.9} if change == "temperature" else {}
    with ExitStack() as inside:
        if change == "base":
            inside.enter_context(kept.backend.adapters_off())
        if change == "inference mode":
            inside.enter_context(torch.inference_mode())
        kept.score(batch, keep_graph=True)
    if change == "rows" or (change == "one rank's rows" and dist.get_rank() == 1):
        batch = reverse(batch)
    if change == "written":
        batch["response_ids"].values().fill_(7)
    before = kept.num_passes
    check_close(kept.update(batch, **options), plain.update(batch, **options))
    return kept.num_passes - before


@pytest.mark.parametrize("change", ["temperature", "rows", "written", "budget", "dropout", "base", "inference mode"])
def test_another_update_computes_its_own_pass(ranks1, model, change):
    assert ranks1.run(update_differently, model, change) == [1]


def test_ranks_compute_again_if_one_has_other_rows(ranks2, model):
    assert ranks2.run(update_differently, model, "one rank's rows") == [1, 1]


def update_without_entropy(model):
    """The loss sees what it asks for, though the kept pass has more."""
    kept, plain = (Counted(model) for _ in range(2))
    batch = rows_of_rank()
    kept.score(batch, keep_graph=True)
    check_close(kept.update(batch, entropy=False), plain.update(batch, entropy=False))
    return kept.num_passes


def test_a_loss_sees_no_output_that_it_did_not_ask_for(ranks1, model):
    assert ranks1.run(update_without_entropy, model) == [1]


def score_between(model, shard, is_uneven):
    """Scores of the adapters, of the base, and of drawn adapters, between a kept pass and its update."""
    kept, plain = (Counted(model, shard=shard, lora=LORA, micro_batch_tokens=512) for _ in range(2))
    # With 128 tokens a quarter is full: the first rank keeps its pass and the second does not.
    batch = build_batch(2 if dist.get_rank() == 0 or not is_uneven else 40, vocab_size=64, seed=dist.get_rank())
    kept.score(batch, keep_graph=True)
    has_kept = kept.backend._kept is not None
    check_close(kept.score(batch), plain.score(batch))
    with kept.backend.adapters_off(), plain.backend.adapters_off():
        check_close(kept.score(batch), plain.score(batch))
    before = kept.num_passes
    check_close(kept.update(batch), plain.update(batch))
    passes = kept.num_passes - before
    kept.score(batch, keep_graph=True)
    with (
        kept.backend.perturbed_adapters(seed=3, std=1.0),
        plain.backend.perturbed_adapters(seed=3, std=1.0),
    ):
        check_close(kept.score(batch), plain.score(batch))
    check_close(kept.update(batch), plain.update(batch))
    return has_kept, passes


@pytest.mark.parametrize("shard", ["root", "layer"])
def test_scores_in_between_are_those_of_their_own_weights(ranks1, ranks2, model, shard):
    assert ranks1.run(score_between, model, shard, False) == [(True, 0)]
    assert ranks2.run(score_between, model, shard, False) == [(True, 0), (True, 0)]
    assert ranks2.run(score_between, model, shard, True) == [(True, 1), (False, 1)]


def update_after_generation(model, training_weights, changes):
    kept, plain = (Counted(model, **changes) for _ in range(2))
    batch, topology = rows_of_rank(), Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    rollout = load_rollout_backend("transformers").build(model, topology=topology)
    engine = HybridEngine(kept.backend, rollout, topology, training_weights=training_weights)
    prompts = TensorDict({"prompt_ids": batch["prompt_ids"], "row_id": torch.arange(len(batch))}, [len(batch)])
    for _ in range(2):
        kept.score(batch, keep_graph=True)
        with engine.generation():
            engine.generate(prompts, SamplingParams(max_new_tokens=3))
        check_close(kept.update(batch), plain.update(batch))
        for each in (kept, plain):
            each.backend.optim_step()
    engine.close()
    return kept.num_passes


@pytest.mark.parametrize("training_weights", ["move", "keep"])
def test_a_generation_in_between_changes_no_update(ranks1, ranks2, model, training_weights):
    found = ranks1.run(update_after_generation, model, training_weights, {})
    for shard in ("root", "layer"):
        found += ranks2.run(update_after_generation, model, training_weights, {"shard": shard})
    if training_weights == "keep":
        found += ranks2.run(update_after_generation, model, training_weights, {"lora": LORA})
    assert {*found} == {4}
