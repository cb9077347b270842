"""Small ragged batches, and what a plain forward pass per row says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "add_candidates",
    "build_batch",
    "build_prompt_groups",
    "build_prompts",
    "check_same_results",
    "compute_results",
    "count_kept_masks",
    "greedy_response",
    "leave_tokens_out",
    "reference_outputs",
    "rows_of",
    "select_rows",
]


_GROUPS = ((9, (5, 1, 6)), (7, (4, 4)), (3, (2,)), (1, (6, 3)))
"""Tokens of each prompt, most above the tiny models' windows of 4, and of the responses to it."""


def build_prompts(num_rows: int, *, vocab_size: int, max_length: int = 7, seed: int = 0) -> TensorDict:
    """Columns `prompt_ids` (ragged, 1 to max_length tokens) and `row_id`."""
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (num_rows,), generator=generator)
    rows = [torch.randint(3, vocab_size, (int(length),), generator=generator) for length in lengths]
    columns = {"prompt_ids": _jagged(rows), "row_id": torch.arange(num_rows) * 7 + 3}
    return TensorDict(columns, batch_size=[num_rows])


def build_batch(num_rows: int, *, vocab_size: int, seed: int = 0) -> TensorDict:
    """Prompts with ragged responses, their mask, and a `targets` column of random numbers per response token."""
    batch = build_prompts(num_rows, vocab_size=vocab_size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, 6, (num_rows,), generator=generator)
    batch["response_ids"] = _jagged([torch.randint(0, vocab_size, (int(n),), generator=generator) for n in lengths])
    batch["response_mask"] = _jagged([torch.ones(int(n), dtype=torch.bool) for n in lengths])
    batch["targets"] = _jagged([torch.randn(int(n), generator=generator) for n in lengths])
    return batch


def build_prompt_groups(groups: Sequence[tuple[int, Sequence[int]]] = _GROUPS, *, vocab_size: int = 64) -> TensorDict:
    """Rows whose prompts are equal in each group, in a mixed order, with targets and two candidates for each token.

    Args:
        groups: tokens of each prompt, and of every response to it.
        vocab_size: tokens are below it.
    """
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(0)
    prompts, responses = [], []
    for prompt, lengths in groups:
        ids = torch.randint(0, vocab_size, (prompt,), generator=generator)
        for length in lengths:
            prompts.append(ids)
            responses.append(torch.randint(0, vocab_size, (length,), generator=generator))
    order = torch.randperm(len(prompts), generator=generator).tolist()
    prompts, responses = [prompts[row] for row in order], [responses[row] for row in order]
    columns = {
        "prompt_ids": _jagged(prompts),
        "response_ids": _jagged(responses),
        "targets": _jagged([torch.randn(len(row), generator=generator) for row in responses]),
        "candidate_ids": _jagged([torch.stack([row, (row + 1) % vocab_size], 1) for row in responses]),
    }
    return TensorDict(columns, batch_size=[len(order)])


def compute_results(backend: Any, batch: TensorDict, head: str = "lm") -> dict[str, torch.Tensor]:
    """All scores of a batch and its loss, by name; the gradients of that loss are left with the backend."""

    def loss(outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        mask = micro_batch["response_mask"]
        found = outputs["values" if head == "value" else "logprobs"]
        total = ((found - micro_batch["targets"]).square() * mask).sum()
        if head == "lm":
            total = total - 0.1 * (outputs["entropy"] * mask).sum()
            total = total + 0.1 * (outputs["candidate_logprobs"].sum(-1) * mask).sum()
        return total, {"loss": (float(total.detach()), 1.0)}

    if head == "value":
        found = {"values": backend.compute_values(batch)["values"].values()}
    else:
        scored = backend.compute_logprobs(batch, temperature=0.7, entropy=True, top_k=3)
        found = {name: scored[name].values() for name in ("logprobs", "entropy", "top_logprobs")}
    options = {} if head == "value" else {"temperature": 0.7, "entropy": True, "candidates": True}
    metrics = backend.forward_backward(batch, loss, 10.0, **options)
    return found | {"loss": torch.tensor(metrics["loss"][0])}


def count_kept_masks(backend: Any, batch: TensorDict, width: int) -> int:
    """Masks [.., width, width] that a forward pass keeps for the backward pass, in storages of their own."""
    kept = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (width, width):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute_results(backend, batch)
    return len(kept)


def check_same_results(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], scale: float = 5e-6
) -> None:
    """Asserts that results by name are equal to the float32 rounding of sums in another order.

    The largest difference seen is 2.2e-6. Names of gradients begin with `gradient`; the largest gradient is their size.
    """
    assert found.keys() == expected.keys()
    largest = max(
        (float(each.abs().max()) for name, each in expected.items() if name.startswith("gradient")), default=0
    )
    for name, each in expected.items():
        size = largest if name.startswith("gradient") else max(1.0, float(each.abs().max()))
        off = float((found[name] - each).abs().max())
        assert off <= scale * size, f"{name} is {off} off, of {size}"


def add_candidates(batch: TensorDict, k: int, *, vocab_size: int) -> TensorDict:
    """The same rows with `candidate_ids`, k different tokens for each response token."""
    generator = torch.Generator().manual_seed(2)
    lengths = [len(row) for row in rows_of(batch["response_ids"])]
    batch["candidate_ids"] = _jagged(
        [
            torch.stack([torch.randperm(vocab_size, generator=generator)[:k] for _ in range(length)])
            for length in lengths
        ]
    )
    return batch


def leave_tokens_out(batch: TensorDict) -> TensorDict:
    """The same rows, where the mask is False on the last token of every second response: a loss leaves it out."""
    masks = rows_of(batch["response_mask"])
    batch["response_mask"] = _jagged(
        [torch.cat([mask[:-1], mask[-1:] & (row % 2 == 0)]) for row, mask in enumerate(masks)]
    )
    return batch


def select_rows(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows of a batch, in the given order."""
    from tensordict import TensorDict

    columns: dict[str, torch.Tensor] = {}
    for name, column in batch.items():
        assert isinstance(column, torch.Tensor)
        columns[str(name)] = _select(column, rows) if column.is_nested else column[list(rows)]
    return TensorDict(columns, batch_size=[len(rows)])


def _select(column: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if rows:
        return _jagged([column[row] for row in rows])
    empty: torch.Tensor = torch.nested.nested_tensor_from_jagged(column.values()[:0], torch.zeros(1, dtype=torch.int64))
    return empty


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a jagged column."""
    return [row.detach() for row in column.unbind()]


def reference_outputs(reference: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """[T, V] logits (or [T, 1] values) at the columns that predict the response: one row, no padding, no cache."""
    sequence = torch.cat([prompt, response])[None]
    outputs: torch.Tensor = reference(input_ids=sequence, use_cache=False).logits[0]
    return outputs[len(prompt) - 1 : -1].float()


@torch.no_grad()
def greedy_response(reference: Any, prompt: torch.Tensor, num_tokens: int, stops: frozenset[int]) -> torch.Tensor:
    """The most likely tokens, each found by a whole forward pass."""
    sequence = prompt
    while len(sequence) < len(prompt) + num_tokens and not (len(sequence) > len(prompt) and int(sequence[-1]) in stops):
        logits = reference(input_ids=sequence[None], use_cache=False).logits[0, -1]
        sequence = torch.cat([sequence, logits.argmax()[None]])
    return sequence[len(prompt) :]


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return nested
