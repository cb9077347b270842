"""The shipped constants: what was fitted, for which accelerator and software, and on which rows.

`benchmarks/simulator_errors.py --refit` fits them again; it prints this table's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_mapper.efficiency import EfficiencySpec

__all__ = ["FITS", "Fit", "find_efficiency", "find_family", "find_links", "find_plan_efficiency"]


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


FITS: tuple[Fit, ...] = (
    Fit(
        gpu="a100",
        stack="links",
        source="vTrain NCCL",
        models=("all_reduce",),
        values={"link_efficiency": 0.71, "intra_latency_s": 1.25e-05},
    ),
    Fit(
        gpu="h100",
        stack="links",
        source="Vidur",
        models=("all_reduce", "send_recv"),
        values={"link_efficiency": 0.804, "intra_latency_s": 7.43e-06},
    ),
    Fit(
        gpu="gh200",
        stack="tensorrt-llm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.649,
            "memory_bandwidth": 0.882,
            "layer_latency_s": 0.000119,
            "sequence_latency_s": 7.53e-06,
        },
    ),
    Fit(
        gpu="a100",
        stack="deepspeed-mii",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.219,
            "memory_bandwidth": 0.879,
            "layer_latency_s": 0.000328,
            "sequence_latency_s": 9.25e-06,
        },
    ),
    Fit(
        gpu="a100",
        stack="tensorrt-llm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.8,
            "memory_bandwidth": 0.794,
            "layer_latency_s": 0.000148,
            "sequence_latency_s": 2.34e-05,
        },
    ),
    Fit(
        gpu="a100",
        stack="vllm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.799,
            "memory_bandwidth": 0.734,
            "layer_latency_s": 0.000146,
            "sequence_latency_s": 8.24e-05,
        },
    ),
    Fit(
        gpu="h100",
        stack="tensorrt-llm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.586,
            "memory_bandwidth": 0.756,
            "layer_latency_s": 0.000109,
            "sequence_latency_s": 1.28e-05,
        },
    ),
    Fit(
        gpu="h100",
        stack="vllm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.8,
            "memory_bandwidth": 0.793,
            "layer_latency_s": 0.000159,
            "sequence_latency_s": 7e-05,
        },
    ),
    Fit(
        gpu="gh200",
        stack="vllm",
        source="Argonne",
        models=("llama-2-7b", "llama-3-8b"),
        values={
            "generation_flops": 0.36,
            "memory_bandwidth": 0.709,
            "layer_latency_s": 0.000143,
            "sequence_latency_s": 2.41e-05,
        },
    ),
    Fit(
        gpu="a100",
        stack="lmdeploy",
        source="LMDeploy",
        models=("llama-2-7b", "llama-2-70b"),
        values={
            "generation_flops": 0.675,
            "memory_bandwidth": 0.95,
            "layer_latency_s": 0.000235,
            "sequence_latency_s": 1.71e-06,
        },
    ),
    Fit(
        gpu="a100",
        stack="vllm-2023",
        source="Splitwise",
        models=("llama-2-70b",),
        values={
            "generation_flops": 0.537,
            "memory_bandwidth": 0.801,
            "layer_latency_s": 0.00039,
            "sequence_latency_s": 3.47e-06,
        },
    ),
    Fit(
        gpu="h100",
        stack="vllm-2023",
        source="Splitwise",
        models=("llama-2-70b",),
        values={
            "generation_flops": 0.407,
            "memory_bandwidth": 0.783,
            "layer_latency_s": 0.000283,
            "sequence_latency_s": 1.01e-05,
        },
    ),
    Fit(
        gpu="h100",
        stack="pytorch",
        source="llm-foundry",
        models=("MPT-7b", "MPT-1b", "MPT-350m", "MPT-30b"),
        values={
            "training_flops": 0.613,
            "half_size": 221.0,
            "training_bandwidth": 0.922,
            "training_latency_s": 0.000148,
        },
    ),
    Fit(
        gpu="a100",
        stack="pytorch",
        source="llm-foundry",
        models=("MPT-7b", "MPT-1b", "MPT-350m", "MPT-30b"),
        values={"training_flops": 0.79, "half_size": 131.0, "training_bandwidth": 0.788, "training_latency_s": 0.00016},
    ),
    Fit(
        gpu="a100",
        stack="megatron-2021",
        source="vTrain",
        models=("GPT L12", "GPT L24", "GPT-18.4B"),
        values={
            "training_flops": 0.781,
            "half_size": 54.0,
            "training_bandwidth": 0.937,
            "training_latency_s": 0.000814,
        },
    ),
)

_SIMILAR = {"gh200": "h100", "h200": "h100", "b200": "h100"}
"""GPUs without measurements of their own, and those that stand in for them."""


def find_family(kind: str) -> str:
    """Returns the chip that boards with different memory have in common: `"a100"` of `"a100-80"`."""
    return kind.partition("-")[0]


def _find(kind: str, stack: str) -> Mapping[str, float]:
    family = find_family(kind)
    for name in (family, _SIMILAR.get(family, "")):
        for fit in FITS:
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
