"""Published figures of accelerators. Rates are dense (no sparsity) and per device; links count one direction."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["CATALOGUE", "Figures"]


class Figures(TypedDict):
    """One accelerator, as the fields of a `GpuSpec`."""

    memory_bytes: int
    peak_flops_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    link_bandwidth_bytes_per_s: float
    host_bandwidth_bytes_per_s: float
    source: str


def _figures(
    *, mib: int, single: float, half: float, fp8: float | None, memory: float, link: float, host: float, source: str
) -> Figures:
    """`single`, `half` and `fp8` in TFLOP/s, `memory`, `link` and `host` in GB/s."""
    peaks = {"float32": single * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    if fp8 is not None:
        peaks["float8"] = fp8 * 1e12
    return Figures(
        memory_bytes=mib * 2**20,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=memory * 1e9,
        link_bandwidth_bytes_per_s=link * 1e9,
        host_bandwidth_bytes_per_s=host * 1e9,
        source=source,
    )


# The memory is what the driver reports, which on some boards is below the printed size.
# Hosts: PCIe x16 of the board's generation (4.0: 32, 5.0: 64 GB/s one way); a GH200 has NVLink-C2C.
CATALOGUE: dict[str, Figures] = {
    "a100-40": _figures(
        mib=40_960, single=19.5, half=312.0, fp8=None, memory=1_555, link=300, host=32,
        source="NVIDIA A100 datasheet, 40GB SXM; NVLink 600 GB/s both ways",
    ),
    "a100-80": _figures(
        mib=81_920, single=19.5, half=312.0, fp8=None, memory=2_039, link=300, host=32,
        source="NVIDIA A100 datasheet, 80GB SXM; NVLink 600 GB/s both ways",
    ),
    "h100": _figures(
        mib=81_559, single=66.9, half=989.4, fp8=1_978.9, memory=3_350, link=450, host=64,
        source="NVIDIA H100 datasheet, SXM5; NVLink 900 GB/s both ways",
    ),
    "gh200": _figures(
        mib=97_871, single=66.9, half=989.4, fp8=1_978.9, memory=4_000, link=450, host=450,
        source="NVIDIA GH200 datasheet, 96GB HBM3; NVLink 900 GB/s both ways",
    ),
    "h200": _figures(
        mib=143_771, single=66.9, half=989.4, fp8=1_978.9, memory=4_800, link=450, host=64,
        source="NVIDIA H200 datasheet, SXM; NVLink 900 GB/s both ways",
    ),
    "b200": _figures(
        mib=183_359, single=75.0, half=2_250.0, fp8=4_500.0, memory=8_000, link=900, host=64,
        source="NVIDIA HGX B200 datasheet; NVLink 1.8 TB/s both ways",
    ),
    "l40s": _figures(
        mib=46_068, single=91.6, half=362.05, fp8=733.0, memory=864, link=32, host=32,
        source="NVIDIA L40S datasheet; PCIe 4.0 x16, 64 GB/s both ways",
    ),
    "rtx-4090": _figures(
        mib=24_564, single=82.6, half=165.2, fp8=330.3, memory=1_008, link=32, host=32,
        source="NVIDIA Ada whitepaper, FP32 accumulation; PCIe 4.0 x16, 64 GB/s both ways",
    ),
    "mi300x": _figures(
        mib=196_592, single=163.4, half=1_307.4, fp8=2_614.9, memory=5_300, link=448, host=64,
        source="AMD Instinct MI300X datasheet; 7 links of 128 GB/s both ways",
    ),
}  # fmt: skip
