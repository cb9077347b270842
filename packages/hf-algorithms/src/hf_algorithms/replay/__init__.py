"""Recorded calls: an update that failed, on disk as its rank received it, and one process that runs it again.

`recorder` writes a call on the rank where it failed, `repeats` those of an iteration that failed before, `bundle` reads
a call, `rerun` runs it. `values` and `batches` say how arguments become JSON and safetensors. What must not live here:
pickled objects, and the decision to repeat an iteration, which is in `run`.
"""

from __future__ import annotations

from hf_algorithms.replay.recorder import REPLAY, Recorder, record_call
from hf_algorithms.replay.repeats import build_recording_worker, describe_recorded, drop_states

__all__ = ["REPLAY", "Recorder", "build_recording_worker", "describe_recorded", "drop_states", "record_call"]
