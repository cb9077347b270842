"""The critic: values of states, and the position after a response, whose value it may give and learn too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_algorithms.jagged import FlatRows, read_rows
from hf_algorithms.replay import record_call
from hf_algorithms.workers._model import SEQUENCE, Metrics, on_device
from hf_algorithms.workers._trained import TrainedWorker
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.losses import Loss
    from hf_algorithms.value_scale import ValueScale

__all__ = ["CriticWorker", "add_positions", "find_room", "split_positions"]


class CriticWorker(TrainedWorker):
    """One rank of the critic: the model's trunk with a scalar head."""

    head = "value"
    learning_rate_key = "critic_learning_rate"

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("values",), kind="inference")
    @on_device
    def compute_values(
        self, batch: TensorDict, *, scale: ValueScale | None = None, keep_graph: bool = False
    ) -> TensorDict:
        """`values`, jagged [B, T]: the value before each response token was drawn, in the unit of rewards.

        Args:
            batch: prompts and responses.
            scale: between the model's output and values; None: they are the same.
            keep_graph: as in `PolicyWorker.compute_logprobs`, for `update_critic`.
        """
        found = self._train.compute_values(batch, keep_graph=self._may_keep(keep_graph))
        if scale is not None:
            found["values"] = scale.restore(found["values"])
        return found

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("values", "next_values"), kind="inference")
    @on_device
    def compute_values_after(
        self, batch: TensorDict, *, max_tokens: int, scale: ValueScale | None = None, keep_graph: bool = False
    ) -> TensorDict:
        """`values` as `compute_values`, and `next_values` float32 [B]: the value after the last token of a response.

        Args:
            batch: prompts and responses.
            max_tokens: a response of as many tokens has no room for one more value, which is NaN then.
            scale: as for `compute_values`.
            keep_graph: as for `compute_values`.
        """
        has_room = find_room(batch, max_tokens)
        found = self._train.compute_values(add_positions(batch, has_room), keep_graph=self._may_keep(keep_graph))
        column = found["values"] if scale is None else scale.restore(found["values"])
        found["values"], found["next_values"] = split_positions(column, has_room)
        return found

    @register(protocol=THREE_D, returns="metrics", reads=(*SEQUENCE, "next_values?", "next_returns?"), kind="training")
    @on_device
    @record_call
    def update_critic(self, batch: TensorDict, loss: Loss) -> Metrics:
        """One optimizer step on `loss`; with `next_returns` also on the position after the last token."""
        if "next_returns" in batch:
            has_room = ~batch["next_returns"].isnan()
            beyond = {name: batch[f"next_{name}"] for name in ("values", "returns") if name in batch}
            batch = add_positions(batch, has_room, beyond)
        return self._update(batch, loss)


def find_room(batch: TensorDict, max_tokens: int) -> torch.Tensor:
    """Returns bool [B]: responses shorter than `max_tokens` that have a trained token."""
    mask = read_rows(batch["response_mask"])
    trained = torch.cat([mask.lengths.new_zeros(1), mask.values.bool().cumsum(0)])
    has_trained = trained[mask.starts + mask.lengths] > trained[mask.starts]
    return (read_rows(batch["response_ids"]).lengths < max_tokens) & has_trained


def add_positions(
    batch: TensorDict, has_room: torch.Tensor, columns: Mapping[str, torch.Tensor] | None = None
) -> TensorDict:
    """Returns the batch with one more token, trained by a critic, in the rows that have room.

    Its id does not matter: the value before a token depends on what came before.

    Args:
        batch: `response_ids` and `response_mask` [B, T], jagged or dense.
        has_room: bool [B].
        columns: one number a row, to append to the column of that name.
    """
    rows = {name: read_rows(batch[name]) for name in ("response_ids", "response_mask", *(columns or {}))}
    ids, mask = rows["response_ids"], rows["response_mask"]
    added: dict[str, torch.Tensor] = {
        "response_ids": ids.values.new_zeros(len(ids.lengths)),
        "response_mask": mask.values.new_ones(len(mask.lengths)),
        **(columns or {}),
    }
    found = batch.copy()
    places: list[_Places] = []
    for name, last in added.items():
        column = rows[name]
        known = next((each for each in places if each.fit(column)), None)
        if known is None:
            places.append(known := _place(column, has_room.long()))
        found[name] = known.take(torch.cat([column.values, last.to(column.values)]))
    return found


def split_positions(column: torch.Tensor, has_room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a column without the last number of the rows that had room, and those numbers [B], NaN elsewhere."""
    rows = read_rows(column)
    has_room = has_room.to(rows.lengths.device)
    last = rows.values.new_full((len(rows.lengths),), float("nan"))
    last[has_room] = rows.values[(rows.starts + rows.lengths - 1)[has_room]]
    return _place(rows, -has_room.long()).take(rows.values), last


class _Places(NamedTuple):
    """Gather indices for rows that become longer or shorter by one; the same for columns of equal rows."""

    num_values: int
    starts: torch.Tensor
    lengths: torch.Tensor
    """Both int64 [B], of the input rows, which lie in `num_values` values."""
    indices: torch.Tensor
    """int64, of every output element: its place in the values, or for an appended one `num_values` plus its row."""
    offsets: torch.Tensor
    """int64 [B + 1], of the output rows."""
    bounds: dict[str, Any]
    """Lengths of the shortest and the longest output row."""

    def fit(self, rows: FlatRows) -> bool:
        """Returns True if `rows` have these starts and lengths, in as many values."""
        is_alike = torch.equal(self.starts, rows.starts) and torch.equal(self.lengths, rows.lengths)
        return is_alike and self.num_values == len(rows.values)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the output rows as a jagged column."""
        jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(values[self.indices], self.offsets, **self.bounds)
        return jagged


def _place(rows: FlatRows, change: torch.Tensor) -> _Places:
    """`change`, int64 [B], is what each row gains: 1, 0 or -1."""
    change = change.to(rows.lengths.device)
    lengths = rows.lengths + change
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    within = torch.arange(len(row), device=lengths.device) - offsets[row]
    is_new = within == rows.lengths[row]
    indices = torch.where(is_new, len(rows.values) + row, rows.starts[row] + within)
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    return _Places(len(rows.values), rows.starts, rows.lengths, indices, offsets, bounds)
