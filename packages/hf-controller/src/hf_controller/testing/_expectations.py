"""Expected values of checks: batches of every kind of column, and comparisons that name the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from hf_protocols import HybridFlowError

__all__ = ["build_batch", "require", "require_batch", "require_raises", "sum_tokens"]


def build_batch(num_rows: int, *, seed: int = 0, tokens: list[int] | None = None) -> TensorDict:
    """Columns of every kind; row i has i tokens (so the first is empty), or as many as given."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tokens or list(range(num_rows))
    rows = [torch.arange(length) + 100 * row for row, length in enumerate(lengths)]
    tokens_column = torch.nested.nested_tensor(rows, layout=torch.jagged)
    logprobs = torch.nested.nested_tensor([-row.float() for row in rows], layout=torch.jagged)
    x = torch.randn(num_rows, generator=generator)
    return TensorDict(
        {
            "row": torch.arange(num_rows),
            "x": x,
            "wide": torch.randn(num_rows, 2, 3, generator=generator),
            "half": x.to(torch.bfloat16),
            "flag": x > 0,
            "byte": torch.arange(num_rows, dtype=torch.uint8),
            "tokens": tokens_column,
            "logprobs": logprobs,
            "mask": torch.nested.nested_tensor([row % 2 == 0 for row in rows], layout=torch.jagged),
        },
        batch_size=[num_rows],
    )


def sum_tokens(batch: TensorDict) -> float:
    """Sum of all token numbers."""
    return float(batch["tokens"].values().sum())


def require(got: Any, wanted: Any, what: str) -> None:
    """The error that every check raises."""
    if got != wanted:
        raise AssertionError(f"{what}: got {got}, wanted {wanted}")


def require_batch(got: TensorDict, wanted: TensorDict, what: str = "batch") -> None:
    """Equal columns: their names, types, kinds and values."""
    require(sorted(got.keys()), sorted(wanted.keys()), f"columns of {what}")
    require(list(got.batch_size), list(wanted.batch_size), f"batch_size of {what}")
    for name in wanted.keys():  # noqa: SIM118 - a TensorDict iterates its rows
        mine, theirs = got[name], wanted[name]
        require((mine.dtype, mine.is_nested), (theirs.dtype, theirs.is_nested), f"kind of column {name} of {what}")
        pairs = zip(mine.unbind(), theirs.unbind(), strict=True) if theirs.is_nested else [(mine, theirs)]
        require(all(torch.equal(one, other) for one, other in pairs), True, f"values of column {name} of {what}")


def require_raises(kind: type[BaseException], attempt: Callable[[], Any]) -> Any:
    """The error of `kind` that `attempt` raises."""
    try:
        outcome = attempt()
    except (HybridFlowError, AttributeError) as error:
        if isinstance(error, kind):
            return error
        raise
    raise AssertionError(f"{kind.__name__} was expected, got {outcome!r}")
