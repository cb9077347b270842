"""vLLM's worker on a GPU, with groups from our topology."""

from __future__ import annotations

from hf_engine.rollout.vllm._core import Worker, current_platform
from hf_engine.rollout.vllm._groups import form_groups

__all__ = ["TopologyGpuWorker"]


class TopologyGpuWorker(Worker):  # type: ignore[misc]
    """A worker whose groups are there before it asks for them."""

    def init_device(self) -> None:
        """Forms the groups on the rank's device, which is the current one, then sets it up as vLLM does."""
        form_groups(self.vllm_config, self.rank, self.local_rank, current_platform.dist_backend)
        super().init_device()
