"""SGLang's platform on machines without a GPU, for plain torch: SGLang's own CPU platform has no kernels for it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

__all__ = ["CpuPlatform"]


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """The CPU as a device of which SGLang knows nothing beyond torch."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Attention by torch's own functions."""
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to copy to."""
        return False

    def empty_cache(self) -> None:
        """Nothing is cached here. SGLang's own collects garbage instead: half a second with every weight update."""

    def init_backend(self) -> None:
        """Replaces torch's default device module, which torch built for CUDA cannot use without a device."""
        if torch.version.cuda is not None and not torch.cuda.is_available():
            of_device: Any = torch.get_device_module
            ours: Any = lambda device=None: torch.cpu if device is None else of_device(device)  # noqa: E731
            torch.get_device_module = ours
