"""Versions of weights: what one is, and that all ranks of a transfer mean the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from hf_engine.agreement import HIGHEST, Agreement
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks

__all__ = ["check_version", "note_version", "refuse_versions", "require_one_version"]

_check = Checks(ReshardError)


def check_version(version: int | None) -> None:
    """Refuses what is not a version; None is one that is not known."""
    if version is not None:
        _check.count("version", version, least=0)
        if version >= HIGHEST:
            raise ReshardError(f"version={version} must be below {HIGHEST}. Count the changes of the weights")


def note_version(agreement: Agreement, version: int | None) -> None:
    """Takes this rank's version of the weights into an agreement; None: another rank names it.

    Raises:
        ReshardError: for what is not a version.
    """
    check_version(version)
    if version is not None:
        agreement.lowest = agreement.highest = version


def require_one_version(
    agreement: Agreement, version: int | None, group: dist.ProcessGroup | None, ranks: Sequence[int]
) -> int | None:
    """The version that an agreement found; None if no rank named one. Collective where they differ.

    Args:
        agreement: with `note_version` in its block.
        version: that this rank named.
        group: of the agreement.
        ranks: names of its ranks.

    Raises:
        ReshardError: on every rank, if they named different ones.
    """
    if agreement.lowest < agreement.highest:
        refuse_versions(version, group, ranks)
    return agreement.highest if agreement.highest >= 0 else None


def refuse_versions(version: int | None, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> NoReturn:
    """Says which ranks have which version, on all ranks that know that they differ. Collective.

    Raises:
        ReshardError: always.
    """
    versions: list[int | None] = [None] * len(ranks)
    dist.all_gather_object(versions, version, group=group)
    by_version: dict[int, list[int]] = {}
    for rank, each in zip(ranks, versions, strict=True):
        if each is not None:
            by_version.setdefault(each, []).append(rank)
    named = [
        f"{each} on rank {first}" + (f" and {len(more)} more" if more else "")
        for each, (first, *more) in sorted(by_version.items())
    ]
    raise ReshardError(
        f"the ranks named different versions of the weights: {', '.join(named)}; no weights were moved. Change the "
        "weights as often on all ranks, and expect the version that is sent"
    )
