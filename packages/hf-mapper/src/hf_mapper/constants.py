"""The shipped constants, read from `constants.toml`: what was fitted, for which GPU and software, and on which rows."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hf_mapper.efficiency import EfficiencySpec

__all__ = ["Fit", "find_efficiency", "find_family", "find_links", "find_plan_efficiency", "read_fits"]

_FILE = Path(__file__).with_name("constants.toml")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants of a GPU family with a software stack (`"links"` for its machines' links).

    `models` are the models whose rows they were fitted on, by the beginnings of their names; rows of other models
    were not looked at. `source` is part of these rows' source.
    """

    gpu: str
    stack: str
    source: str
    models: tuple[str, ...]
    values: Mapping[str, float]


_SIMILAR = {"gh200": "h100", "h200": "h100", "b200": "h100"}
"""GPUs without measurements of their own, and those that stand in for them."""


@cache
def read_fits() -> tuple[Fit, ...]:
    """Returns the entries of `constants.toml`, in its order."""
    entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))["fits"]
    return tuple(Fit(**{**entry, "models": tuple(entry["models"])}) for entry in entries)


def find_family(kind: str) -> str:
    """Returns the chip that boards with different memory have in common: `"a100"` of `"a100-80"`."""
    return kind.partition("-")[0]


def _find(kind: str, stack: str) -> Mapping[str, float]:
    family = find_family(kind)
    for name in (family, _SIMILAR.get(family, "")):
        for fit in read_fits():
            if (fit.gpu, fit.stack) == (name, stack):
                return fit.values
    return {}


def find_efficiency(kind: str, stack: str) -> EfficiencySpec:
    """The constants of a GPU kind with a software stack; the defaults where nothing was fitted."""
    return EfficiencySpec() if stack == "links" else EfficiencySpec(**_find(kind, stack))


def find_links(kind: str) -> Mapping[str, float]:
    """The fitted constants of a GPU kind's links as arguments; empty where nothing was fitted."""
    return _find(kind, "links")


def find_plan_efficiency(kind: str) -> EfficiencySpec:
    """The constants that plans use: PyTorch's for training, vLLM's for generation."""
    return EfficiencySpec(**{**_find(kind, "vllm"), **_find(kind, "pytorch")})
