"""vLLM's worker on a CPU, with groups from our topology."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from hf_engine.rollout.vllm._groups import form_groups

__all__ = ["TopologyCpuWorker"]


class TopologyCpuWorker(CPUWorker):  # type: ignore[misc]
    """A worker whose groups are there before it asks for them."""

    def init_device(self) -> None:
        """Forms the groups, then sets up the device as vLLM does."""
        form_groups(self.vllm_config, self.rank, self.local_rank, current_platform.dist_backend)
        super().init_device()
