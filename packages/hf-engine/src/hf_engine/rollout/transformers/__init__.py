"""Generation embedded in the training process, with a model of transformers.

What lives here: the backend and its decode loop for batches.
What must not: what other engines need too, which is in `rollout`, and how models are read, which is in `models`.
"""

from __future__ import annotations

from hf_engine.rollout.transformers._backend import TransformersBackend

__all__ = ["TransformersBackend"]
