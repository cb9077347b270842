"""The advantage worker's metrics on one batch, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.advantages import GAE, FilterMetric
from hf_algorithms.workers import AdvantageWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerSpec
from hf_protocols import BatchError, ConfigError, ParallelSpec, Topology


def jagged(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def run_worker(method: str, batch: TensorDict, *args: object, **options: object) -> Any:
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=AdvantageWorker, topology=Topology(ParallelSpec()))
        group = executor.build_groups(ResourcePool([1], device="cpu"), {"advantage": spec})["advantage"]
        return getattr(group, method)(batch, *args, **options).result()


def batch_with_observations() -> TensorDict:
    """Two responses; the first has a tool's answer inside, with log-probs that nobody drew, the second is left out."""
    nan = float("nan")
    return TensorDict(
        {
            "response_mask": jagged([1, 0, 1], [0, 0], dtype=torch.int64),
            "scores": torch.tensor([1.0, 0.0]),
            "values": jagged([0.5, nan, 0.25], [nan, nan]),
            "old_logprobs": jagged([-1.0, -9.0, -3.0], [-9.0, -9.0]),
            "ref_logprobs": jagged([-0.5, -5.0, -2.0], [-5.0, -5.0]),
            "rollout_logprobs": jagged([-1.0, nan, -2.5], [nan, nan]),
        },
        batch_size=[2],
    )


def test_metrics_count_trained_tokens_only() -> None:
    found = run_worker("compute_metrics", batch_with_observations())
    difference = np.array([-0.5, -1.0])
    k3 = np.exp(-difference) - 1 + difference
    wanted = {
        "kl/k1": difference.mean(),
        "kl/k2": (difference**2 / 2).mean(),
        "kl/k3": k3.mean(),
        "kl_sequence/k1": difference.sum() / 2,
        "kl_sequence/k3": k3.sum() / 2,
        "response/tokens": 1.0,
        "reward/mean": 0.5,
        "reward/std": 0.5**0.5,
        "reward/unscorable": 0.0,
        "rollout/logprob_gap": 0.25,
        "rollout/mismatch_k3": (np.exp(-0.5) - 1 + 0.5) / 2,
        "rollout/weight_mean": (1 + np.exp(-0.5)) / 2,
        "rollout/weight_max": 1.0,
        "rollout/logprob_gap_max": 0.5,
        "rollout/logprob_gap_share": 0.5,
    }
    assert found == pytest.approx(wanted)


def test_metrics_without_a_trained_token_are_numbers() -> None:
    batch = batch_with_observations()
    batch["response_mask"] = jagged([0, 0, 0], [0, 0], dtype=torch.bool)
    found = run_worker("compute_metrics", batch)
    assert found == {
        "kl_sequence/k1": 0.0,
        "kl_sequence/k3": 0.0,
        "response/tokens": 0.0,
        "reward/mean": 0.5,
        "reward/std": 0.5**0.5,
        "reward/unscorable": 0.0,
    }


def test_advantages_keep_the_rows_of_the_mask() -> None:
    found = run_worker("compute_advantages", batch_with_observations(), GAE())
    advantages, returns = ([row.tolist() for row in found[name].unbind()] for name in ("advantages", "returns"))
    assert [len(row) for row in advantages] == [3, 2]
    assert advantages[0][1] == returns[0][1] == 0.0
    assert advantages[1] == returns[1] == [0.0, 0.0]
    np.testing.assert_allclose(returns[0][2], 1.0)


def test_metrics_give_mean_maximum_and_share_of_logprob_gaps() -> None:
    old, sampled = ([-1.0, -2.0, -3.0], [-0.5]), ([-1.05, -2.0, -3.4], [-0.2])
    batch = TensorDict(
        {
            "response_mask": jagged([1, 1, 1], [1], dtype=torch.bool),
            "scores": torch.tensor([1.0, 0.0]),
            "old_logprobs": jagged(*old),
            "ref_logprobs": jagged(*old),
            "rollout_logprobs": jagged(*sampled),
        },
        batch_size=[2],
    )
    gaps = np.abs(np.concatenate(old) - np.concatenate(sampled))
    found = run_worker("compute_metrics", batch)
    trusting = run_worker("compute_metrics", batch, compares_sampler=False)
    np.testing.assert_allclose(found["rollout/logprob_gap"], gaps.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["rollout/logprob_gap_max"], gaps.max(), rtol=1e-5)
    np.testing.assert_allclose(found["rollout/logprob_gap_share"], (gaps > 0.1).mean())
    assert not [name for name in trusting if "gap" in name]
    assert trusting["response/tokens"] == 2.0


class Given:
    """An estimator of a user's own: returns what it is given, or what it computes from the columns."""

    reads = ("response_mask",)
    writes = ("advantages",)

    def __init__(self, found: Any) -> None:
        self.found = found

    def __call__(self, columns: Any) -> Any:
        return self.found(columns) if callable(self.found) else {"advantages": self.found}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            lambda columns: columns["values"],
            r"(?s)Given raised KeyError: 'values'\n  at .*test_advantage_worker.py:\d+",
        ),
        (lambda columns: columns["values"], "(?s)its reads are 'response_mask'"),
        (lambda columns: 1 / 0, "(?s)Given raised ZeroDivisionError: division by zero"),
        (lambda columns: None, r"Given: it returned None\. Return a dict of tensors"),
        (lambda columns: {}, r"Given: it returned no columns and declares advantages\. Return what writes names"),
        (lambda columns: {1: 2}, "Given: it returned 1 and declares advantages"),
        (np.zeros((2, 3)), r"(?s)advantages is .* \(ndarray\)\. Return a tensor"),
        (torch.zeros(2, 1), r"advantages has the shape \(2, 1\)\. Return one value for each row, \(2,\), or for each"),
        (torch.zeros(3), r"advantages has the shape \(3,\)"),
        (torch.zeros(2, 3, dtype=torch.bool), "advantages has dtype torch.bool. Return real numbers"),
        (torch.zeros(2, 3, dtype=torch.complex64), "advantages has dtype torch.complex64"),
        (torch.tensor([1.0, float("inf")]), "advantages of row 1 is infinite or not a number"),
        (torch.tensor([[1.0, 0.0, float("nan")]] * 2), "advantages of row 0 is infinite or not a number"),
    ],
)
def test_an_estimator_that_goes_wrong_is_named(found: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        run_worker("compute_advantages", batch_with_observations(), Given(found))


def test_an_advantage_for_each_row_is_that_of_its_tokens() -> None:
    """As many rows as tokens: nothing else shows which of the two a value is for."""

    class PerRow(GAE):
        def __call__(self, columns: Any) -> Any:
            return {"advantages": torch.tensor([1.0, 2.0]), "returns": torch.zeros_like(columns["values"])}

    batch = TensorDict(
        {"response_mask": jagged([1, 1], [1, 0]), "scores": torch.zeros(2), "values": jagged([0.0, 0.0], [0.0, 0.0])},
        batch_size=[2],
    )
    found = run_worker("compute_advantages", batch, PerRow())
    assert [row.tolist() for row in found["advantages"].unbind()] == [[1.0, 1.0], [2.0, 0.0]]


def test_values_of_untrained_tokens_may_be_anything() -> None:
    values = torch.tensor([[1.0, float("nan"), 2.0], [float("inf")] * 3])
    found = run_worker("compute_advantages", batch_with_observations(), Given(values))
    assert found["advantages"].unbind()[0].tolist() == [1.0, 0.0, 2.0]


def test_a_class_is_not_an_estimator() -> None:
    with pytest.raises(ConfigError, match=r"estimator Given: it is a class\. Pass an instance, Given\(\.\.\.\)"):
        run_worker("compute_advantages", batch_with_observations(), Given)


def test_returns_of_rows_without_a_score_are_not_measured() -> None:
    batch = TensorDict(
        {
            "response_mask": jagged([1, 1], [1], dtype=torch.int64),
            "returns": jagged([2.0, 4.0], [9.0]),
            "scores": torch.tensor([1.0, float("nan")]),
        },
        batch_size=[2],
    )
    found = run_worker("measure_returns", batch)
    assert (found["count"], found["mean"]) == (2.0, 3.0)


def test_returns_are_measured_with_those_after_a_response() -> None:
    nan = float("nan")
    batch = TensorDict(
        {
            "response_mask": jagged([1, 0, 1], [1], dtype=torch.int64),
            "returns": jagged([2.0, nan, 4.0], [9.0]),
            "next_returns": torch.tensor([nan, 5.0]),
        },
        batch_size=[2],
    )
    with_after, without = (
        run_worker("measure_returns", batch),
        run_worker("measure_returns", batch.exclude("next_returns")),
    )
    for found, returns in ((with_after, [2.0, 4.0, 9.0, 5.0]), (without, [2.0, 4.0, 9.0])):
        squares = len(returns) * np.var(returns)
        assert found == pytest.approx({"count": len(returns), "mean": np.mean(returns), "squares": squares})


def test_groups_are_selected_by_the_named_metric() -> None:
    batch = TensorDict(
        {
            "response_mask": jagged([1, 0], [1, 1], [1], [1], dtype=torch.int64),
            "scores": torch.tensor([1.0, 1.0, 0.0, 1.0]),
            "group_id": torch.tensor([5, 5, 7, 7]),
        },
        batch_size=[4],
    )
    assert run_worker("select_groups", batch) == [7]
    assert run_worker("select_groups", batch, FilterMetric("response_tokens")) == [5]
