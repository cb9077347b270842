"""Layouts as arrays: the formulas of the simulators hold for one layout and for many at once.

A size is an int if the caller passes one layout, and an array `[B]` if the caller passes B layouts; the same holds for
every figure derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_mapper.specs import ClusterSpec
from hf_protocols import ConfigError, GenerationSpec, ModelShape, ParallelSpec, TopologyError

__all__ = [
    "Figures",
    "GenerationLayouts",
    "Layouts",
    "Sizes",
    "check_layouts",
    "default_backend",
    "read_generation",
    "read_layouts",
]

Sizes = int | NDArray[np.int64]
"""One size, or one for each layout `[B]`."""

Figures = float | NDArray[np.floating[Any]] | NDArray[np.int64]
"""A number of one layout, or of each `[B]`: seconds, bytes, or a size."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The sizes of `ParallelSpec`, and whether FSDP trains it (else Megatron)."""

    pp_size: Sizes
    tp_size: Sizes
    dp_size: Sizes
    world_size: Sizes
    fsdp: bool | NDArray[np.bool_]
    ep_size: Sizes = 1

    @property
    def num_parts(self) -> Sizes:
        """The number of parts into which tensor and pipeline parallelism partition the model."""
        return self.pp_size * self.tp_size


@dataclass(frozen=True, kw_only=True)
class GenerationLayouts:
    """The sizes of `GenerationSpec`, and in how many rounds a replica generates its sequences."""

    gen_pp_size: Sizes
    gen_tp_size: Sizes
    num_waves: Sizes

    @property
    def replica_size(self) -> Sizes:
        """Ranks that together hold one whole model: gen_pp * gen_tp."""
        return self.gen_pp_size * self.gen_tp_size


def default_backend(parallel: ParallelSpec) -> str:
    """`"fsdp"` where the model is not cut (pp = tp = ep = 1), else `"megatron"`."""
    return "fsdp" if parallel.pp_size == parallel.tp_size == parallel.ep_size == 1 else "megatron"


def read_layouts(
    model: ModelShape, parallel: ParallelSpec | Sequence[ParallelSpec], backend: str | Sequence[str] | None
) -> Layouts:
    """The sizes of one layout or of several; `backend` of all of them or of each, by default `default_backend`.

    Raises:
        TopologyError: for context parallelism, and for expert parallelism with FSDP, or where it does not
            divide the model's experts.
    """
    if any(spec.cp_size > 1 for spec in ([parallel] if isinstance(parallel, ParallelSpec) else parallel)):
        raise TopologyError("context parallelism is not simulated. Use cp_size=1")
    found = _read_sizes(parallel, backend)
    _check_experts(model, found)
    return found


def check_layouts(
    model: ModelShape, layouts: Layouts, cluster: ClusterSpec, *, chunks: int = 1, sequences: int | None = None
) -> None:
    """Refuses layouts that a program cannot run: layers, heads and `sequences` must divide without a remainder.

    Raises:
        TopologyError: if something leaves a remainder, or if the cluster has fewer devices than a layout has ranks.
    """
    largest = int(np.max(layouts.world_size, initial=0))
    if largest > cluster.num_gpus:
        raise TopologyError(f"{largest} ranks (pp x tp x dp) do not fit a cluster of {cluster.num_gpus} devices")
    # A single stage has no schedule to interleave: its layers stay together, however many chunks others have.
    stages = np.where(np.asarray(layouts.pp_size) > 1, layouts.pp_size * chunks, 1)
    shared = [
        ("layers", model.num_layers, "pp_size" if chunks == 1 else "pp_size x pipeline_chunks", stages),
        ("attention heads", model.num_heads, "tp_size", layouts.tp_size),
    ]
    if sequences is not None:
        shared.append(("sequences at a time", sequences, "dp_size", layouts.dp_size))
    for what, count, name, sizes in shared:
        uneven = np.atleast_1d(sizes)[count % np.atleast_1d(sizes) > 0]
        if uneven.size:
            raise TopologyError(
                f"{model.name}: {count} {what} do not divide evenly by {name}={uneven[0]}. Choose one that divides them"
            )


def _read_sizes(parallel: ParallelSpec | Sequence[ParallelSpec], backend: str | Sequence[str] | None) -> Layouts:
    if isinstance(parallel, ParallelSpec):
        return Layouts(
            pp_size=parallel.pp_size,
            tp_size=parallel.tp_size,
            dp_size=parallel.dp_size,
            world_size=parallel.world_size,
            fsdp=(backend or default_backend(parallel)) == "fsdp",
            ep_size=parallel.ep_size,
        )
    if backend is None:
        backend = [default_backend(spec) for spec in parallel]
    elif isinstance(backend, str):
        backend = [backend] * len(parallel)
    _check_count("backend", backend, len(parallel))
    rows = [
        (spec.pp_size, spec.tp_size, spec.dp_size, spec.cp_size, spec.ep_size, name == "fsdp")
        for spec, name in zip(parallel, backend, strict=True)
    ]
    pp, tp, dp, cp, ep, fsdp = np.array(rows, dtype=np.int64).reshape(len(rows), 6).T
    world = pp * tp * cp * dp
    return Layouts(pp_size=pp, tp_size=tp, dp_size=dp, world_size=world, fsdp=fsdp.astype(bool), ep_size=ep)


def _check_experts(model: ModelShape, layouts: Layouts) -> None:
    """Experts divide evenly by ep_size, and only Megatron spreads them."""
    spread = np.asarray(layouts.ep_size)
    if np.any(spread > 1) and not model.num_experts:
        raise TopologyError(f"{model.name} has no experts to spread over ep_size={spread.max()}. Use ep_size=1")
    uneven = spread[max(1, model.num_experts) % spread > 0]
    if uneven.size:
        raise TopologyError(
            f"{model.name}: num_experts={model.num_experts} do not divide evenly by ep_size={uneven.flat[0]}. Choose "
            "one that divides them"
        )
    if np.any((spread > 1) & layouts.fsdp):
        raise TopologyError(
            f"ep_size={spread.max()} with FSDP, which shards experts like everything else. Choose the backend "
            "megatron, or ep_size=1"
        )


def read_generation(
    layouts: Layouts, generation: GenerationSpec | Sequence[GenerationSpec] | None, num_waves: int | Sequence[int]
) -> GenerationLayouts:
    """The sizes of the generation layout of all `layouts` or of each; by default a replica is cut as in training.

    Raises:
        TopologyError: for replicas that do not divide the ranks evenly, or that do not nest in Megatron's layout.
    """
    count = np.size(layouts.pp_size)
    waves: Sizes
    if isinstance(num_waves, int):
        waves = num_waves
    else:
        _check_count("num_waves", num_waves, count)
        waves = np.array(num_waves, dtype=np.int64)
    gen_pp: Sizes
    gen_tp: Sizes
    if generation is None:
        gen_pp, gen_tp = layouts.pp_size, layouts.tp_size
    elif isinstance(generation, GenerationSpec):
        gen_pp, gen_tp = generation.gen_pp_size, generation.gen_tp_size
    else:
        _check_count("generation", generation, count)
        sizes = [(spec.gen_pp_size, spec.gen_tp_size) for spec in generation]
        gen_pp, gen_tp = np.array(sizes, dtype=np.int64).reshape(count, 2).T
    found = GenerationLayouts(gen_pp_size=gen_pp, gen_tp_size=gen_tp, num_waves=waves)
    _check_cuts(layouts, found)
    return found


def _check_count(name: str, given: Sequence[object], count: int) -> None:
    if len(given) != count:
        raise ConfigError(f"{name}: {len(given)} given for {count} layouts. Pass one for all or one for each")


def _check_cuts(layouts: Layouts, generation: GenerationLayouts) -> None:
    nested = (layouts.pp_size % generation.gen_pp_size == 0) & (layouts.tp_size % generation.gen_tp_size == 0)
    cut = (layouts.world_size % generation.replica_size == 0) & (nested | layouts.fsdp)
    wrong = np.flatnonzero(np.logical_not(cut))
    if wrong.size:
        gen_pp, gen_tp, pp, tp, ranks = (
            np.broadcast_to(size, np.shape(cut)).flat[wrong[0]]
            for size in (
                generation.gen_pp_size, generation.gen_tp_size, layouts.pp_size, layouts.tp_size, layouts.world_size
            )
        )  # fmt: skip
        raise TopologyError(
            f"generation layout {gen_pp}-{gen_tp} cannot be cut from {ranks} ranks with pp_size={pp} and tp_size={tp}. "
            "Choose gen_pp_size and gen_tp_size whose product divides the ranks and which, unless FSDP trains the "
            "model, divide pp_size and tp_size"
        )
