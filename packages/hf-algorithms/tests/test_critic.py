"""The critic's worker: values in the unit of rewards, and the value after the last token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from hf_algorithms.jagged import pad_rows, to_jagged
from hf_algorithms.losses import ValueLoss
from hf_algorithms.value_scale import ValueScale
from hf_algorithms.workers import CriticWorker
from hf_controller import WorkerContext
from hf_engine import TrainConfig
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import GenerationSpec, ParallelSpec, Topology

NUM_ROWS = 6


def build(model: str, *, offload: bool = False) -> CriticWorker:
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    context = WorkerContext(role="critic", rank=dist.get_rank(), world_size=dist.get_world_size(), topology=topology)
    return CriticWorker(context, model=model, backend="fsdp", training=TrainConfig(learning_rate=1e-3), offload=offload)


def own_rows(batch: TensorDict) -> TensorDict:
    return select_rows(batch, range(dist.get_rank(), NUM_ROWS, dist.get_world_size()))


def shorten(batch: TensorDict) -> TensorDict:
    """The rows without their last token."""
    found = batch.copy()
    for name in ("response_ids", "response_mask"):
        found[name] = to_jagged([row[:-1] for row in batch[name].unbind()])
    return found


def values_of(model: str) -> dict[str, Any]:
    """Values of this rank's rows, of the same rows without their last token, and of them with the value after it."""
    worker, batch = build(model), build_batch(NUM_ROWS, vocab_size=64)
    batch["response_mask"] = to_jagged(
        [torch.ones(len(row), dtype=torch.bool) for row in batch["response_ids"].unbind()]
    )
    batch = own_rows(batch)
    short = shorten(batch)
    longest = max(len(row) for row in short["response_ids"].unbind())
    found = {
        "plain": worker.compute_values(batch)["values"],
        "scaled": worker.compute_values(batch, scale=ValueScale(mean=5.0, std=3.0))["values"],
        "mask": batch["response_mask"],
    }
    for name, options in (("after", {}), ("after_scaled", {"scale": ValueScale(mean=5.0, std=3.0)})):
        after = worker.compute_values_after(short, max_tokens=100, **options)
        found |= {name: after["values"], f"{name}_next": after["next_values"]}
    found["no_room"] = worker.compute_values_after(short, max_tokens=longest)["next_values"]
    found["lengths"] = torch.tensor([len(row) for row in short["response_ids"].unbind()])
    worker.close()
    return {name: pad_rows(column) for name, column in found.items()}


def update(model: str) -> dict[str, float]:
    """Metrics of an update whose returns are 2 on every token and 7 after it, in rows 0 to 3."""
    worker, batch = build(model), build_batch(NUM_ROWS, vocab_size=64)
    batch["returns"] = to_jagged([torch.full((len(row),), 2.0) for row in batch["response_ids"].unbind()])
    batch["next_returns"] = torch.tensor([7.0] * 4 + [float("nan")] * 2)
    batch["next_values"] = torch.zeros(NUM_ROWS)
    metrics = worker.update_critic(own_rows(batch), ValueLoss())
    tokens = pad_rows(batch["response_mask"]).sum()
    worker.close()
    return {name: total for name, (total, _) in metrics.items()} | {
        "count": metrics["critic/returns_mean"][1],
        "tokens": float(tokens),
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=64))


def test_values_are_in_the_unit_of_rewards(ranks: LocalRanks, model: str) -> None:
    for found in ranks.run(values_of, model):
        mask = found["mask"].bool()
        np.testing.assert_allclose(found["scaled"][mask], 5.0 + 3.0 * found["plain"][mask], rtol=1e-5, atol=1e-5)


def test_value_after_a_response_is_that_before_the_next_token(ranks: LocalRanks, model: str) -> None:
    for found in ranks.run(values_of, model):
        lengths = found["lengths"].tolist()
        assert max(lengths) > min(lengths)
        for row, length in enumerate(lengths):
            values = found["plain"][row]
            np.testing.assert_allclose(found["after"][row, :length], values[:length], rtol=1e-4, atol=1e-5)
            for name, unit, shift in (("after_next", 1.0, 0.0), ("after_scaled_next", 3.0, 5.0)):
                wanted = shift + unit * float(values[length]) if length else float("nan")
                assert float(found[name][row]) == pytest.approx(wanted, rel=1e-4, abs=1e-5, nan_ok=True)
        assert found["no_room"].isnan().tolist() == [length in (0, max(lengths)) for length in lengths]


def test_an_update_learns_the_return_after_a_response(ranks: LocalRanks, model: str) -> None:
    found = ranks.run(update, model)
    tokens = found[0]["tokens"]
    assert sum(each["count"] for each in found) == tokens + 4
    assert sum(each["critic/returns_mean"] for each in found) == pytest.approx(2 * tokens + 4 * 7)


def list_hints(model: str, offload: bool) -> list[bool]:
    """Hints that the backend is given for passes that a step wants kept."""
    worker, batch, found = build(model, offload=offload), own_rows(build_batch(NUM_ROWS, vocab_size=64)), []
    compute = worker._train.compute_values

    def note(batch: TensorDict, *, keep_graph: bool) -> TensorDict:
        found.append(keep_graph)
        return compute(batch, keep_graph=keep_graph)

    with mock.patch.object(worker._train, "compute_values", note):
        worker.compute_values(batch, keep_graph=True)
        worker.compute_values_after(batch, max_tokens=100, keep_graph=True)
    worker.close()
    return found


def test_an_offloaded_critic_keeps_no_pass(ranks: LocalRanks, model: str) -> None:
    assert ranks.run(list_hints, model, False) == [[True, True]] * 2
    assert ranks.run(list_hints, model, True) == [[False, False]] * 2
