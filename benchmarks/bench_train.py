"""Cost of a training step: the backends against a plain transformers + torch loop in the same run.

The loop gets the very micro-batches that the backends make, padded and ready, and does the same work: log-probs of the
response tokens, the same loss, clipping, torch's fused AdamW. In every round all systems step once, each round in
another order, in the same processes with one torch thread each. A ratio is of two steps of one round, so that what
slows the machine for a while slows both; its median and quartiles are over the rounds. On two ranks the loop runs on
one of them while the other waits. Before it is timed, every system must report the loop's loss and gradient norm.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measurement import record
from plain_loop import PlainLoop

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import ParallelSpec, Topology

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
MODEL = {**SIZES, "num_key_value_heads": 8, "vocab_size": 8192, "max_positions": 128, "tie_embeddings": False}
CONFIG = TrainConfig(learning_rate=1e-5, micro_batch_tokens=512)
NUM_ROWS = 16
NUM_ROUNDS = 45
QUARTILES = ("lower_quartile", "median", "upper_quartile")
MIN_RATIO = 1.0
"""Of the loop's seconds over those of `fsdp` at one rank, in the median of all rounds: not slower."""


def main() -> int:
    """Measure one and two ranks; 1 if the target is missed."""
    metrics: dict[str, tuple[float, str]] = {}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(folder, **MODEL)
        for size in (1, 2):
            with LocalRanks(size, timeout_s=120) as ranks:
                found = ranks.run(measure, str(model), deadline_s=600)
            # The slowest rank's seconds, round by round.
            seconds = {name: [max(step) for step in zip(*(r[name] for r in found), strict=True)] for name in found[0]}
            for name, runs in seconds.items():
                key = f"{name}_ranks{size}"
                for kind, value in zip(QUARTILES, statistics.quantiles(runs), strict=True):
                    metrics[f"{key}_{kind}_s"] = (round(value, 4), "s")
                paired = [plain / own for plain, own in zip(seconds["plain"], runs, strict=True)]
                ratios[key] = statistics.quantiles(paired)
                for kind, value in zip(QUARTILES, ratios[key], strict=True):
                    metrics[f"{key}_over_plain_{kind}"] = (round(value, 3), "times the loop's throughput on one thread")
    record("train", metrics)
    reached = ratios["fsdp_ranks1"][1] >= MIN_RATIO
    for key, (low, middle, high) in ratios.items():
        wanted = f" ({'reached' if reached else 'MISSED'}: wanted >= {MIN_RATIO})" if key == "fsdp_ranks1" else ""
        spread = f"(quartiles {low:.3f} to {high:.3f})"
        print(f"{key}: {middle:.3f} x {spread} the throughput of the plain loop on one thread{wanted}", flush=True)
    return 0 if reached else 1


def measure(model: str) -> dict[str, list[float]]:
    """On every rank: seconds of every round by system."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = Topology(ParallelSpec(dp_size=size))
    batch = _build_batch()
    local = _select(batch, range(rank, NUM_ROWS, size))
    num_tokens = float(batch["response_ids"].values().numel())
    steps: dict[str, Callable[[], tuple[float, float]]] = {"plain": PlainLoop(model, batch, CONFIG, num_tokens).update}
    for name in ("fsdp", "megatron"):
        backend = load_train_backend(name).build(model, topology=topology, config=CONFIG)
        steps[name] = _backend_step(backend, local, num_tokens)
    results: dict[str, list[float]] = {name: [] for name in steps}
    reports: dict[str, tuple[float, float]] = {}
    names = list(steps)
    for number in range(NUM_ROUNDS + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            reported = steps[name]() if name != "plain" or rank == 0 else (0.0, 0.0)
            if number:
                results[name].append(time.perf_counter() - start)
            else:
                reports[name] = reported
    _check_same_work(reports)
    return results


def _check_same_work(reports: dict[str, tuple[float, float]]) -> None:
    """Every system's first step had the loop's loss, summed over ranks, and its gradient norm."""
    names = list(reports)
    found = torch.tensor([reports[name] for name in names], dtype=torch.float64)
    dist.all_reduce(found)
    found[1:, 1] /= dist.get_world_size()  # ranks report the same norm; the loop runs on one of them
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-3, atol=0.0, msg=lambda m: f"{names}: {m}")


def _build_batch() -> Any:
    """Prompts of 16 to 48 tokens and responses of 16 to 64."""
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(0)

    def column(shortest: int, longest: int) -> torch.Tensor:
        lengths = torch.randint(shortest, longest + 1, (NUM_ROWS,), generator=draw).tolist()
        rows = [torch.randint(3, MODEL["vocab_size"], (length,), generator=draw) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return TensorDict({"prompt_ids": column(16, 48), "response_ids": column(16, 64)}, batch_size=[NUM_ROWS])


def _select(batch: Any, rows: range) -> Any:
    from tensordict import TensorDict

    columns = {name: torch.nested.nested_tensor([c[r] for r in rows], layout=torch.jagged) for name, c in batch.items()}
    return TensorDict(columns, batch_size=[len(rows)])


def _backend_step(backend: Any, batch: Any, num_tokens: float) -> Callable[[], tuple[float, float]]:
    def loss_fn(outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
        return loss, {"loss": (float(loss.detach()), num_tokens)}

    def step() -> tuple[float, float]:
        metrics = backend.train_step(batch, loss_fn, num_tokens)
        return metrics["loss"][0], metrics["grad_norm"][0]

    return step


if __name__ == "__main__":
    sys.exit(main())
