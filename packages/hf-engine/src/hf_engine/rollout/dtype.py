"""The dtypes that a rollout engine may compute in, for any training dtype: shards are cast on their way."""

from __future__ import annotations

from typing import Literal, get_args

from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = ["RolloutDtype", "check_dtype"]

RolloutDtype = Literal["float32", "bfloat16", "float16"]


def check_dtype(dtype: object) -> None:
    """Refuse what no engine computes in.

    Raises:
        BackendError: naming the dtypes that there are.
    """
    known = get_args(RolloutDtype)
    if dtype not in known:
        raise BackendError(f"dtype={show(dtype)}. Use one of {', '.join(map(repr, known))}")
