"""Laws that every transfer protocol obeys: run them on your own.

```python
from hf_protocols import ParallelSpec, Topology
from hf_protocols.testing import check_transfer_protocol

check_transfer_protocol(MY_PROTOCOL, Topology(ParallelSpec(dp_size=4)), num_rows=10)
```
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from hf_protocols.errors import ProtocolError
from hf_protocols.selection import RowSelection, split_rows
from hf_protocols.topology import Axis, Topology
from hf_protocols.transfer import Collection, TransferProtocol, compute_held_rows, route
from hf_protocols.validation import Checks, show

__all__ = ["check_transfer_protocol"]

_check = Checks(ProtocolError)


def check_transfer_protocol(
    protocol: TransferProtocol,
    topology: Topology,
    num_rows: int,
    *,
    weights: Sequence[float] | None = None,
    copies: int = 1,
    replicated_over: Sequence[Axis] = (),
) -> None:
    """Checks one protocol on one topology.

    `TransferProtocol` checks every result: a selection for every rank, collected ranks that exist and stand once, rows
    in range that go to ranks that are called. The laws are:

    - No row is twice on one rank, and no row is left out.
    - Equal calls return equal results.
    - With an identity worker a concatenated result has every row `copies` times. Once routed to a single consumer it
      has the input's order.
    - Ranks along `replicated_over` get the same rows.
    - With `weights` no chunk is heavier than the heaviest of the contiguous split, and chunk sizes differ by at most
      one.

    Raises:
        ProtocolError: naming the protocol, the law and the rank or row that breaks it; for arguments of other kinds.
    """
    _check.kind("check_transfer_protocol: protocol", protocol, TransferProtocol, "a TransferProtocol")
    _check.kind("check_transfer_protocol: topology", topology, Topology, "a Topology")
    _check.count("num_rows", num_rows, least=0)
    _check.count("copies", copies)
    if weights is not None:
        _check.weights(weights, num_rows)
    law = _Laws(protocol.name, num_rows)
    selections = protocol.distribute(topology, num_rows, weights)
    collection = protocol.collect(topology)
    law.check_distribution(selections)
    law.require(
        selections == protocol.distribute(topology, num_rows, weights),
        "distribute is not repeatable",
    )
    law.require(collection == protocol.collect(topology), "collect is not repeatable")
    for axis in replicated_over:
        law.check_replication(selections, topology.groups(axis), axis)
    if collection.combine == "concat":
        law.check_identity_worker(collection, selections, copies)
    if weights is not None:
        law.check_balance(selections, weights)


class _Laws:
    def __init__(self, name: str, num_rows: int) -> None:
        self._name = name
        self._num_rows = num_rows

    def require(self, holds: bool, broken: str) -> None:
        if not holds:
            raise ProtocolError(f"protocol {show(self._name)} with {self._num_rows} rows: {broken}")

    def check_distribution(self, selections: Sequence[RowSelection]) -> None:
        seen: set[int] = set()
        for rank, rows in enumerate(selections):
            counts = Counter(rows)
            twice = [row for row, count in counts.items() if count > 1]
            self.require(not twice, f"rank {rank} gets row {twice[:1]} twice")
            seen |= counts.keys()
        left = sorted(set(range(self._num_rows)) - seen)
        self.require(not left, f"row {left[:1]} reaches no rank")

    def check_replication(self, selections: Sequence[RowSelection], groups: Sequence[Sequence[int]], axis: str) -> None:
        for group in groups:
            same = all(selections[rank] == selections[group[0]] for rank in group)
            self.require(same, f"the ranks {tuple(group)} along {axis} get different rows")

    def check_identity_worker(self, collection: Collection, selections: Sequence[RowSelection], copies: int) -> None:
        collected = Counter(row for rank in collection.ranks for row in selections[rank])
        for row in range(self._num_rows):
            self.require(collected[row] == copies, f"row {row} is collected by {collected[row]} ranks, not by {copies}")
        if copies > 1:
            return
        held = compute_held_rows(collection, selections, self._num_rows)
        local = {rank: list(selections[rank]) for rank in held}
        (pieces,) = route(held, [RowSelection.range(0, self._num_rows)]).pieces
        result = [local[piece.producer][row] for piece in pieces for row in piece.rows]
        self.require(result == list(range(self._num_rows)), "the result does not keep the input's order")

    def check_balance(self, selections: Sequence[RowSelection], weights: Sequence[float]) -> None:
        chunks = list(dict.fromkeys(rows for rows in selections if len(rows)))
        if not chunks:
            return
        sizes = [len(chunk) for chunk in chunks]
        self.require(max(sizes) - min(sizes) <= 1, f"chunk sizes {sizes} differ by more than one")
        contiguous = split_rows(self._num_rows, len(chunks))
        heaviest, allowed = (
            max(math.fsum(weights[row] for row in rows) for rows in split) for split in (chunks, contiguous)
        )
        self.require(heaviest <= allowed, f"the heaviest chunk has {heaviest} tokens, the contiguous split {allowed}")
