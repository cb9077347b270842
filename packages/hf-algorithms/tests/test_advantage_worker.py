"""The advantage worker's metrics on one batch, against numpy."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from hf_algorithms.workers import AdvantageWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerSpec
from hf_protocols import ParallelSpec, Topology


def jagged(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def test_the_samplers_mismatch_is_shown_by_mean_maximum_and_share() -> None:
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
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=AdvantageWorker, topology=Topology(ParallelSpec()))
        group = executor.build_groups(ResourcePool([1], device="cpu"), {"advantage": spec})["advantage"]
        found = group.compute_metrics(batch).result()
        trusting = group.compute_metrics(batch, compares_sampler=False).result()
    np.testing.assert_allclose(found["rollout/logprob_gap"], gaps.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["rollout/logprob_gap_max"], gaps.max(), rtol=1e-5)
    np.testing.assert_allclose(found["rollout/logprob_gap_share"], (gaps > 0.1).mean())
    assert not [name for name in trusting if "gap" in name]
    assert trusting["response/tokens"] == 2.0
