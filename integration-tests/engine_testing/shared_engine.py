"""Small SGLang engines; a start takes up to a minute, so that the tests of a rank share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_engine.backends.registry import load_rollout_backend
from hf_protocols import Topology

__all__ = ["CACHE_BYTES", "ENGINES", "build", "shared"]

CACHE_BYTES = 4 << 20
ENGINES: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = {}
"""In the process of a rank: the engine that its tests share."""


def build(model: Path, topology: Topology, **options: Any) -> Any:
    """An engine of a test's own."""
    defaults: dict[str, Any] = {"cache_bytes": CACHE_BYTES, "max_rows": 64, "start_timeout_s": 400, "timeout_s": 200}
    # The prompts of most tests come in part then.
    defaults["engine_options"] = {"chunked_prefill_size": 16}
    return load_rollout_backend("sglang").build(model, topology=topology, **(defaults | options))


def shared(model: Path, topology: Topology) -> Any:
    """The engine of this model, which takes the place of another one's."""
    key = (str(model), topology.groups("gen_tp"))
    if key not in ENGINES:
        while ENGINES:
            ENGINES.popitem()[1].close()
        ENGINES[key] = build(model, topology)
    return ENGINES[key]
