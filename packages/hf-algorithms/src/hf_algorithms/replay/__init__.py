"""Recorded calls: an update that failed, on disk as its rank received it, and one process that runs it again.

`recorder` writes a call on the rank where it failed, `bundle` reads it, `rerun` runs it. `values` and `batches` say how
arguments become JSON and safetensors. Nothing here is pickled.
"""

from __future__ import annotations

from hf_algorithms.replay.recorder import REPLAY, Recorder, record_call

__all__ = ["REPLAY", "Recorder", "record_call"]
