"""Evaluations of fewer rows than ranks: every row is generated from, scored and counted once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.evaluation.validation import evaluate, evaluate_with_samples, measure_divergence
from hf_algorithms.roles import Roles, least_rows
from hf_algorithms.workers import AdvantageWorker
from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec
from hf_engine import SamplingParams
from hf_protocols import DP, RANK_ZERO, THREE_D, THREE_D_ALL_MICRO_DP, GenerationSpec, ParallelSpec, Topology, register
from hf_protocols.errors import RewardError

SAMPLING = SamplingParams(max_new_tokens=2)
SEEN: list[tuple[str, int, list[int]]] = []
"""Method, rank and row ids of every call; all ranks run in this process."""


class WatchedFunction(Worker):
    needs_process_group = False

    def note(self, method: str, batch: TensorDict) -> list[int]:
        rows = batch["row_id"].tolist()
        SEEN.append((method, self.context.rank, rows))
        assert rows, "no rank is without a row"
        return rows


def jagged(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


class Actor(WatchedFunction):
    @register(protocol=THREE_D_ALL_MICRO_DP, rows="times", writes=("response_ids", "response_mask", "rollout_logprobs"))
    def generate_sequences(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        rows = self.note("generate", batch)
        columns = {
            "response_ids": jagged([[row, row] for row in rows], torch.int64),
            "response_mask": jagged([[1, 1] for _ in rows], torch.bool),
            "rollout_logprobs": jagged([[-1.0, -1.0] for _ in rows]),
        }
        return TensorDict(columns, batch_size=[len(rows)])

    @register(protocol=THREE_D, writes=("old_logprobs",))
    def compute_logprobs(self, batch: TensorDict, *, temperature: float) -> TensorDict:
        rows = self.note("logprobs", batch)
        return TensorDict({"old_logprobs": jagged([[-1.0, -1.0] for _ in rows])}, batch_size=[len(rows)])


class CountedReference(WatchedFunction):
    @register(protocol=THREE_D, writes=("ref_logprobs",))
    def compute_ref_logprobs(self, batch: TensorDict, *, temperature: float) -> TensorDict:
        rows = self.note("ref_logprobs", batch)
        found = jagged([[-1.0 - row, -1.0 - row] for row in rows])
        return TensorDict({"ref_logprobs": found}, batch_size=[len(rows)])


class Reward(WatchedFunction):
    @staticmethod
    def score(rows: list[int]) -> list[float]:
        return [float(row) ** 2 for row in rows]

    @register(protocol=DP, writes=("scores",))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        rows = self.note("reward", batch)
        return TensorDict({"scores": torch.zeros(len(rows))}, batch_size=[len(rows)])

    @register(protocol=DP, writes=("metric_scores",))
    def compute_metric(self, batch: TensorDict) -> TensorDict:
        """Row r scores r squared: a row that counts twice changes the mean."""
        rows = self.note("metric", batch)
        scores = torch.tensor(self.score(rows), dtype=torch.float64)
        return TensorDict({"metric_scores": scores}, batch_size=[len(rows)])

    @register(protocol=RANK_ZERO, returns="object")
    def collect_samples(self, batch: TensorDict) -> list[dict[str, Any]]:
        return [{"row": row} for row in self.note("samples", batch)]


WORKERS = {"actor": Actor, "reference": CountedReference, "reward": Reward, "advantage": AdvantageWorker}


@pytest.fixture
def executor() -> Iterator[InProcessExecutor]:
    SEEN.clear()
    with InProcessExecutor() as made:
        yield made


def build(executor: InProcessExecutor, sizes: Mapping[str, ParallelSpec], generation: GenerationSpec) -> Roles:
    groups = {}
    for role, worker in WORKERS.items():
        topology = Topology(sizes.get(role, ParallelSpec()), generation if role == "actor" else None)
        pool = ResourcePool([topology.world_size], device="cpu", name=role)
        groups |= executor.build_groups(pool, {role: WorkerSpec(worker=worker, topology=topology)})
    return Roles(groups)


def prompts(num_rows: int) -> TensorDict:
    ids = torch.arange(1, num_rows + 1)
    return TensorDict({"row_id": ids, "answer": ids}, batch_size=[num_rows])


ALONE, PAIR, THREE = (ParallelSpec(dp_size=size) for size in (1, 2, 3))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {"actor": PAIR},
        {"actor": THREE, "reference": PAIR},
        {"actor": PAIR, "reference": THREE},
        {"actor": ALONE, "reward": THREE},
        {"actor": ParallelSpec(tp_size=2, dp_size=2), "reward": PAIR},
    ],
    ids=str,
)
def test_evaluation_counts_every_row_once(
    executor: InProcessExecutor, sizes: dict[str, ParallelSpec], num_rows: int
) -> None:
    roles, batch = build(executor, sizes, GenerationSpec()), executor.put(prompts(num_rows))
    rows = range(1, num_rows + 1)
    assert evaluate(roles, batch, SAMPLING) == sum(row**2 for row in rows) / num_rows
    score, samples = evaluate_with_samples(roles, batch, SAMPLING)
    assert (score, samples) == (evaluate(roles, batch, SAMPLING), [{"row": row} for row in rows])
    assert ("samples", 0, list(rows)) in SEEN
    # k1 of a response is twice its row's number; every estimate is a mean over the rows.
    alone = [measured(measure_divergence(roles, executor.put(prompts(num_rows)[row : row + 1]), SAMPLING))
             for row in range(num_rows)]  # fmt: skip
    found = measured(measure_divergence(roles, batch, SAMPLING))
    assert found == pytest.approx(sum(alone) / num_rows)
    assert found > 0


def test_rows_without_a_score_do_not_count(executor: InProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(rows: list[int]) -> list[float]:
        return [math.nan if row < 3 else float(row) ** 2 for row in rows]

    monkeypatch.setattr(Reward, "score", staticmethod(squares))
    roles = build(executor, {}, GenerationSpec())
    assert evaluate(roles, executor.put(prompts(4)), SAMPLING) == (3**2 + 4**2) / 2
    with pytest.raises(RewardError, match=r"^reward\.metric scored none of 2 responses in an evaluation"):
        evaluate(roles, executor.put(prompts(2)), SAMPLING)


def measured(divergence: Any) -> float:
    return float(divergence["value"] if isinstance(divergence, dict) else divergence)


def test_rows_are_repeated_only_where_they_are_too_few(executor: InProcessExecutor) -> None:
    roles = build(
        executor, {"actor": ParallelSpec(tp_size=2, dp_size=2), "reward": THREE}, GenerationSpec(gen_tp_size=2)
    )
    assert least_rows(roles.actor, "generate_sequences") == least_rows(roles.actor, "compute_logprobs") == 2
    assert least_rows(roles.reward, "compute_metric") == 3
    assert least_rows(roles.reward, "collect_samples") == 1
    evaluate(roles, executor.put(prompts(2)), SAMPLING)
    calls = {method: [rows for name, _, rows in SEEN if name == method] for method in ("generate", "metric")}
    assert calls == {"generate": [[1], [1], [2], [2]], "metric": [[1], [2], [1]]}
