"""Weights that scoring gathers and the update after it finds, against a backend whose scoring gives them up."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_engine import LoraConfig, TrainConfig, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, ParallelSpec, Topology

NUM_ROWS = 5
CONFIG = TrainConfig(learning_rate=1e-2, shard="root")
LORA = LoraConfig(rank=2, targets=("q_proj", "v_proj"))


def build(model, *, trainable=True, **changes):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    config = replace(CONFIG, **changes)
    return load_train_backend("fsdp").build(model, topology=topology, config=config, trainable=trainable)


def rows_of_rank(seed=0):
    batch = build_batch(NUM_ROWS, vocab_size=64, seed=seed)
    return select_rows(batch, range(dist.get_rank(), NUM_ROWS, dist.get_world_size()))


def score(backend, batch, **options):
    return backend.compute_logprobs(batch, **options)["logprobs"].values().clone()


def add_gradients(backend, batch):
    backend.forward_backward(batch, square, 10.0)


def square(outputs, micro_batch):
    return (outputs["logprobs"].square() * micro_batch["response_mask"]).sum(), {}


def step(backend):
    """The norm of the gradients, which is over all ranks."""
    return backend.optim_step()["grad_norm"][0]


def gathered_bytes(backend):
    state = backend._model._get_fsdp_state()
    outputs = [each.all_gather_outputs for group in state._fsdp_param_groups for each in group.fsdp_params]
    return sum(output.untyped_storage().nbytes() for each in outputs for output in each)


class Gathers:
    """The collectives that gather weights, counted."""

    def __enter__(self):
        self.num = 0
        gather = dist.all_gather_single

        def count(*arguments, **options):
            self.num += 1
            return gather(*arguments, **options)

        self.patch = patch.object(dist, "all_gather_single", count)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def count_gathers(model, keep_graph, changes):
    """Gathers of two scorings, of an update, of its step, and of a scoring after it."""
    backend, batch, found = build(model, **changes), rows_of_rank(), []
    for act in (
        lambda: score(backend, batch, keep_graph=keep_graph),
        lambda: score(backend, batch, keep_graph=keep_graph),
        lambda: add_gradients(backend, batch),
        lambda: step(backend),
        lambda: score(backend, batch),
    ):
        with Gathers() as gathers:
            act()
        found.append(gathers.num)
    return found


@pytest.mark.parametrize("keep_graph", [False, True])
def test_passes_of_one_iteration_gather_once(ranks2, model, keep_graph):
    assert ranks2.run(count_gathers, model, keep_graph, {}) == [[1, 0, 0, 0, 1]] * 2
    assert ranks2.run(count_gathers, model, keep_graph, {"lora": LORA}) == [[1, 0, 0, 0, 1]] * 2


def count_of_layers(model):
    first, second, update, _, after = count_gathers(model, False, {"shard": "layer"})
    return first == second == after and update > first > 1


def test_layers_are_gathered_for_each_pass(ranks2, model):
    assert ranks2.run(count_of_layers, model) == [True] * 2


def count_of_two(model, trainable, limit):
    """Gathers of two scorings, by the bytes that may be held; the model has more than a kilobyte."""
    with patch("hf_engine.training.fsdp._backend._MOST_KEPT_BYTES", limit):
        backend, batch = build(model, trainable=trainable), rows_of_rank()
    with Gathers() as gathers:
        score(backend, batch)
        score(backend, batch)
    return gathers.num


@pytest.mark.parametrize(("trainable", "limit", "num"), [(True, 1 << 28, 1), (True, 1 << 10, 2), (False, 1 << 28, 2)])
def test_small_trained_models_hold_weights_between_passes(ranks2, model, trainable, limit, num):
    assert ranks2.run(count_of_two, model, trainable, limit) == [num, num]


def read(backend, other):
    backend.local_weights()


def write(backend, other):
    """As a transition does, with the live weights, and without a word to the backend."""
    for shard in backend.local_weights().values():
        shard.mul_(0.5)


def write_later(backend, other):
    """To views that were taken before a further scoring."""
    views = backend.local_weights()
    score(backend, rows_of_rank(), keep_graph=True)
    for shard in views.values():
        shard.mul_(0.5)


def load(backend, other):
    backend.load_hf(other)


def offload(backend, other):
    backend.offload(weights=True)
    backend.reload()


def offload_moments(backend, other):
    backend.offload()
    backend.reload()


def learn_another(backend, other):
    add_gradients(backend, rows_of_rank(seed=1))
    step(backend)


def fail(backend, other):
    with pytest.raises(BackendError, match="loss_fn raised ValueError: a loss that fails"):
        backend.forward_backward(rows_of_rank(), raise_error, 10.0)


def raise_error(outputs, micro_batch):
    raise ValueError("a loss that fails")


def be_refused(backend, other):
    with pytest.raises(Exception, match="denominator"):
        backend.forward_backward(rows_of_rank(), square, "ten")


def score_inferring(backend, other):
    with torch.inference_mode():
        score(backend, rows_of_rank())


BETWEEN = {
    each.__name__: each
    for each in (
        read,
        write,
        write_later,
        load,
        offload,
        offload_moments,
        learn_another,
        fail,
        be_refused,
        score_inferring,
    )
}


def continue_after(model, other, between, ranks, keep_graph, **changes):
    """Scores and steps after something happened on some ranks, and the same of a backend that scored nothing before."""
    held, fresh = build(model, **changes), build(model, **changes)
    batch = rows_of_rank()
    score(held, batch, keep_graph=keep_graph)
    if dist.get_rank() in ranks:
        for each in (held, fresh):
            BETWEEN[between](each, other)
    for _ in range(2):
        torch.testing.assert_close(score(held, batch, keep_graph=keep_graph), score(fresh, batch))
        for each in (held, fresh):
            add_gradients(each, batch)
        assert step(held) == pytest.approx(step(fresh), rel=1e-5)
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
def test_held_weights_are_those_of_now_after(ranks2, model, tmp_path, between, keep_graph):
    other = write_tiny_model(tmp_path / "other", seed=7)
    assert ranks2.run(continue_after, model, other, between, (0, 1), keep_graph) == [True, True]


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("between", ["read", "write", "offload", "offload_moments"])
def test_ranks_gather_together_if_one_freed_its_weights(ranks2, model, tmp_path, between, keep_graph):
    for rank in (0, 1):
        assert ranks2.run(continue_after, model, tmp_path, between, (rank,), keep_graph) == [True, True]


def update_after(model, between):
    """Updates, without a scoring in between, of a backend that kept a pass and one that did not."""
    held, fresh, batch = build(model), build(model), rows_of_rank()
    score(held, batch, keep_graph=True)
    for each in (held, fresh):
        BETWEEN[between](each, model)
        add_gradients(each, batch)
    assert step(held) == pytest.approx(step(fresh), rel=1e-5)
    return True


@pytest.mark.parametrize("between", ["write", "write_later"])
def test_an_update_sees_what_others_wrote(ranks1, ranks2, model, between):
    assert ranks1.run(update_after, model, between) == [True]
    assert ranks2.run(update_after, model, between) == [True, True]


def lora_after(model, other, between):
    return continue_after(model, other, between, (0, 1), False, lora=LORA)


@pytest.mark.parametrize("between", ["read", "write"])
def test_merged_weights_are_read_in_between(ranks2, model, tmp_path, between):
    assert ranks2.run(lora_after, model, tmp_path, between) == [True, True]


def drop_by_step(backend, folder):
    add_gradients(backend, rows_of_rank())


def drop_by_drawing(backend, folder):
    with backend.perturbed_adapters(seed=1, std=1.0):
        pass


FREEING = {
    "read": (read, {}),
    "read merged": (read, {"lora": LORA}),
    "load": (load, {}),
    "offload": (lambda backend, folder: backend.offload(), {}),
    "offload weights": (lambda backend, folder: backend.offload(weights=True), {}),
    "save": (lambda backend, folder: backend.save_state(folder / "state"), {}),
    "update": (drop_by_step, {}),
    "failure": (fail, {}),
    "draw": (drop_by_drawing, {"lora": LORA}),
}


def bytes_after(model, name, folder):
    act, changes = FREEING[name]
    backend = build(model, **changes)
    found = [gathered_bytes(backend)]
    score(backend, rows_of_rank(), keep_graph=True)
    found.append(gathered_bytes(backend))
    act(backend, model if name == "load" else folder)
    return [*found, gathered_bytes(backend)]


@pytest.mark.parametrize("name", FREEING)
def test_gathered_weights_are_freed_by(ranks2, model, tmp_path, name):
    for before, kept, after in ranks2.run(bytes_after, model, name, tmp_path):
        assert before == after == 0 < kept


def score_unevenly(model):
    """One rank keeps its graph, the other one has too many tokens, and then one of them has no rows."""
    held, fresh = (build(model, micro_batch_tokens=512) for _ in range(2))
    few, many = build_batch(2, vocab_size=64), build_batch(40, vocab_size=64)
    batches = [few, many] if dist.get_rank() == 0 else [many, select_rows(many, [])]
    for batch in batches:
        torch.testing.assert_close(score(held, batch, keep_graph=True), score(fresh, batch))
        score(held, batch)
        for each in (held, fresh):
            add_gradients(each, batch)
        assert step(held) == pytest.approx(step(fresh), rel=1e-5)
    return True


def test_ranks_with_other_numbers_of_tokens_gather_together(ranks2, model):
    assert ranks2.run(score_unevenly, model) == [True, True]


def save_between(model, folder):
    """A checkpoint between scoring and update holds, and restores, the weights of then."""
    held, fresh, batch = build(model), build(model), rows_of_rank()
    score(held, batch)
    held.save_state(folder)
    add_gradients(held, batch)
    step(held)
    score(held, batch)
    held.load_state(folder)
    torch.testing.assert_close(score(held, batch), score(fresh, batch))
    return True


def test_a_state_is_saved_and_loaded_in_between(ranks2, model, tmp_path):
    assert ranks2.run(save_between, model, tmp_path / "state") == [True, True]


def cast_on_one_rank(model):
    """FSDP2 casts float32 masters there, in place of gathering."""
    held, fresh = (build(model, dtype="bfloat16") for _ in range(2))
    batch = rows_of_rank()
    for _ in range(2):
        torch.testing.assert_close(score(held, batch), score(fresh, batch))
        add_gradients(held, batch)
        fresh.local_weights()
        add_gradients(fresh, batch)
        assert step(held) == pytest.approx(step(fresh), rel=1e-5)
    return True


def test_masters_are_cast_once_on_one_rank(ranks1, model):
    assert ranks1.run(cast_on_one_rank, model) == [True]
