"""The cost of the metric `actor/entropy` to an update: the same optimizer step with and without it, in turns.

Seconds are those that the processor spent on the process. A ratio is of two steps of one round; its median and
quartiles are over the rounds. The loss is that of a policy update, on one rank and one thread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from measurement import record

from hf_algorithms.losses import PolicyLoss
from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import ParallelSpec, Topology

QUICKSTART = {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 3, "num_attention_heads": 5}
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
MODELS = {
    "quickstart": (QUICKSTART | {"num_key_value_heads": 5, "vocab_size": 16}, 128, 5),
    "vocabulary_32k": (WIDE | {"num_key_value_heads": 8, "vocab_size": 32_000}, 8, 32),
}
"""A model, the rows of a batch, and the tokens of a response."""
NUM_ROUNDS = 31
QUARTILES = ("lower_quartile", "median", "upper_quartile")
MAX_SHARE = 0.03
"""Of an update's time, in the median of all rounds."""


def main() -> int:
    """Measure both models; 1 if the target is missed."""
    metrics: dict[str, tuple[float, str]] = {}
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, (sizes, num_rows, num_tokens) in MODELS.items():
            model = write_tiny_model(f"{folder}/{name}", max_positions=128, tie_embeddings=False, **sizes)
            with LocalRanks(1, timeout_s=300) as ranks:
                (shares,) = ranks.run(measure, str(model), sizes["vocab_size"], num_rows, num_tokens, deadline_s=600)
            for kind, value in zip(QUARTILES, statistics.quantiles(shares), strict=True):
                metrics[f"{name}_{kind}"] = (round(value, 4), "share of an update")
            missed |= metrics[f"{name}_median"][0] > MAX_SHARE
    record("entropy", metrics)
    return int(missed)


def measure(model: str, vocab_size: int, num_rows: int, num_tokens: int) -> list[float]:
    """The entropy's share of an update, of every round."""
    config = TrainConfig(learning_rate=1e-6)
    backend = load_train_backend("fsdp").build(model, topology=Topology(ParallelSpec()), config=config)
    batch, loss = _build_batch(vocab_size, num_rows, num_tokens), PolicyLoss(old="current")
    shares = []
    for number in range(NUM_ROUNDS + 1):
        seconds = {}
        for entropy in (True, False) if number % 2 else (False, True):
            start = time.process_time()
            backend.train_step(batch, loss, float(num_rows * num_tokens), entropy=entropy)
            seconds[entropy] = time.process_time() - start
        if number:
            shares.append(seconds[True] / seconds[False] - 1)
    return shares


def _build_batch(vocab_size: int, num_rows: int, num_tokens: int) -> Any:
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(0)

    def column(make: Any) -> torch.Tensor:
        nested: torch.Tensor = torch.nested.nested_tensor([make() for _ in range(num_rows)], layout=torch.jagged)
        return nested

    ids = column(lambda: torch.randint(3, vocab_size, (num_tokens,), generator=draw))
    return TensorDict(
        {
            "prompt_ids": column(lambda: torch.randint(3, vocab_size, (6,), generator=draw)),
            "response_ids": ids,
            "response_mask": column(lambda: torch.ones(num_tokens, dtype=torch.bool)),
            "advantages": column(lambda: torch.randn(num_tokens, generator=draw)),
        },
        batch_size=[num_rows],
    )


if __name__ == "__main__":
    sys.exit(main())
